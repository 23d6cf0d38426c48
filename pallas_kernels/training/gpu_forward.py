"""Forward training attention for NVIDIA GPUs: output and base-2 log-sum-exp.

One program takes 128 rows of queries (see `Problem.heads_per_program`) and walks the key tiles from
the first visible one to the diagonal with a running maximum and sum. The two computing warpgroups
take turns on the tensor cores: one multiplies while the other exponentiates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import (
    COMPUTE,
    HIDDEN,
    LOG2E,
    LOWEST,
    ROWS,
    TILE,
    Problem,
    Ring,
    find_ring,
)

# Rows of D elements that a program keeps: its queries.
RESIDENT = COMPUTE * ROWS


def ring_of(problem: Problem) -> Ring:
    """Return how the kernel streams keys and values."""
    wanted = Ring(TILE if problem.D <= 128 else ROWS, 4)
    return find_ring("retrofit_attention", "forward", problem, RESIDENT, wanted)


def forward(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_bias: jax.Array,
    segments: jax.Array | None,
    ring: Ring | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T].

    Args:
      problem: the static facts.
      q: queries [B, T, H, D].
      k: keys [B, T, K, D].
      v: values [B, T, K, D].
      raw_bias: finite key bias [B, K, T] in base 2, float32.
      segments: int32 [B, T], given iff the problem is packed.
      ring: how to stream keys and values; None takes what `ring_of` finds.
    """
    ring = ring or ring_of(problem)
    block, stages = ring.block, ring.stages
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((problem.B, problem.H, problem.T), jnp.float32),
    )
    scratch = {
        "q_tiles": tiles.tile_memory((COMPUTE, ROWS, problem.D), q.dtype),
        "k_tiles": tiles.tile_memory((stages, block, problem.D), q.dtype),
        "v_tiles": tiles.tile_memory((stages, block, problem.D), q.dtype),
        "bias_tiles": plgpu.SMEM((stages, block), jnp.float32),
        "lse_rows": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=1 + problem.packed),
        "k_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=2 + problem.packed),
        "v_ready": plgpu.Barrier(num_barriers=stages),
        "k_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "v_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE),
    }
    operands = [q, k, v, raw_bias]
    if segments is not None:
        memory, packed = tiles.segment_operands(problem, segments, ring)
        scratch |= memory
        operands += packed
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), q.dtype)

    def kernel(*refs, **memory):
        _program(problem, refs[: len(operands)], refs[len(operands) :], **memory)

    return tiles.query_kernel(problem, kernel, out_type, scratch, "retrofit_forward")(*operands)


def _program(
    problem: Problem,
    inputs,
    outputs,
    *,
    q_tiles,
    k_tiles,
    v_tiles,
    bias_tiles,
    lse_rows,
    q_ready,
    k_ready,
    v_ready,
    k_consumed,
    v_consumed,
    turn,
    query_segments: Any = None,
    key_segments: Any = None,
    staging: Any = None,
):
    q_ref, k_ref, v_ref, bias_ref, *segment_refs = inputs
    out_ref, lse_ref = outputs
    stages, block = bias_tiles.shape
    shape = (ROWS, block)
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    head, row0, q0 = tiles.head_and_query(problem, warpgroup)
    first = segment_refs[1][batch, lax.div(q0, jnp.int32(problem.rows))] if problem.packed else 0
    zones = tiles.key_zones(q0, problem.rows, problem.window, block, first)
    end = zones[-1]
    multiplier = problem.scale * LOG2E

    def slot_of(tile):
        return lax.rem(tile, jnp.int32(stages))

    def copy():
        group = problem.H // problem.K
        program_head = lax.axis_index("heads") * problem.heads_per_program
        kv_head = lax.div(program_head, jnp.int32(group))

        def load(tile, carry):
            slot, keys = slot_of(tile), pl.ds(tile * block, block)
            plgpu.barrier_wait(k_consumed.at[slot])
            ready = k_ready.at[slot]
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], k_tiles.at[slot], ready)
            plgpu.copy_gmem_to_smem(bias_ref.at[batch, kv_head, keys], bias_tiles.at[slot], ready)
            if problem.packed:
                source = segment_refs[0].at[batch, keys]
                plgpu.copy_gmem_to_smem(source, key_segments.at[slot], ready)
            plgpu.barrier_wait(v_consumed.at[slot])
            plgpu.copy_gmem_to_smem(
                v_ref.at[batch, keys, kv_head], v_tiles.at[slot], v_ready.at[slot]
            )
            return carry

        lax.fori_loop(first, end, load, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(k_consumed.at[slot])
            plgpu.barrier_wait(v_consumed.at[slot])

    def take_turn():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def compute():
        queries = pl.ds(row0, ROWS)
        q_tile, ready = q_tiles.at[warpgroup], q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_tile, ready)
        if problem.packed:
            source = segment_refs[0].at[batch, queries]
            plgpu.copy_gmem_to_smem(source, query_segments.at[warpgroup], ready)
        for slot in range(stages):
            plgpu.barrier_arrive(k_consumed.at[slot])
            plgpu.barrier_arrive(v_consumed.at[slot])
        plgpu.barrier_wait(ready)
        own_segments = tiles.load_rows(query_segments.at[warpgroup]) if problem.packed else None
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, problem.D), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(k_ready.at[slot_of(first)])

        def body(tile, carry, *, bias, causal):
            accumulator, maximum, total = carry
            slot = slot_of(tile)

            if bias == "select" or causal:
                distance = tiles.distances(shape, row0, tile * block)
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            if bias is not None:
                start = tiles.columns_of(tiles.load_columns(bias_tiles.at[slot]), shape)
                if bias == "select":
                    start = jnp.where(distance > problem.window, start, 0.0)

            def multiply_keys(refs, read):
                plgpu.wgmma(refs[0], q_tile, k_tiles.at[slot].transpose((1, 0)))
                take_turn()
                return read(0, 0)

            scores = tiles.accumulate((start,), multiply_keys, shape, interpret=problem.interpret)
            if problem.packed:
                keys = tiles.load_columns(key_segments.at[slot])
                same = tiles.rows_of(own_segments, shape) == tiles.columns_of(keys, shape)
            tiles.release(k_consumed.at[slot], interpret=problem.interpret)
            if causal:
                scores = jnp.where(distance >= 0, scores, HIDDEN)
            if problem.packed:
                scores = jnp.where(same, scores, HIDDEN)

            new_maximum = jnp.maximum(maximum, scores.max(axis=1) * multiplier)
            shrink = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(scores * multiplier - tiles.rows_of(new_maximum, shape))
            accumulator = accumulator * tiles.rows_of(shrink, accumulator.shape)
            total = total * shrink
            operand = weights.astype(problem.dtype)
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            plgpu.barrier_wait(turn)

            def wait_for_next_keys():
                @pl.when(tile + 1 < end)
                def _():
                    plgpu.barrier_wait(k_ready.at[slot_of(tile + 1)])

            if staging is None:

                def multiply_values(refs):
                    accumulator_ref, total_ref = refs
                    plgpu.wgmma(accumulator_ref, operand, v_tiles.at[slot])
                    # Beside the product, off the path between the two.
                    total_ref[...] += weights.sum(axis=1)
                    wait_for_next_keys()

                state = (plgpu.ACC.init(accumulator), total)
                accumulator, total = pl.run_state(multiply_values)(state)
            else:

                def multiply_staged(product):
                    staged = staging.at[warpgroup]
                    tiles.multiply_registers(product, operand, v_tiles.at[slot], staged)
                    return product[...]

                accumulator += pl.run_scoped(
                    multiply_staged, plgpu.ACC(accumulator.shape, jnp.float32)
                )
                total += weights.sum(axis=1)
                wait_for_next_keys()
            plgpu.barrier_arrive(v_consumed.at[slot])
            return accumulator, new_maximum, total

        pl.when(warpgroup == 1)(take_turn)
        accumulator, maximum, total = tiles.zone_loops(
            body,
            (first, *zones),
            (zeros, tiles.row_vector(LOWEST), tiles.row_vector(0.0)),
            diagonal_bias=problem.window < problem.rows + block - 2,
        )
        pl.when(warpgroup == 0)(take_turn)

        accumulator = accumulator * tiles.rows_of(1.0 / total, accumulator.shape)
        q_tile[...] = accumulator.astype(problem.dtype)
        lse_rows.at[warpgroup][...] = maximum + jnp.log(total) * LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out_ref.at[batch, queries, head])
        plgpu.copy_smem_to_gmem(lse_rows.at[warpgroup], lse_ref.at[batch, head, queries])
        plgpu.wait_smem_to_gmem(0)

    tiles.roles(warpgroup, compute, copy)
