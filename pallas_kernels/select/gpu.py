"""The largest scores of each row on NVIDIA GPUs: a threshold by bisection, then a prefix sum.

A program holds a row in registers. Floating-point numbers are mapped to integers in the same order,
and the threshold t that `count` of them reach is found by bisection between the lowest and the
highest, l <= t <= h, with one comparison of the whole row in each round,

    m = ceil((l + h) / 2),    l = m  if  sum_s (key_s >= m) >= count  else  h = m - 1,

until exactly `count` reach l, which for distinct numbers happens long before l = h. Of several
numbers equal to l the first are selected. A prefix sum over the selected numbers gives the position
of each index in the result.

A longer row is cut into groups of W neighbors. The `count` largest scores are in the `count` groups
with the largest maxima, so first those groups are selected, then the scores in them: with
W = sqrt(S / count) each selection is among sqrt(S count). Groups stay in order, so that of equal
numbers the first are still selected. XLA computes the maxima, fused with the scores.

For 256 rows on an H200 (`experiments/results/kernels/select.json`) 64 of 1024 take 5 us, and 20 us
by XLA's sorts; 128 of 32768 take 26 us, and 649 us by XLA's sorts.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_gpu, triton_lacks

# Maximum number of scores of a program; the prefix sum counts them in 16 bits.
_MOST = 1 << 13
_SCORES_PER_WARP = 1 << 9
_LOWEST = -(2**31)


def why_not(scores, *, count: int) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    if scores.dtype.itemsize not in (2, 4):
        return f"scores of {scores.dtype}: keys have 32 bits"
    width = scores.shape[1]
    if width > _MOST and count > _MOST // 4:
        return f"{count} of {width}: of rows above {_MOST} it finds at most {_MOST // 4}"
    return triton_lacks(target_gpu(), scores)


def _ordered(scores: Float[Array, " S"]) -> Int[Array, " S"]:
    """Maps numbers to integers in the same order, both zeros to one; no number maps to _LOWEST."""
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _threshold(keys: Int[Array, " S"], count: int) -> Int[Array, ""]:
    """Returns a threshold that exactly `count` keys reach, or the largest one that more reach."""

    def unfinished(state):
        low, high, reached = state
        return (low < high) & (reached != count)

    def halve(state):
        low, high, reached = state
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        now = (keys >= middle).astype(jnp.int32).sum()
        enough = now >= count
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, now, reached),
        )

    everything = (keys.min(), keys.max(), jnp.int32(keys.size))
    return lax.while_loop(unfinished, halve, everything)[0]


def _kernel(scores_ref, out_ref, *, width: int, block: int, count: int):
    row = pl.program_id(0)
    index = jnp.arange(block, dtype=jnp.int32)
    inside = index < width
    scores = plt.load(scores_ref.at[row, pl.ds(0, block)], mask=inside, other=0.0)
    keys = jnp.where(inside, _ordered(scores), _LOWEST)
    threshold = _threshold(keys, count)
    more, same = keys > threshold, keys == threshold
    # Both prefix sums at once, each in one half of 32 bits.
    marks = more.astype(jnp.int32) + (same.astype(jnp.int32) << 16)
    before = jnp.cumsum(marks) - marks
    more_before, same_before = before & 0xFFFF, lax.shift_right_logical(before, 16)
    needed = count - more.astype(jnp.int32).sum()
    taken = more | (same & (same_before < needed))
    place = more_before + jnp.minimum(same_before, needed)
    plt.store(out_ref.at[row, place], index, mask=taken)


def select_largest_triton(
    scores: Float[Array, "R S"], *, count: int, interpret: bool = False
) -> Int[Array, "R count"]:
    """Computes `select_largest` with the Triton kernel."""
    rows, width = scores.shape
    if width > _MOST:
        return _by_groups(scores, count, interpret)
    block = pl.next_power_of_2(width)
    return pl.pallas_call(
        functools.partial(_kernel, width=width, block=block, count=count),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, count), jnp.int32),
        compiler_params=plt.CompilerParams(
            num_warps=max(block // _SCORES_PER_WARP, 1), num_stages=1
        ),
        interpret=interpret,
        name="select_largest_triton",
    )(scores)


def _by_groups(scores: Float[Array, "R S"], count: int, interpret: bool) -> Int[Array, "R count"]:
    """Selects groups of neighbors by their maxima, then scores within those groups."""
    rows, width = scores.shape
    select = functools.partial(select_largest_triton, count=count, interpret=interpret)
    group = 1 << round(math.log2(width / count) / 2)
    # Padding is smallest and comes last, so it is never selected: there are `count` other scores.
    scores = jnp.pad(scores, ((0, 0), (0, -width % group)), constant_values=-jnp.inf)
    groups = scores.reshape(rows, -1, group)
    best = select(groups.max(-1))
    held = jnp.take_along_axis(groups, best[..., None], axis=1).reshape(rows, -1)
    among = select(held)
    return jnp.take_along_axis(best, among // group, axis=-1) * group + among % group
