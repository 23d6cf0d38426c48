"""The largest scores of each row on TPUs: a threshold by bisection, then their places by search.

A program holds a multiple of eight rows in vector memory. Floating-point numbers are mapped to
integers in the same order. Bisection finds the threshold that `count` of them reach, as on a GPU
(`pallas_kernels.select.gpu`), for all rows of a program at once,

    m = ceil((l + h) / 2),    l = m  if  sum_s (key_s >= m) >= count  else  h = m - 1.

There is no scatter on a TPU, so instead of writing selected indices to their places, each place
searches for its index. Within a chunk of 128 scores let c_s be the number of selected ones up to s,
computed by a product with a triangle of ones, and b the number before the chunk. Place p holds the
first s with c_s > p - b, found by a binary search of seven steps in which all lanes look into the
chunk at once. Ties at the threshold go to the first; they are counted in the same way.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_LANES = 128
_LOWEST = -(2**31)
# The most selected numbers of a row: every place looks into every chunk.
_MOST = 2048
# Bytes of the scores of a program.
_BLOCK_BYTES = 2 << 20
# The most rows of a program.
_MOST_ROWS = 64
# The most bytes of a row of scores: memory holds eight rows, eight more in flight, and their keys.
_ROW_BYTES = 1 << 19


def why_not(scores, *, count: int) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    if scores.dtype not in (jnp.bfloat16, jnp.float32):
        return f"serves bfloat16 and float32, not {scores.dtype}"
    if count > _MOST:
        return f"finds at most {_MOST} scores of a row, not {count}"
    if scores.shape[1] > _ROW_BYTES // 4:
        return f"serves rows of at most {_ROW_BYTES // 4} scores, not {scores.shape[1]}"
    return None


def _ordered(scores: Float[Array, "R S"]) -> Int[Array, "R S"]:
    """Maps numbers to integers in the same order, both zeros to one; no number maps to _LOWEST."""
    bits = pltpu.bitcast(scores.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _kernel(scores_ref, out_ref, keys_ref, *, width: int, count: int):
    rows, padded = keys_ref.shape
    chunks = padded // _LANES
    slot = lax.broadcasted_iota(jnp.int32, (rows, padded), 1)
    keys = jnp.where(slot < width, _ordered(scores_ref[...]), _LOWEST)
    keys_ref[...] = keys

    def reaching(threshold):
        """Returns the number of keys of each row that reach its threshold."""
        return jnp.sum((keys_ref[...] >= threshold).astype(jnp.int32), axis=1, keepdims=True)

    def unfinished(state):
        low, high, reached = state
        return jnp.any((low < high) & (reached != count))

    def halve(state):
        low, high, reached = state
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        now = reaching(middle)
        enough = now >= count
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, now, reached),
        )

    low = jnp.min(jnp.where(slot < width, keys, -_LOWEST - 1), axis=1, keepdims=True)
    high = jnp.max(keys, axis=1, keepdims=True)
    everything = jnp.full((rows, 1), width, jnp.int32)
    threshold, _, _ = lax.while_loop(unfinished, halve, (low, high, everything))
    # The number of keys equal to the threshold to select.
    needed = count - jnp.sum((keys_ref[...] > threshold).astype(jnp.int32), axis=1, keepdims=True)

    index = lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 0)
    until = (index <= lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 1)).astype(jnp.bfloat16)

    def up_to(marks):
        """Returns the running count of marks in a chunk; at most 128, so exact."""
        counts = jnp.dot(marks.astype(jnp.bfloat16), until, preferred_element_type=jnp.float32)
        return counts.astype(jnp.int32)

    lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    out_ref[...] = jnp.zeros_like(out_ref)

    def search(chunk, state):
        taken_before, same_before = state
        keys = keys_ref[:, pl.ds(pl.multiple_of(chunk * _LANES, _LANES), _LANES)]
        same = (keys == threshold).astype(jnp.int32)
        same_counts = up_to(same)
        first = same_counts + same_before <= needed
        taken = (keys > threshold).astype(jnp.int32) + jnp.where(first, same, 0)
        counts = up_to(taken)
        total = counts[:, _LANES - 1 :]

        def place_block(block, carry):
            columns = pl.ds(pl.multiple_of(block * _LANES, _LANES), _LANES)
            place = lane + block * _LANES - taken_before
            found = jnp.zeros_like(lane)
            for step in (64, 32, 16, 8, 4, 2, 1):
                probed = jnp.take_along_axis(counts, found + (step - 1), axis=1)
                found += jnp.where(probed <= place, step, 0)
            here = (place >= 0) & (place < total)
            out_ref[:, columns] = jnp.where(here, chunk * _LANES + found, out_ref[:, columns])
            return carry

        lax.fori_loop(0, out_ref.shape[1] // _LANES, place_block, 0)
        return taken_before + total, same_before + same_counts[:, _LANES - 1 :]

    none = jnp.zeros((rows, 1), jnp.int32)
    lax.fori_loop(0, chunks, search, (none, none))


def select_largest_tpu(
    scores: Float[Array, "R S"], *, count: int, interpret=False
) -> Int[Array, "R count"]:
    """Computes `select_largest` on TPUs."""
    rows, width = scores.shape
    padded = -(-width // _LANES) * _LANES
    packing = 32 // scores.dtype.itemsize
    fitting = _BLOCK_BYTES // (padded * 4 * packing) * packing
    block = max(packing, min(fitting, _MOST_ROWS, -(-rows // packing) * packing))
    places = -(-count // _LANES) * _LANES
    found = pl.pallas_call(
        functools.partial(_kernel, width=width, count=count),
        grid=(-(-rows // block),),
        in_specs=[pl.BlockSpec((block, padded), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((block, places), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, places), jnp.int32),
        scratch_shapes=[pltpu.VMEM((block, padded), jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=32 << 20
        ),
        interpret=interpret,
        name="select_largest",
    )(scores)
    return found[:, :count]
