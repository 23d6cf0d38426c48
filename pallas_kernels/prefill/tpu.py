"""Prompt attention on TPUs, over tiles of paged and of dense keys.

The grid is (B, K, query tiles). A program takes the rows of a KV head's whole query group and walks
the key tiles listed by `tiles.make_plan`: while one is multiplied the next ones are copied from
their pages, or from the dense keys, into a ring of buffers. A tile is multiplied in 300 to 1,100
bundles of instructions, counting every branch (1 to 4 query heads per KV head). That is at most
about the latency of device memory, so several copies are in flight.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.padding import pad_axis
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.prefill.tiles import TILE, make_plan, order_by_count
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST
from pallas_kernels.training.tpu_blocks import why_too_wide

# Tiles in VMEM, a power of two: 8 of 64 KB with 128 dims of 16 bits.
BUFFERS = 8


def why_not(q, chunk: Chunk, past: Past, *, window: int, scale: float) -> str | None:
    """Returns why this kernel cannot serve the call, or None if it can."""
    del window
    page, group = past.page_size, q.shape[2] // chunk.k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"operands must be bfloat16 or float32, got {q.dtype}"
    if reason := why_too_wide(group, q.shape[3], q.dtype):
        return reason
    if page % 16 or TILE % min(page, TILE) or page % min(page, TILE):
        return f"a page must be 16 to {TILE} tokens and divide {TILE}, or a multiple; got {page}"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def prefill(
    q, chunk: Chunk, past: Past, *, window: int, scale: float, interpret=False
) -> jax.Array:
    """Computes `prefill_attention` on TPUs."""
    batch, length, heads, dim = q.shape
    kv_heads, page = chunk.k.shape[2], past.page_size
    group, k_pages, v_pages = heads // kv_heads, past.k_pages, past.v_pages
    plan = make_plan(chunk, past, window, TILE, order_by_count)
    padded = pad_axis(q, 1, TILE)
    queries = padded.shape[1]
    grouped = padded.reshape(batch, queries, kv_heads, group, dim)
    grouped = jnp.transpose(grouped, (0, 2, 3, 1, 4))
    dense = [jnp.swapaxes(x, 1, 2) for x in (plan.dense_k, plan.dense_v)]
    since = plan.since.reshape(-1, 1, TILE)
    tile_count = since.shape[0]
    until = plan.until.reshape(batch, kv_heads, tile_count, 1, TILE)
    past_tiles = tile_count - dense[0].shape[2] // TILE
    # A program's scalar memory: the ends of its visits, the visits, the page numbers.
    pages = jnp.broadcast_to(plan.pages[:, :, None], (*plan.visits.shape[:3], plan.pages.shape[2]))
    if past_tiles == 0:
        k_pages, v_pages = (jnp.zeros((1, page, dim), q.dtype) for _ in range(2))
        pages = jnp.zeros((*plan.visits.shape[:3], 1), jnp.int32)
    scalars = jnp.concatenate([plan.ends, plan.visits, pages], axis=-1)[:, :, :, None]

    def kernel(counts_ref, scalar_ref, q_ref, *refs):
        _program(refs, counts_ref, scalar_ref, q_ref, tile_count, past_tiles, page, scale)

    block = (None, None, group, TILE, dim)
    query = pl.BlockSpec(block, lambda b, h, i, *_: (b, h, 0, i, 0))
    own = pl.BlockSpec(
        (None, None, None, 1, scalars.shape[-1]),
        lambda b, h, i, *_: (b, h, i, 0, 0),
        memory_space=pltpu.SMEM,
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((BUFFERS, TILE, dim), q.dtype)
    output = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, queries // TILE),
            in_specs=[own, query, *[anywhere] * 6],
            out_specs=query,
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((BUFFERS, 2, 1, TILE), jnp.int32),
                pltpu.SemaphoreType.DMA((3, BUFFERS)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="prefill",
    )(chunk.counts.astype(jnp.int32), scalars, grouped, since, until, *dense, k_pages, v_pages)
    output = jnp.transpose(output, (0, 3, 1, 2, 4)).reshape(batch, queries, heads, dim)
    return output[:, :length]


def _program(refs, counts_ref, scalar_ref, q_ref, tile_count, past_tiles, page, scale):
    since_ref, until_ref, dense_k, dense_v, k_pages, v_pages, out_ref, *scratch = refs
    k_tiles, v_tiles, interval_tiles, semaphores = scratch
    batch, kv_head = pl.program_id(0), pl.program_id(1)
    group, _, dim = q_ref.shape
    rows, piece = group * TILE, min(page, TILE)
    whole_end, end = scalar_ref[0, 0], scalar_ref[0, 1]
    targets = (k_tiles, v_tiles)

    def start(step):
        tile, slot = scalar_ref[0, 2 + step], step & (BUFFERS - 1)
        for index, source in enumerate((since_ref.at[tile], until_ref.at[batch, kv_head, tile])):
            target, semaphore = interval_tiles.at[slot, index], semaphores.at[2, slot]
            pltpu.make_async_copy(source, target, semaphore).start()

        @pl.when(tile >= past_tiles)
        def _():
            keys = pl.ds(pl.multiple_of((tile - past_tiles) * TILE, TILE), TILE)
            for index, dense in enumerate((dense_k, dense_v)):
                source, semaphore = dense.at[batch, kv_head, keys], semaphores.at[index, slot]
                pltpu.make_async_copy(source, targets[index].at[slot], semaphore).start()

        @pl.when(tile < past_tiles)
        def _():
            for part in range(TILE // piece):
                first = tile * TILE + part * piece
                number = scalar_ref[0, 2 + tile_count + lax.div(first, jnp.int32(page))]
                offset = pl.multiple_of(lax.rem(first, jnp.int32(page)), piece)
                for index, pages in enumerate((k_pages, v_pages)):
                    source = pages.at[number, pl.ds(offset, piece)]
                    target = targets[index].at[slot, pl.ds(part * piece, piece)]
                    pltpu.make_async_copy(source, target, semaphores.at[index, slot]).start()

    def wait(slot):
        # A wait counts bytes, so one wait per tile is enough for any number of pieces.
        for index in range(2):
            target, semaphore = interval_tiles.at[slot, index], semaphores.at[2, slot]
            pltpu.make_async_copy(since_ref.at[0], target, semaphore).wait()
        for index, dense in enumerate((dense_k, dense_v)):
            source = dense.at[batch, kv_head, pl.ds(0, TILE)]
            target, semaphore = targets[index].at[slot], semaphores.at[index, slot]
            pltpu.make_async_copy(source, target, semaphore).wait()

    q = q_ref[...].reshape(rows, dim)
    first_query = pl.program_id(2) * TILE

    def multiply(a, b, contract):
        exact = q.dtype == jnp.float32
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        )

    def body(step, carry, masked):
        accumulator, maximum, total = carry
        slot, later = step & (BUFFERS - 1), step + (BUFFERS - 1)

        @pl.when(later < end)
        def _():
            start(later)

        wait(slot)
        scores = multiply(q, k_tiles[slot], (1, 1)) * (scale * LOG2E)
        if masked:
            position = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            position = lax.rem(position, jnp.int32(TILE)) + first_query
            since, until = interval_tiles[slot, 0], interval_tiles[slot, 1]
            scores = jnp.where((position >= since) & (position <= until), scores, HIDDEN)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1, keepdims=True))
        shrink = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - new_maximum)
        total = total * shrink + weights.sum(axis=1, keepdims=True)
        values = multiply(weights.astype(q.dtype), v_tiles[slot], (1, 0))
        return accumulator * shrink + values, new_maximum, total

    def start_first(step, nothing):
        start(step)
        return nothing

    lax.fori_loop(0, jnp.minimum(end, BUFFERS - 1), start_first, None)
    carry = (
        jnp.zeros((rows, dim), jnp.float32),
        jnp.full((rows, 1), LOWEST, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
    )
    carry = lax.fori_loop(0, whole_end, lambda i, c: body(i, c, False), carry)
    accumulator, _, total = lax.fori_loop(whole_end, end, lambda i, c: body(i, c, True), carry)
    position = lax.rem(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(TILE))
    # Padded queries see no key (0 / 0); their output is zero by definition.
    real = position + first_query < counts_ref[batch]
    output = jnp.where(real, accumulator / total, 0.0)
    out_ref[...] = output.astype(q.dtype).reshape(out_ref.shape)
