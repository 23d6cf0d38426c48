"""Gradient of training attention with respect to the queries, for NVIDIA GPUs.

The kernel is built like that of the forward pass. With p = exp2(s - lse), delta_i = <do_i, o_i>,

    dS = p * (do v^T - delta)        dq = scale * dS k
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, LOG2E, ROWS, TILE, Problem, Ring, find_ring
from pallas_kernels.training.inputs import Inputs, Residuals

# Number of rows of D elements that a program keeps: queries, and the gradients of their outputs.
RESIDENT = 2 * COMPUTE * ROWS


def ring_of(problem: Problem) -> Ring:
    """Returns how the kernel streams keys and values."""
    wanted = Ring(TILE if problem.D <= 128 else ROWS, 4)
    return find_ring("retrofit_attention", "query_gradient", problem, RESIDENT, wanted)


def query_gradient(
    problem: Problem, inputs: Inputs, residuals: Residuals, ring: Ring | None = None
) -> jax.Array:
    """Computes dq [B, T, H, D]; `ring` is the same as for `gpu_forward.forward`."""
    ring = ring or ring_of(problem)
    block, stages = ring.block, ring.stages
    dtype = inputs.q.dtype
    query_tile = tiles.tile_memory((COMPUTE, ROWS, problem.D), dtype)
    key_tile = tiles.tile_memory((stages, block, problem.D), dtype)
    scratch = {
        "q_tiles": query_tile,
        "do_tiles": query_tile,
        "k_tiles": key_tile,
        "v_tiles": key_tile,
        "bias_tiles": plgpu.SMEM((stages, block), jnp.float32),
        "row_values": plgpu.SMEM((COMPUTE, 2, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=4 + problem.packed),
        "kv_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=3 + problem.packed),
        "kv_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
    }
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias, *residuals]
    if problem.packed:
        memory, packed = tiles.segment_operands(problem, inputs, ring)
        scratch |= memory
        operands += packed
    if problem.placed:
        operands.append(inputs.start)
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), dtype)
    out_type = jax.ShapeDtypeStruct(inputs.q.shape, dtype)
    return tiles.run_over_queries(problem, _program, operands, out_type, scratch, "retrofit_dq")


def _program(problem: Problem, inputs, outputs, memory):
    (dq_ref,) = outputs
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *rest = inputs
    segment_refs, rest = tiles.segment_references(problem, rest)
    stages, block = memory.bias_tiles.shape
    shape = (ROWS, block)
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    head, row0, q0 = tiles.head_and_query(problem, warpgroup)
    first = segment_refs[2][batch, lax.div(q0, jnp.int32(problem.rows))] if problem.packed else 0
    place, count = (rest[0][0], problem.S // block) if problem.placed else (0, None)
    zones = tiles.key_zones(q0 + place, problem.rows, problem.window, block, first, count)

    def slot_of(tile):
        return lax.rem(tile, jnp.int32(stages))

    def copy():
        group = problem.H // problem.K
        program_head = lax.axis_index("heads") * problem.heads_per_program
        kv_head = lax.div(program_head, jnp.int32(group))

        def load(tile, carry):
            slot, keys = slot_of(tile), pl.ds(tile * block, block)
            ready = memory.kv_ready.at[slot]
            plgpu.barrier_wait(memory.kv_consumed.at[slot])
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], memory.k_tiles.at[slot], ready)
            plgpu.copy_gmem_to_smem(
                bias_ref.at[batch, kv_head, keys], memory.bias_tiles.at[slot], ready
            )
            plgpu.copy_gmem_to_smem(v_ref.at[batch, keys, kv_head], memory.v_tiles.at[slot], ready)
            if problem.packed:
                source = segment_refs[1].at[batch, keys]
                plgpu.copy_gmem_to_smem(source, memory.key_segments.at[slot], ready)
            return carry

        lax.fori_loop(first, zones[-1], load, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(memory.kv_consumed.at[slot])

    def compute():
        queries = pl.ds(row0, ROWS)
        q_tile, do_tile = memory.q_tiles.at[warpgroup], memory.do_tiles.at[warpgroup]
        values, ready = memory.row_values.at[warpgroup], memory.q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_tile, ready)
        plgpu.copy_gmem_to_smem(do_ref.at[batch, queries, head], do_tile, ready)
        plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, queries], values.at[0], ready)
        plgpu.copy_gmem_to_smem(delta_ref.at[batch, head, queries], values.at[1], ready)
        if problem.packed:
            source = segment_refs[0].at[batch, queries]
            plgpu.copy_gmem_to_smem(source, memory.query_segments.at[warpgroup], ready)
        for slot in range(stages):
            plgpu.barrier_arrive(memory.kv_consumed.at[slot])
        plgpu.barrier_wait(ready)
        minus_lse, minus_delta = tiles.load_rows(values.at[0]), tiles.load_rows(values.at[1])
        own_segments = (
            tiles.load_rows(memory.query_segments.at[warpgroup]) if problem.packed else None
        )

        def walk(dq):
            def body(tile, carry, *, bias, causal):
                slot = slot_of(tile)
                k_tile, v_tile = memory.k_tiles.at[slot], memory.v_tiles.at[slot]
                plgpu.barrier_wait(memory.kv_ready.at[slot])

                start = tiles.rows_of(minus_lse, shape)
                if bias == "select" or causal:
                    distance = tiles.distances(shape, row0 + place, tile * block)
                if bias is not None:
                    added = tiles.columns_of(tiles.load_columns(memory.bias_tiles.at[slot]), shape)
                    if bias == "select":
                        added = jnp.where(distance > problem.window, added, 0.0)
                    start = start + added

                def score_gradient(refs, read):
                    scores_ref, dp_ref = refs
                    plgpu.wgmma(scores_ref, q_tile, k_tile.transpose((1, 0)))
                    plgpu.wgmma(dp_ref, do_tile, v_tile.transpose((1, 0)))
                    weights = jnp.exp2(read(0, 1) * (problem.scale * LOG2E))
                    if causal:
                        weights = jnp.where(distance >= 0, weights, 0.0)
                    if problem.packed:
                        keys = tiles.load_columns(memory.key_segments.at[slot])
                        same = tiles.rows_of(own_segments, shape) == tiles.columns_of(keys, shape)
                        weights = jnp.where(same, weights, 0.0)
                    return weights * read(1, 0)

                ds = tiles.accumulate(
                    (start, tiles.rows_of(minus_delta, shape)),
                    score_gradient,
                    shape,
                    interpret=problem.interpret,
                )
                staged = memory.staging.at[warpgroup] if problem.interpret else None
                tiles.multiply_registers(dq, ds.astype(problem.dtype), k_tile, staged)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(memory.kv_consumed.at[slot])
                return carry

            tiles.zone_loops(
                body,
                (first, *zones),
                jnp.int32(0),
                diagonal_bias=problem.window < problem.rows + block - 2,
            )
            return dq[...]

        dq = pl.run_scoped(walk, plgpu.ACC((ROWS, problem.D), jnp.float32))
        q_tile[...] = (dq * problem.scale).astype(problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, dq_ref.at[batch, queries, head])
        plgpu.wait_smem_to_gmem(0)

    tiles.roles(warpgroup, compute, copy)
