"""`select_largest`: the indices of the largest scores of each row (top-k without an order).

The pages that a query reads, or the values that it fetches, depend on the set of largest scores,
not on their order. So nothing is sorted: the operation finds a threshold that `count` scores reach,
and writes their indices in ascending order.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.select.reference import select_largest_xla

OPERATION = Operation(
    "select_largest",
    (
        deferred("mosaic_gpu", "cuda", "pallas_kernels.select.gpu", "select_largest_mosaic"),
        Implementation("xla", None, select_largest_xla),
    ),
)


def select_largest(
    scores: Float[Array, "R S"],
    count: int,
    *,
    implementation: str | None = None,
) -> Int[Array, "R count"]:
    """Finds the largest entries of each row.

    Args:
      scores: floating-point numbers without NaN, which has no order. -0.0 equals 0.0.
      count: number of entries per row; static, 1 to S.
      implementation: "mosaic_gpu" or "xla"; None chooses the best one for the
        platform that the call is lowered for.

    Returns:
      Indices of the `count` largest entries in ascending order; ties go to the first.

    Raises:
      ValueError: the scores are not rows of floating-point numbers, or the count is out of range.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    if scores.ndim != 2 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            "select_largest: scores must be floating-point numbers [R, S], are "
            f"{scores.dtype}{list(scores.shape)}"
        )
    rows, width = scores.shape
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= width:
        raise ValueError(f"select_largest: count must be in 1..{width}, is {count!r}")
    if rows == 0 or count == width:
        return jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (rows, count))
    return OPERATION(implementation, scores, count=count)
