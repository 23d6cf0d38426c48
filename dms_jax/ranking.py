"""Which numbers of a row are the largest, and an order with some of them first: no row is sorted.

Which are the largest, in no order, takes eight passes over numbers of 32 bits, sixteen over those
of 64, and a running sum.
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
    """Returns the least number whose greater ones have weights that sum to less than the budget.

    The search goes over the bits of numbers, in an integer form that has their order, four at a
    time and the highest first: of the 16 values of a digit, the first beyond which less than the
    budget remains. Each digit takes one pass over the numbers. On a GPU they are no loop: inside of
    a choice that the device makes, XLA would have the host wait for each one, once a step, with
    everything that is to be launched behind it. On a CPU a loop compiles in half of the time.

    Args:
      x: the numbers.
      weigh: returns the weight of each, at least 0.
      budget: the sum that the greater numbers must not reach, above 0; a number, or one per row.
    """
    size = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{size}")
    digits = jnp.arange(1, 16, dtype=unsigned)

    def with_digit(place, found):
        shift = jnp.asarray(size - 4 - 4 * place, unsigned)
        starts = _number(found + (digits << shift), x.dtype)
        # Together with what changes: otherwise XLA would keep the weights in memory beside the
        # numbers and read both, where they are quickly computed again.
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
    """Marks the `count` largest scores of each row; among equal scores, the earlier ones.

    # scores: [3, 1, 3, 2]  count: 1  Out: [1, 0, 0, 0]

    Args:
      scores: numbers; a row with NaN, which has no place in the order, may be marked less often.
      count: how many, per row; the whole row where it has fewer.
    """
    least = least_kept(scores, lambda x: jnp.ones_like(x, jnp.int32), count[:, None])
    above, equal = scores > least, scores == least
    left = count[:, None] - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= left))


def marked_first(marks: Bool[Array, "*rows V"]) -> Int[Array, "*rows V"]:
    """Returns the indices of what is marked, in ascending order, then those of the others.

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
    """Returns the weights of the numbers that `chosen(numbers, start)` says, summed per start."""
    # Sums with equal inputs, which a GPU computes in one kernel.
    sums = [
        jnp.sum(jnp.where(chosen(x, starts[:, i : i + 1]), weights, 0), -1, dtype=weights.dtype)
        for i in range(starts.shape[1])
    ]
    return jnp.stack(sums, -1)


def _number(ordered: UInt[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Returns the numbers of integers that have the order of the numbers; below all of them -inf.

    # In (16 bits): 0x3fff, 0x8000, 0xc000  Out: -2, 0, 2
    """
    sign = ordered.dtype.type(1 << (8 * ordered.dtype.itemsize - 1))
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    number = jax.lax.bitcast_convert_type(bits, dtype)
    return jnp.where(jnp.isnan(number) & (ordered < sign), -jnp.inf, number)
