"""`select_largest`: where the largest scores of each row stand.

Which pages a query reads, which values it fetches: what matters is which scores are among the
largest, not how they rank among themselves. So nothing is sorted: a bound is found that as many
scores reach, and the places of those are written down in their order.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, ImplementationChoice, Operation, deferred
from pallas_kernels.select.reference import select_largest_xla

OPERATION = Operation(
    "select_largest",
    (
        Implementation(
            "triton",
            "cuda",
            deferred("pallas_kernels.select.gpu", "select_largest_triton"),
            deferred("pallas_kernels.select.gpu", "why_not"),
        ),
        Implementation("xla", None, select_largest_xla),
    ),
)


def select_largest(
    scores: Float[Array, "R S"],
    count: int,
    *,
    implementation: ImplementationChoice = None,
) -> Int[Array, "R count"]:
    """Finds the largest entries of each row.

    Args:
      scores: no NaN, whose place in the order is not defined. -0.0 equals 0.0.
      count: how many of each row, static, 1 to S.
      implementation: "triton", "xla", several of them to be tried in order, or None for the best
        one on the platform that the call is lowered for.

    Returns:
      Indices of the `count` largest entries, in ascending order; of equal entries the first.

    Raises:
      ValueError: scores that are no rows of floating-point numbers, or a count out of range.
      NotImplementedError: a named implementation cannot serve the call, with the reason.
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
