"""The largest scores of each row on NVIDIA GPUs: a bound found by halving, then a prefix sum.

A program holds a row, or a block of one, in registers. Floating-point numbers are turned into
integers of the same order, and what `count` of them reach is searched between the lowest and the
highest, l <= t <= h, one comparison of the whole row in each round,

    m = ceil((l + h) / 2),    l = m  if  sum_s (key_s >= m) >= count  else  h = m - 1,

until exactly `count` reach l, for distinct numbers long before l = h. Of numbers that equal it the
first are taken. A prefix sum over what is taken says where each index goes.

Of a row of several blocks each block gives its `count` largest, and the largest of those are the
row's: they stand in order, so that of equal ones the first are still the first.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_gpu, triton_lacks

# Scores of a program: 32 for each of its threads. A prefix sum counts them in 16 bits.
_BLOCK = 1 << 15
_SCORES_PER_WARP = 1 << 9
_MOST_WARPS = 32
_LOWEST = -(2**31)


def why_not(scores, *, count: int) -> str | None:
    """The reason this kernel cannot serve a call, or None."""
    if scores.dtype.itemsize not in (2, 4):
        return f"scores of {scores.dtype}: keys have 32 bits"
    width = scores.shape[1]
    if width > _BLOCK and count > _BLOCK // 2:
        return f"{count} of {width}: of rows above {_BLOCK} it finds at most {_BLOCK // 2}"
    return triton_lacks(target_gpu(), scores)


def _ordered(scores: Float[Array, " S"]) -> Int[Array, " S"]:
    """Integers in the order of the numbers, -0.0 before 0.0; the lowest would be a NaN."""
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _bound(keys: Int[Array, " S"], count: int) -> Int[Array, ""]:
    """A number that exactly `count` keys reach, or the largest one that more of them do."""

    def unsettled(state):
        low, high, reached = state
        return (low < high) & (reached != count)

    def halve(state):
        low, high, reached = state
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and their sum would overflow
        now = (keys >= middle).astype(jnp.int32).sum()
        enough = now >= count
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, now, reached),
        )

    everything = (keys.min(), keys.max(), jnp.int32(keys.size))
    return lax.while_loop(unsettled, halve, everything)[0]


def _kernel(scores_ref, out_ref, *, width: int, block: int, count: int):
    row, start = pl.program_id(0), pl.program_id(1) * block
    index = start + jnp.arange(block, dtype=jnp.int32)
    inside = index < width
    scores = plt.load(scores_ref.at[row, pl.ds(start, block)], mask=inside, other=0.0)
    keys = jnp.where(inside, _ordered(scores), _LOWEST)
    bound = _bound(keys, count)
    more, same = keys > bound, keys == bound
    # Both prefix sums at once, in halves of 32 bits.
    marks = more.astype(jnp.int32) + (same.astype(jnp.int32) << 16)
    before = jnp.cumsum(marks) - marks
    more_before, same_before = before & 0xFFFF, lax.shift_right_logical(before, 16)
    needed = count - more.astype(jnp.int32).sum()
    taken = more | (same & (same_before < needed))
    place = more_before + jnp.minimum(same_before, needed)
    plt.store(out_ref.at[row, pl.program_id(1) * count + place], index, mask=taken)


def select_largest_triton(
    scores: Float[Array, "R S"], *, count: int, interpret: bool = False
) -> Int[Array, "R count"]:
    """Serve as the GPU form of `select_largest`; same arguments."""
    rows, width = scores.shape
    block = min(pl.next_power_of_2(width), _BLOCK)
    blocks = pl.cdiv(width, block)
    taken = min(count, block)
    index = pl.pallas_call(
        lambda *refs: _kernel(*refs, width=width, block=block, count=taken),
        grid=(rows, blocks),
        out_shape=jax.ShapeDtypeStruct((rows, blocks * taken), jnp.int32),
        compiler_params=plt.CompilerParams(
            num_warps=min(max(block // _SCORES_PER_WARP, 1), _MOST_WARPS), num_stages=1
        ),
        interpret=interpret,
        name="select_largest_triton",
    )(scores)
    if blocks == 1:
        return index
    # What the last block lacks lies behind the row's end, and comes last.
    best = jnp.take_along_axis(scores, index, axis=-1, mode="fill", fill_value=-jnp.inf)
    among = select_largest_triton(best, count=count, interpret=interpret)
    return jnp.take_along_axis(index, among, axis=-1)
