"""The largest scores of each row on NVIDIA GPUs: a threshold by bisection, then places by search.

A program holds a row in registers. Floating-point numbers are mapped to integers in the same order.
Bisection between the lowest and the highest, l <= t <= h, finds the threshold t that `count` of
them reach, with one comparison of the whole row per round,

    m = ceil((l + h) / 2),    l = m  if  sum_s (key_s >= m) >= count  else  h = m - 1,

until exactly `count` reach l, which for distinct numbers happens long before l = h. Ties at l go to
the first.

Mosaic GPU has no scatter, so instead of writing selected indices to their places, each place
searches for its index, as on a TPU. The row is viewed as a matrix of 64 lines, the last ones empty
for a short row. Products with a triangle of ones count the selected numbers of each line up to each
column, and a comparison of all pairs of lines counts those before each line. For 64 places at a
time, one product picks the counts of each place's line, and the number of counts that do not exceed
the place is its column.

A longer row is cut into groups of W neighbors. The `count` largest scores are in the `count` groups
with the largest maxima, so these groups are selected first, then the scores in them: with W =
sqrt(S / count) each selection is among sqrt(S count). Groups stay in order, so ties still go to the
first. XLA computes the maxima, fused with the scores.

The products are those of Ampere (`mma`), which every later GPU has.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import mosaic_lacks, target_gpu
from pallas_kernels.mma import ACC, LHS, RHS, mma
from pallas_kernels.padding import pad_axis
from pallas_kernels.stores import store

# Lines of the matrix view of a row; columns come in multiples of 16.
_LINES, _COLUMNS = 64, 16
# Threads of a program; each holds a part of a row.
_THREADS = 128
# The most scores of a program: counts up to 128 per line are exact in bfloat16.
_MOST = 1 << 13
_LOWEST = -(2**31)


def why_not(scores, *, count: int) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    if scores.dtype.itemsize not in (2, 4):
        return f"scores of {scores.dtype}: keys have 32 bits"
    width = scores.shape[1]
    if width > _MOST and count > _MOST // 4:
        return f"{count} of {width}: of rows above {_MOST} it finds at most {_MOST // 4}"
    return mosaic_lacks(target_gpu())


def _ordered(scores: Float[Array, "..."]) -> Int[Array, "..."]:
    """Maps numbers to integers in the same order, both zeros to one; no number maps to _LOWEST."""
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _threshold(keys: Int[Array, "lines columns"], count: int) -> Int[Array, ""]:
    """Returns a threshold that exactly `count` keys reach, or the largest one that more reach."""

    def unfinished(state):
        low, high, reached = state
        return (low < high) & (reached != count)

    def halve(state):
        low, high, reached = state
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        now = jnp.where(keys >= middle, 1, 0).sum()
        enough = now >= count
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, now, reached),
        )

    everything = (keys.min(), keys.max(), jnp.int32(keys.size))
    return lax.while_loop(unfinished, halve, everything)[0]


def _iota(shape, axis, layout):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def _load_lines(ref, layout):
    """Loads a value of each line, repeated over the first axis of a square."""
    vector = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
    return lax.broadcast_in_dim(vector, (_LINES, _LINES), [1])


def _body(scores_ref, out_ref, memory, *, count: int, interpret: bool):
    totals_smem, starts_smem, ends_smem, counts_smem, keys_smem = memory
    row = lax.axis_index("row")
    _, lines, columns = scores_ref.shape
    square, block = (_LINES, _LINES), (_LINES, _COLUMNS)

    def fill(shape, value, dtype):
        return jnp.full(shape, value, dtype)

    def strided(lines, size):
        shape = (lines, columns)
        return plgpu.Layout.WG_STRIDED(shape, math.gcd(lines * columns // _THREADS, 16 // size))

    keys = _ordered(
        plgpu.load(scores_ref.at[row], layout=strided(lines, scores_ref.dtype.itemsize))
    )
    store(keys_smem.at[pl.ds(0, lines)], keys)
    if lines < _LINES:
        # Smaller than any number, and last, so never selected: there are `count` others.
        rest = _LINES - lines
        padding = plgpu.layout_cast(fill((rest, columns), _LOWEST, jnp.int32), strided(rest, 4))
        store(keys_smem.at[pl.ds(lines, rest)], padding)
    threshold = _threshold(keys, count)
    # The number of entries equal to the threshold to select.
    needed = count - jnp.where(keys > threshold, 1, 0).sum()

    # The keys again, as operands of products.
    keys = plgpu.load(keys_smem, layout=LHS, optimized=False)
    more, same = keys > threshold, keys == threshold

    def marks(one, other, dtype):
        """Marks two kinds of numbers in one sum, which counts both at once."""
        zero = fill(keys.shape, 0, dtype)
        return jnp.where(
            more,
            fill(keys.shape, one, dtype),
            jnp.where(same, fill(keys.shape, other, dtype), zero),
        )

    def taken(packed):
        return (packed & 0xFFFF) + jnp.minimum(packed >> 16, needed)

    store(totals_smem, marks(1, 1 << 16, jnp.int32).sum(axis=1))
    totals = _load_lines(totals_smem, ACC)
    line, other = _iota(square, 0, ACC), _iota(square, 1, ACC)
    before = jnp.where(other < line, totals, 0).sum(axis=1)
    through = jnp.where(other <= line, totals, 0).sum(axis=1)
    store(starts_smem, taken(before))
    store(ends_smem, taken(through))

    # Counts within lines: of larger numbers in the lower 8 bits, of equal ones above them.
    marked = marks(1.0, 256.0, jnp.bfloat16)
    small = (_COLUMNS, _COLUMNS)
    ones = plgpu.layout_cast(fill(small, 1.0, jnp.bfloat16), RHS)
    # Through memory: an iota in the layout of right operands is wrong in jax 0.11 and 0.12, which
    # count its pairs of numbers along the columns although they lie along the rows.
    up_to = _iota(block, 0, ACC) <= _iota(block, 1, ACC)
    triangle = jnp.where(up_to, fill(block, 1.0, jnp.bfloat16), fill(block, 0.0, jnp.bfloat16))
    corner = counts_smem.at[:, pl.ds(0, _COLUMNS)]
    store(corner, triangle)
    triangle = plgpu.load(corner.at[pl.ds(0, _COLUMNS)], layout=RHS, optimized=False)
    same_before = lax.broadcast_in_dim(before >> 16, block, [0])
    skipped = jnp.minimum(same_before, needed)
    sums = plgpu.layout_cast(fill(block, 0.0, jnp.float32), ACC)
    for start in range(0, columns, _COLUMNS):
        part = marked[:, start : start + _COLUMNS]
        packed = mma(sums, part, triangle, interpret).astype(jnp.int32)
        counts = (packed & 255) + jnp.minimum((packed >> 8) + same_before, needed) - skipped
        target = counts_smem.at[:, pl.ds(start, _COLUMNS)]
        store(target, counts.astype(jnp.float32).astype(jnp.bfloat16))
        sums = mma(sums, part, ones, interpret)

    def find(chunk, _):
        """Finds the indices of 64 places."""

        def line_of(layout):
            place = _iota(square, 0, layout) + chunk * _LINES
            start = _load_lines(starts_smem, layout)
            here = (start <= place) & (place < _load_lines(ends_smem, layout))
            return here, place - start

        here, _ = line_of(LHS)
        chosen = jnp.where(here, fill(square, 1, jnp.bfloat16), fill(square, 0, jnp.bfloat16))
        # The line of each place, and the place in it, in one sum.
        here, inside = line_of(ACC)
        packed = jnp.where(here, inside * _LINES + other, 0).sum(axis=1)
        inside = lax.broadcast_in_dim((packed >> 6).astype(jnp.float32), block, [0])
        passed = plgpu.layout_cast(fill(block, 0, jnp.int32), ACC)
        zeros = plgpu.layout_cast(fill(block, 0.0, jnp.float32), ACC)
        for start in range(0, columns, _COLUMNS):
            counts = counts_smem.at[:, pl.ds(start, _COLUMNS)]
            counts = plgpu.load(counts, layout=RHS, optimized=False)
            passed += jnp.where(mma(zeros, chosen, counts, interpret) <= inside, 1, 0)
        index = (packed & (_LINES - 1)) * columns + passed.sum(axis=1)
        store(out_ref.at[row, pl.ds(chunk * _LINES, _LINES)], index)

    lax.fori_loop(0, out_ref.shape[1] // _LINES, find, None)


def select_largest_mosaic(
    scores: Float[Array, "R S"], *, count: int, interpret=None
) -> Int[Array, "R count"]:
    """Computes `select_largest` with the kernel.

    Args:
      scores: see `select_largest`.
      count: see `select_largest`.
      interpret: parameters of the interpreter, for tests.
    """
    if scores.shape[1] > _MOST:
        return _by_groups(scores, count, interpret)
    rows, width = scores.shape
    columns = -(-width // (_LINES * _COLUMNS)) * _COLUMNS
    # Padding is smallest and comes last, so it is never selected: there are `count` other scores.
    scores = pad_axis(scores, 1, math.lcm(_THREADS, columns), constant_values=-jnp.inf)

    def body(scores_ref, out_ref, *memory):
        _body(scores_ref, out_ref, memory, count=count, interpret=interpret is not None)

    per_line = plgpu.SMEM((_LINES,), jnp.int32)
    found = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, -(-count // _LINES) * _LINES), jnp.int32),
        scratch_types=[
            *[per_line] * 3,
            plgpu.SMEM((_LINES, columns), jnp.bfloat16),
            plgpu.SMEM((_LINES, columns), jnp.int32),
        ],
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="select_largest",
    )(scores.reshape(rows, -1, columns))
    return found[:, :count]


def _by_groups(scores: Float[Array, "R S"], count: int, interpret) -> Int[Array, "R count"]:
    """Selects groups of neighbors by their maxima, then scores within those groups."""
    rows, width = scores.shape
    select = functools.partial(select_largest_mosaic, count=count, interpret=interpret)
    group = 1 << round(math.log2(width / count) / 2)
    # Padding is smallest and comes last, so it is never selected: there are `count` other scores.
    groups = pad_axis(scores, 1, group, constant_values=-jnp.inf).reshape(rows, -1, group)
    best = select(groups.max(-1))
    held = jnp.take_along_axis(groups, best[..., None], axis=1).reshape(rows, -1)
    among = select(held)
    return jnp.take_along_axis(best, among // group, axis=-1) * group + among % group
