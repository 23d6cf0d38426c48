"""Prompt attention with the products of Ampere, for NVIDIA GPUs of other generations than Hopper.

This is the forward kernel of training (see `training/mma_forward.py`) with another walk over the
keys: the tiles that `tiles.make_plan` lists, loaded from pages or from the dense keys, in parts
that fit in registers. It runs on Hopper too, where the Hopper kernel is faster.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import mosaic_lacks, target_gpu
from pallas_kernels.mma import ACC
from pallas_kernels.padding import pad_axis
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.prefill.gpu import problem_of, why_no_kernel
from pallas_kernels.prefill.tiles import TILE, Plan, make_plan, order_by_sort
from pallas_kernels.stores import store
from pallas_kernels.training import gpu_tiles, mma_tiles
from pallas_kernels.training.gpu_tiles import Problem
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST
from pallas_kernels.training.mma_forward import blocks_of
from pallas_kernels.training.mma_tiles import Blocks

# Tokens in the smallest part of a page that fills the registers of a warpgroup.
SMALLEST_PAGE = 16


def why_not(q, chunk: Chunk, past: Past, *, window: int, scale: float) -> str | None:
    """Returns why this kernel cannot serve the call, or None if it can."""
    del chunk, window
    if reason := mosaic_lacks(target_gpu()):
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies 16-bit numbers, not {q.dtype}"
    if past.page_size < SMALLEST_PAGE:
        return f"a page must be {SMALLEST_PAGE} tokens or more, got {past.page_size}"
    return why_no_kernel(q, past, scale)


def prefill(
    q,
    chunk: Chunk,
    past: Past,
    *,
    window: int,
    scale: float,
    interpret: bool = False,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Computes `prefill_attention` with Ampere's products, like `gpu.prefill` on Hopper.

    Args:
      q, chunk, past, window, scale, interpret: see `gpu.prefill`.
      blocks: the tiles of the kernel; None for those of training.
    """
    length = q.shape[1]
    padded = pad_axis(q, 1, TILE)
    problem = problem_of(padded, chunk, window, scale, interpret)
    blocks = blocks or blocks_of(problem)
    plan = make_plan(chunk, past, window, blocks.rows, order_by_sort)
    piece = min(past.page_size, blocks.columns)
    key_tile = mma_tiles.tile_memory(blocks.columns, problem, piece)
    scratch = {
        "q_tile": mma_tiles.tile_memory(blocks.rows, problem),
        "k_tile": key_tile,
        "v_tile": key_tile,
    }
    operands = [padded, chunk.counts.astype(jnp.int32), *plan]
    if plan.since.shape[0] > plan.dense_k.shape[1]:
        operands += [past.k_pages, past.v_pages]
    out_type = jax.ShapeDtypeStruct(padded.shape, problem.dtype)
    program = functools.partial(_program, page=past.page_size, blocks=blocks)
    grid = {"heads": problem.H, "queries": problem.T // blocks.rows}
    output = gpu_tiles.run(
        problem, program, operands, out_type, scratch, grid, "prefill_mma", warpgroups=1
    )
    return output[:, :length]


def _program(problem: Problem, inputs, outputs, memory, *, page: int, blocks: Blocks):
    q_ref, counts_ref, *rest = inputs
    plan: Any = Plan(*rest[:7])
    page_refs = rest[7:] or (None, None)
    (out_ref,) = outputs
    shape = (blocks.rows, blocks.columns)
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    kv_head = mma_tiles.kv_head_of(problem, head)
    # Queries run backwards, so the longest programs start first.
    query_tile = problem.T // blocks.rows - 1 - lax.axis_index("queries")
    row0 = query_tile * blocks.rows
    queries = pl.ds(row0, blocks.rows)
    past_slots = plan.since.shape[0] - plan.dense_k.shape[1]
    ends = plan.ends.at[batch, kv_head, query_tile]
    parts, piece = TILE // blocks.columns, min(page, blocks.columns)
    whole_end, end = ends[0] * parts, ends[1] * parts
    multiplier = problem.scale * LOG2E

    def first_key(step):
        """Returns the number of the first key of a step, among those of the plan."""
        tile = plan.visits[batch, kv_head, query_tile, lax.div(step, jnp.int32(parts))]
        return tile * TILE + lax.rem(step, jnp.int32(parts)) * blocks.columns

    def load(pages, dense, key):
        """Loads the keys from this one on, in as many pieces as they have pages."""
        starts = [key + start for start in range(0, blocks.columns, piece)]

        def from_dense():
            return tuple(
                mma_tiles.load_tile(dense.at[batch, pl.ds(start - past_slots, piece), kv_head])
                for start in starts
            )

        def from_pages():
            loaded = []
            for start in starts:
                number = plan.pages[batch, kv_head, lax.div(start, jnp.int32(page))]
                inside = pl.ds(lax.rem(start, jnp.int32(page)), piece)
                loaded.append(mma_tiles.load_tile(pages.at[number, inside]))
            return tuple(loaded)

        return from_dense() if pages is None else lax.cond(key < past_slots, from_pages, from_dense)

    def write(target, pieces):
        for index, values in enumerate(pieces):
            target[pl.ds(index * piece, piece)] = values

    memory.q_tile[...] = mma_tiles.load_tile(q_ref.at[batch, queries, head])
    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ACC) + row0

    def body(step, carry, masked):
        key, k_tile, accumulator, maximum, total = carry
        keys = pl.ds(key, blocks.columns)
        v_tile = load(page_refs[1], plan.dense_v, key)
        if masked:
            since = mma_tiles.columns_at(plan.since.at[keys])
            until = mma_tiles.columns_at(plan.until.at[batch, kv_head, keys])
        write(memory.k_tile, k_tile)
        scores = mma_tiles.full(shape)
        scores = mma_tiles.multiply_transposed(problem, scores, memory.q_tile, memory.k_tile)
        if masked:
            seen = position >= gpu_tiles.columns_of(since, shape)
            seen &= position <= gpu_tiles.columns_of(until, shape)
            scores = jnp.where(seen, scores, HIDDEN)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * multiplier)
        shrink = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * multiplier - gpu_tiles.rows_of(new_maximum, shape))
        total = total * shrink + weights.sum(axis=1)
        accumulator = accumulator * gpu_tiles.rows_of(shrink, accumulator.shape)
        key = first_key(jnp.minimum(step + 1, end - 1))
        following = load(page_refs[0], plan.dense_k, key)
        write(memory.v_tile, v_tile)
        accumulator = mma_tiles.multiply(problem, accumulator, weights, memory.v_tile)
        return key, following, accumulator, new_maximum, total

    # Padded queries visit nothing, but the list's first entry is still a valid tile.
    key = first_key(jnp.int32(0))
    carry = (
        key,
        load(page_refs[0], plan.dense_k, key),
        mma_tiles.full((blocks.rows, problem.D)),
        mma_tiles.row_vector(blocks.rows, LOWEST),
        mma_tiles.row_vector(blocks.rows, 0.0),
    )
    carry = lax.fori_loop(0, whole_end, lambda i, c: body(i, c, False), carry)
    *_, accumulator, _, total = lax.fori_loop(whole_end, end, lambda i, c: body(i, c, True), carry)
    accumulator = accumulator * gpu_tiles.rows_of(1.0 / total, accumulator.shape)
    rows = plgpu.broadcasted_iota(jnp.int32, accumulator.shape, 0, layout=ACC)
    # Padded queries see no key (0 / 0); their output is zero by definition.
    accumulator = jnp.where(rows + row0 < counts_ref[batch], accumulator, 0.0)
    store(out_ref.at[batch, queries, head], accumulator.astype(problem.dtype))
