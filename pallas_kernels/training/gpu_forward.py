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
from pallas_kernels.training.gpu_tiles import COMPUTE, ROWS, TILE, Problem, Ring, find_ring
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST, Inputs


def scratch_of(problem: Problem, ring: Ring) -> dict[str, Any]:
    """Returns a program's shared-memory arrays by name."""
    block, stages = ring.block, ring.stages
    key_tile = tiles.tile_memory((stages, block, problem.D), problem.dtype)
    scratch = {
        "q_tiles": tiles.tile_memory((COMPUTE, ROWS, problem.D), problem.dtype),
        "k_tiles": key_tile,
        "v_tiles": key_tile,
        "bias_tiles": plgpu.SMEM((stages, block), jnp.float32),
        "lse_rows": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=1 + problem.packed),
        "k_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=2 + problem.packed),
        "v_ready": plgpu.Barrier(num_barriers=stages),
        "k_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "v_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE),
    }
    if problem.packed:
        scratch["query_segments"] = plgpu.SMEM((COMPUTE, ROWS), jnp.int32)
        scratch["key_segments"] = plgpu.SMEM((stages, block), jnp.int32)
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), problem.dtype)
    return scratch


def ring_of(problem: Problem) -> Ring:
    """Returns the ring that streams keys and values."""
    wanted = Ring(TILE if problem.D <= 128 else ROWS, 4)
    return find_ring("retrofit_attention", "forward", problem, wanted, scratch_of)


def forward(
    problem: Problem, inputs: Inputs, ring: Ring | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T].

    Args:
      problem: the static parameters.
      inputs: the kernels' inputs.
      ring: the ring that streams keys and values; None for `ring_of`.
    """
    ring = ring or ring_of(problem)
    out_type = (
        jax.ShapeDtypeStruct(inputs.q.shape, problem.dtype),
        jax.ShapeDtypeStruct((problem.B, problem.H, problem.T), jnp.float32),
    )
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias]
    if problem.packed:
        operands += tiles.segment_operands(problem, inputs, ring)
    if problem.placed:
        operands.append(inputs.start)
    scratch, name = scratch_of(problem, ring), "retrofit_forward"
    return tiles.run_over_queries(problem, _program, operands, out_type, scratch, name)


def _program(problem: Problem, inputs, outputs, memory):
    q_ref, k_ref, v_ref, bias_ref, *rest = inputs
    segment_refs, rest = tiles.segment_references(problem, rest)
    out_ref, lse_ref = outputs
    stages, block = memory.bias_tiles.shape
    shape = (ROWS, block)
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    head, row0, q0 = tiles.head_and_query(problem, warpgroup)
    first = segment_refs[2][batch, lax.div(q0, jnp.int32(problem.rows))] if problem.packed else 0
    place, count = (rest[0][0], problem.S // block) if problem.placed else (0, None)
    zones = tiles.key_zones(q0 + place, problem.rows, problem.window, block, first, count)
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
            plgpu.barrier_wait(memory.k_consumed.at[slot])
            ready = memory.k_ready.at[slot]
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], memory.k_tiles.at[slot], ready)
            plgpu.copy_gmem_to_smem(
                bias_ref.at[batch, kv_head, keys], memory.bias_tiles.at[slot], ready
            )
            if problem.packed:
                source = segment_refs[1].at[batch, keys]
                plgpu.copy_gmem_to_smem(source, memory.key_segments.at[slot], ready)
            plgpu.barrier_wait(memory.v_consumed.at[slot])
            plgpu.copy_gmem_to_smem(
                v_ref.at[batch, keys, kv_head], memory.v_tiles.at[slot], memory.v_ready.at[slot]
            )
            return carry

        lax.fori_loop(first, end, load, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(memory.k_consumed.at[slot])
            plgpu.barrier_wait(memory.v_consumed.at[slot])

    def take_turn():
        plgpu.barrier_arrive(memory.turn)
        plgpu.barrier_wait(memory.turn)

    def compute():
        queries = pl.ds(row0, ROWS)
        q_tile, ready = memory.q_tiles.at[warpgroup], memory.q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_tile, ready)
        if problem.packed:
            source = segment_refs[0].at[batch, queries]
            plgpu.copy_gmem_to_smem(source, memory.query_segments.at[warpgroup], ready)
        for slot in range(stages):
            plgpu.barrier_arrive(memory.k_consumed.at[slot])
            plgpu.barrier_arrive(memory.v_consumed.at[slot])
        plgpu.barrier_wait(ready)
        own_segments = (
            tiles.load_rows(memory.query_segments.at[warpgroup]) if problem.packed else None
        )
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, problem.D), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(memory.k_ready.at[slot_of(first)])

        def body(tile, carry, *, bias, causal):
            accumulator, maximum, total = carry
            slot = slot_of(tile)

            if bias == "select" or causal:
                distance = tiles.distances(shape, row0 + place, tile * block)
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            if bias is not None:
                start = tiles.columns_of(tiles.load_columns(memory.bias_tiles.at[slot]), shape)
                if bias == "select":
                    start = jnp.where(distance > problem.window, start, 0.0)

            def multiply_keys(refs, read):
                plgpu.wgmma(refs[0], q_tile, memory.k_tiles.at[slot].transpose((1, 0)))
                take_turn()
                return read(0, 0)

            scores = tiles.accumulate((start,), multiply_keys, shape, interpret=problem.interpret)
            if problem.packed:
                keys = tiles.load_columns(memory.key_segments.at[slot])
                same = tiles.rows_of(own_segments, shape) == tiles.columns_of(keys, shape)
            tiles.release(memory.k_consumed.at[slot], interpret=problem.interpret)
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
            plgpu.barrier_arrive(memory.turn)
            plgpu.barrier_wait(memory.v_ready.at[slot])
            plgpu.barrier_wait(memory.turn)

            def wait_for_next_keys():
                @pl.when(tile + 1 < end)
                def _():
                    plgpu.barrier_wait(memory.k_ready.at[slot_of(tile + 1)])

            if not problem.interpret:

                def multiply_values(refs):
                    accumulator_ref, total_ref = refs
                    plgpu.wgmma(accumulator_ref, operand, memory.v_tiles.at[slot])
                    # In parallel to the product, off the critical path between the two products.
                    total_ref[...] += weights.sum(axis=1)
                    wait_for_next_keys()

                state = (plgpu.ACC.init(accumulator), total)
                accumulator, total = pl.run_state(multiply_values)(state)
            else:

                def multiply_staged(product):
                    staged = memory.staging.at[warpgroup]
                    tiles.multiply_registers(product, operand, memory.v_tiles.at[slot], staged)
                    return product[...]

                accumulator += pl.run_scoped(
                    multiply_staged, plgpu.ACC(accumulator.shape, jnp.float32)
                )
                total += weights.sum(axis=1)
                wait_for_next_keys()
            plgpu.barrier_arrive(memory.v_consumed.at[slot])
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
        memory.lse_rows.at[warpgroup][...] = maximum + jnp.log(total) * LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out_ref.at[batch, queries, head])
        plgpu.copy_smem_to_gmem(memory.lse_rows.at[warpgroup], lse_ref.at[batch, head, queries])
        plgpu.wait_smem_to_gmem(0)

    tiles.roles(warpgroup, compute, copy)
