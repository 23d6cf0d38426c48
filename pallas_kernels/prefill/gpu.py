"""Prompt attention on NVIDIA Hopper GPUs.

This is the forward kernel of training (see `training/gpu_forward.py`) with another walk over the
keys: the tiles that `tiles.make_plan` lists, copied from pages or from the dense keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.padding import pad_axis
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.prefill.tiles import TILE, Plan, make_plan, order_by_sort
from pallas_kernels.training import gpu_tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, ROWS, Problem, Ring, find_ring
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST

HEAD_DIMS = (64, 96, 128, 256)


def why_not(q, chunk: Chunk, past: Past, *, window: int, scale: float) -> str | None:
    """Returns why this kernel cannot serve the call, or None if it can."""
    del chunk, window
    if target_gpu().capability[0] != 9:
        return f"needs Hopper's wgmma, and the GPU is a {target_gpu().kind}"
    if q.dtype != jnp.bfloat16:
        # wgmma would round float32 to TF32; the kernels of `mma` serve float16.
        return f"serves bfloat16 operands alone, got {q.dtype}"
    return why_no_kernel(q, past, scale)


def why_no_kernel(q, past: Past, scale: float) -> str | None:
    """Returns why no kernel for NVIDIA GPUs can serve the call, or None."""
    page = past.page_size
    if q.shape[3] not in HEAD_DIMS:
        return f"the head dim must be one of {HEAD_DIMS}, got {q.shape[3]}"
    if page % 8 or TILE % min(page, TILE) or page % min(page, TILE):
        return f"a page must be 8 to {TILE} tokens and divide {TILE}, or a multiple; got {page}"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def scratch_of(problem: Problem, ring: Ring, parts: int = 1) -> dict[str, Any]:
    """Returns a program's shared-memory arrays by name; a tile is copied in `parts`."""
    stages = ring.stages
    query_tile = gpu_tiles.tile_memory((COMPUTE, ROWS, problem.D), problem.dtype)
    key_tile = gpu_tiles.tile_memory((stages, TILE, problem.D), problem.dtype)
    scratch = {
        "q_tiles": query_tile,
        "k_tiles": key_tile,
        "v_tiles": key_tile,
        "intervals": plgpu.SMEM((stages, 2, TILE), jnp.int32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE),
        "k_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=2 + parts),
        "v_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=parts),
        "k_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "v_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE),
    }
    if problem.interpret:
        scratch["staging"] = gpu_tiles.tile_memory((COMPUTE, ROWS, TILE), problem.dtype)
    return scratch


def ring_of(problem: Problem) -> Ring:
    """Returns the ring that streams keys and values."""
    return find_ring("prefill_attention", "forward", problem, Ring(TILE, 4), scratch_of)


def problem_of(q, chunk: Chunk, window: int, scale: float, interpret: bool) -> Problem:
    """Returns the static parameters of a call whose queries are padded to whole tiles."""
    batch, length, heads, dim = q.shape
    return Problem(
        B=batch,
        T=length,
        S=length,
        H=heads,
        K=chunk.k.shape[2],
        D=dim,
        window=window,
        scale=scale,
        dtype=jnp.dtype(q.dtype),
        packed=False,
        placed=False,
        interpret=interpret,
    )


def prefill(
    q,
    chunk: Chunk,
    past: Past,
    *,
    window: int,
    scale: float,
    interpret: bool = False,
    ring: Ring | None = None,
) -> jax.Array:
    """Computes `prefill_attention` on Hopper GPUs.

    Args:
      q: see `prefill_attention`.
      chunk: the keys and values of the chunk.
      past: the pages of the past.
      window: see `prefill_attention`.
      scale: see `prefill_attention`.
      interpret: run in the interpreter, for tests.
      ring: the ring that streams keys and values, in tiles of TILE; None for `ring_of`.
    """
    length = q.shape[1]
    padded = pad_axis(q, 1, TILE)
    problem = problem_of(padded, chunk, window, scale, interpret)
    plan = make_plan(chunk, past, window, problem.rows, order_by_sort)
    page = past.page_size
    scratch = scratch_of(problem, ring or ring_of(problem), parts=max(1, TILE // page))
    operands = [padded, chunk.counts.astype(jnp.int32), *plan]
    if plan.since.shape[0] > plan.dense_k.shape[1]:
        operands += [past.k_pages, past.v_pages]
    out_type = jax.ShapeDtypeStruct(padded.shape, problem.dtype)
    program = functools.partial(_program, page=page)
    output = gpu_tiles.run_over_queries(problem, program, operands, out_type, scratch, "prefill")
    return output[:, :length]


def _program(problem: Problem, inputs, outputs, memory, *, page: int):
    q_ref, counts_ref, *rest = inputs
    plan: Any = Plan(*rest[:7])
    page_refs = rest[7:]
    (out_ref,) = outputs
    stages = memory.k_tiles.shape[0]
    shape = (ROWS, TILE)
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    head, row0, q0 = gpu_tiles.head_and_query(problem, warpgroup)
    program_head = lax.axis_index("heads") * problem.heads_per_program
    kv_head = lax.div(program_head, jnp.int32(problem.H // problem.K))
    query_tile = lax.div(q0, jnp.int32(problem.rows))
    past_tiles = (plan.since.shape[0] - plan.dense_k.shape[1]) // TILE
    ends = plan.ends.at[batch, kv_head, query_tile]
    whole_end, end = ends[0], ends[1]
    piece = min(page, TILE)
    multiplier = problem.scale * LOG2E

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def copy():
        def copy_tile(pages, dense, tile, target, ready):
            """Copies one tile of keys, in as many pieces as a tile has pages."""

            def from_dense():
                for part in range(TILE // piece):
                    start = (tile - past_tiles) * TILE + part * piece
                    plgpu.copy_gmem_to_smem(
                        dense.at[batch, pl.ds(start, piece), kv_head],
                        target.at[pl.ds(part * piece, piece)],
                        ready,
                    )

            def from_pages():
                for part in range(TILE // piece):
                    slot = tile * TILE + part * piece
                    number = plan.pages[batch, kv_head, lax.div(slot, jnp.int32(page))]
                    start = pl.multiple_of(lax.rem(slot, jnp.int32(page)), piece)
                    source = pages.at[number]
                    if page > piece:
                        source = source.at[pl.ds(start, piece)]
                    plgpu.copy_gmem_to_smem(source, target.at[pl.ds(part * piece, piece)], ready)

            if page_refs:
                pl.when(tile < past_tiles)(from_pages)
                pl.when(tile >= past_tiles)(from_dense)
            else:
                from_dense()

        k_pages, v_pages = page_refs if page_refs else (None, None)

        def load(step, carry):
            slot = slot_of(step)
            tile = plan.visits[batch, kv_head, query_tile, step]
            keys = pl.ds(tile * TILE, TILE)
            plgpu.barrier_wait(memory.k_consumed.at[slot])
            ready, v_ready = memory.k_ready.at[slot], memory.v_ready.at[slot]
            bounds = (plan.since.at[keys], plan.until.at[batch, kv_head, keys])
            for index, bound in enumerate(bounds):
                plgpu.copy_gmem_to_smem(bound, memory.intervals.at[slot, index], ready)
            copy_tile(k_pages, plan.dense_k, tile, memory.k_tiles.at[slot], ready)
            plgpu.barrier_wait(memory.v_consumed.at[slot])
            copy_tile(v_pages, plan.dense_v, tile, memory.v_tiles.at[slot], v_ready)
            return carry

        lax.fori_loop(0, end, load, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(memory.k_consumed.at[slot])
            plgpu.barrier_wait(memory.v_consumed.at[slot])

    def take_turn():
        plgpu.barrier_arrive(memory.turn)
        plgpu.barrier_wait(memory.turn)

    def compute():
        queries = pl.ds(row0, ROWS)
        q_tile, q_ready = memory.q_tiles.at[warpgroup], memory.q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_tile, q_ready)
        for slot in range(stages):
            plgpu.barrier_arrive(memory.k_consumed.at[slot])
            plgpu.barrier_arrive(memory.v_consumed.at[slot])
        plgpu.barrier_wait(q_ready)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, problem.D), jnp.float32), plgpu.Layout.WGMMA)
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + row0

        @pl.when(end > 0)
        def _():
            plgpu.barrier_wait(memory.k_ready.at[0])

        def body(step, carry, masked):
            accumulator, maximum, total = carry
            slot = slot_of(step)
            v_tile = memory.v_tiles.at[slot]

            def multiply_keys(scores):
                plgpu.wgmma(scores, q_tile, memory.k_tiles.at[slot].transpose((1, 0)))
                take_turn()
                return scores[...]

            scores = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
            if masked:
                since = gpu_tiles.load_columns(memory.intervals.at[slot, 0])
                until = gpu_tiles.load_columns(memory.intervals.at[slot, 1])
                seen = position >= gpu_tiles.columns_of(since, shape)
                seen &= position <= gpu_tiles.columns_of(until, shape)
                scores = jnp.where(seen, scores, HIDDEN)
            gpu_tiles.release(memory.k_consumed.at[slot], interpret=problem.interpret)
            new_maximum = jnp.maximum(maximum, scores.max(axis=1) * multiplier)
            shrink = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(scores * multiplier - gpu_tiles.rows_of(new_maximum, shape))
            accumulator = accumulator * gpu_tiles.rows_of(shrink, accumulator.shape)
            total = total * shrink + weights.sum(axis=1)
            operand = weights.astype(problem.dtype)
            plgpu.barrier_arrive(memory.turn)
            plgpu.barrier_wait(memory.v_ready.at[slot])
            plgpu.barrier_wait(memory.turn)

            def wait_for_next_keys():
                @pl.when(step + 1 < end)
                def _():
                    plgpu.barrier_wait(memory.k_ready.at[slot_of(step + 1)])

            if not problem.interpret:

                def multiply_values(accumulator_ref):
                    plgpu.wgmma(accumulator_ref, operand, v_tile)
                    wait_for_next_keys()

                accumulator = pl.run_state(multiply_values)(plgpu.ACC.init(accumulator))
            else:

                def multiply_staged(product):
                    staged = memory.staging.at[warpgroup]
                    gpu_tiles.multiply_registers(product, operand, v_tile, staged)
                    return product[...]

                accumulator += pl.run_scoped(
                    multiply_staged, plgpu.ACC(accumulator.shape, jnp.float32)
                )
                wait_for_next_keys()
            plgpu.barrier_arrive(memory.v_consumed.at[slot])
            return accumulator, new_maximum, total

        pl.when(warpgroup == 1)(take_turn)
        carry = (zeros, gpu_tiles.row_vector(LOWEST), gpu_tiles.row_vector(0.0))
        carry = lax.fori_loop(0, whole_end, lambda i, c: body(i, c, False), carry)
        carry = lax.fori_loop(whole_end, end, lambda i, c: body(i, c, True), carry)
        accumulator, _, total = carry
        pl.when(warpgroup == 0)(take_turn)

        accumulator = accumulator * gpu_tiles.rows_of(1.0 / total, accumulator.shape)
        rows = plgpu.broadcasted_iota(jnp.int32, accumulator.shape, 0, layout=plgpu.Layout.WGMMA)
        # Padded queries see no key (0 / 0); their output is zero by definition.
        accumulator = jnp.where(rows + row0 < counts_ref[batch], accumulator, 0.0)
        q_tile[...] = accumulator.astype(problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out_ref.at[batch, queries, head])
        plgpu.wait_smem_to_gmem(0)

    gpu_tiles.roles(warpgroup, compute, copy)
