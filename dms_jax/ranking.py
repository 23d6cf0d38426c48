"""Selects the largest numbers of rows, and moves marked ones first, without sorting.

Selecting the largest, unordered, takes eight passes over 32-bit numbers (sixteen over 64-bit ones)
and a running sum.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt


def least_kept(
    x: Float[Array, "B V"], weigh: Callable[[Array], Array], budget: Any
) -> Float[Array, "B 1"]:
    """Returns the smallest number whose greater ones have weights of less than the budget in sum.

    The search goes over the bits of the numbers, in an order-preserving integer form, four bits at
    a time from the highest: of the 16 values of a digit it takes the first beyond which less than
    the budget remains. Each digit takes one pass over the numbers. On a GPU the passes are
    unrolled: for a loop inside a device-side conditional, XLA would make the host wait for each
    pass in every step, and delay all later launches. On a CPU a loop halves the compile time.

    Args:
      x: the numbers.
      weigh: returns the weight of each number, at least 0.
      budget: the sum that the greater numbers must not reach, above 0; a number, or one per row.
    """
    size = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{size}")
    digits = jnp.arange(1, 16, dtype=unsigned)

    def with_digit(place, found):
        shift = jnp.asarray(size - 4 - 4 * place, unsigned)
        starts = _number(found + (digits << shift), x.dtype)
        # A barrier with the changing values: otherwise XLA would store the weights beside the
        # numbers and read both, although recomputing the weights is fast.
        own, starts = jax.lax.optimization_barrier((x, starts))
        reached = sums_of_some(own, weigh(own), starts, operator.ge) >= budget
        return found + (reached.sum(-1, keepdims=True, dtype=unsigned) << shift)

    def in_line(found):
        for place in range(size // 4):
            found = with_digit(place, found)
        return found

    def in_a_loop(found):
        return jax.lax.fori_loop(0, size // 4, with_digit, found)

    found = jnp.zeros((len(x), 1), unsigned)
    return _number(jax.lax.platform_dependent(found, cpu=in_a_loop, default=in_line), x.dtype)


def mark_largest(scores: Float[Array, "B V"], count: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """Marks the `count` largest scores of each row; ties go to the earlier ones.

    # scores: [3, 1, 3, 2]  count: 1  Out: [1, 0, 0, 0]

    Args:
      scores: numbers; a row with NaN may get fewer marks.
      count: number per row; a row with fewer numbers is marked whole.
    """
    least = least_kept(scores, lambda x: jnp.ones_like(x, jnp.int32), count[:, None])
    above, equal = scores > least, scores == least
    left = count[:, None] - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= left))


def marked_first(marks: Bool[Array, "*rows V"]) -> Int[Array, "*rows V"]:
    """Returns the indices of marked entries, in ascending order, then those of the others.

    # marks: [0, 1, 0, 1]  Out: [1, 3, 0, 2]
    """
    marked = jnp.cumsum(marks, -1, dtype=jnp.int32)
    others = marked[..., -1:] + jnp.cumsum(~marks, -1, dtype=jnp.int32)
    place = jnp.where(marks, marked, others) - 1
    index = jnp.broadcast_to(jnp.arange(marks.shape[-1], dtype=jnp.int32), marks.shape)
    return jnp.put_along_axis(index, place, index, axis=-1, inplace=False)


def sums_of_some(
    x: Float[Array, "B V"],
    weights: Shaped[Array, "B V"],
    starts: Float[Array, "B n"],
    chosen: Callable[[Array, Array], Array],
) -> Shaped[Array, "B n"]:
    """Returns, per start, the sum of the weights of the numbers with `chosen(numbers, start)`."""
    # Sums over the same inputs, which a GPU computes in one kernel.
    sums = [
        jnp.sum(jnp.where(chosen(x, starts[:, i : i + 1]), weights, 0), -1, dtype=weights.dtype)
        for i in range(starts.shape[1])
    ]
    return jnp.stack(sums, -1)


def _number(ordered: UInt[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Inverts the order-preserving integer form; integers below all numbers give -inf.

    # In (16 bits): 0x3fff, 0x8000, 0xc000  Out: -2, 0, 2
    """
    sign = ordered.dtype.type(1 << (8 * ordered.dtype.itemsize - 1))
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    number = jax.lax.bitcast_convert_type(bits, dtype)
    return jnp.where(jnp.isnan(number) & (ordered < sign), -jnp.inf, number)
