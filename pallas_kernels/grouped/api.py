"""`grouped_product`: rows in consecutive groups, times the matrix of their group.

This is the product of a mixture of experts with rows sorted by expert. Work and memory grow with
the rows, not with rows times groups, on every platform: `jax.lax.ragged_dot` is a kernel only on
TPU, and elsewhere a product of all rows with all matrices, with a masked copy of the rows for each
group (34 GB for 8,192 tokens of Qwen3-30B-A3B).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.grouped import reference

OPERATION = Operation(
    "grouped_product",
    (
        deferred("mosaic_gpu", "cuda", "pallas_kernels.grouped.gpu", "product_mosaic"),
        Implementation("ragged_dot", "tpu", reference.product_ragged_dot),
        Implementation("xla", None, reference.product_xla),
    ),
)
GRADIENT = Operation(
    "gradient of grouped_product",
    (
        Implementation("ragged_dot", "tpu", reference.gradient_ragged_dot),
        Implementation("xla", None, reference.gradient_xla),
    ),
)


def grouped_product(
    x: Float[Array, "R n"],
    matrices: Float[Array, "X n m"],
    counts: Int[Array, " X"],
    *,
    implementation: str | None = None,
) -> Float[Array, "R m"]:
    """Multiplies rows by the matrix of their group; differentiable in rows and matrices.

    Args:
      x: the rows of the first group, those of the second, and so on.
      matrices: a matrix for each group.
      counts: number of rows of each group, 0 or more; their sum may be less than R.
      implementation: "mosaic_gpu", "ragged_dot" or "xla"; None chooses the best one for the
        platform that the call is lowered for.

    Returns:
      The products, accumulated in at least float32; zeros in rows after the last group.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    if x.ndim != 2 or matrices.ndim != 3 or counts.shape != matrices.shape[:1]:
        raise ValueError(
            "grouped_product: takes rows [R, n], matrices [X, n, m] and counts [X], got "
            f"{list(x.shape)}, {list(matrices.shape)} and {list(counts.shape)}"
        )
    if x.shape[1] != matrices.shape[1] or x.dtype != matrices.dtype:
        raise ValueError(
            f"grouped_product: rows of {x.shape[1]} {x.dtype} do not fit matrices of "
            f"{matrices.shape[1]} x {matrices.shape[2]} {matrices.dtype}"
        )
    return _product(
        jnp.asarray(x), jnp.asarray(matrices), jnp.asarray(counts, jnp.int32), implementation
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x, matrices, counts, implementation):
    return OPERATION(implementation, x, matrices, counts, transposed=False)


def _forward(x, matrices, counts, implementation):
    return _product(x, matrices, counts, implementation), (x, matrices, counts)


def _backward(implementation, residuals, gradient):
    x, matrices, counts = residuals
    gradient = jnp.asarray(gradient)  # a caller of `jax.vjp` may give NumPy's
    of_rows = OPERATION(implementation, gradient, matrices, counts, transposed=True)
    return of_rows, GRADIENT(None, x, gradient, counts), None


_product.defvjp(_forward, _backward)
