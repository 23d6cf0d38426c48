"""Gradient of training attention with respect to the queries, for NVIDIA GPUs.

The kernel is built like the forward kernel. With p = exp2(s - lse), delta_i = <do_i, o_i>,

    dS = p * (do v^T - delta)        dq = scale * dS k

At D = 256 a second pair of tiles does not fit beside the queries. Keys are read until the end of a
step but values only until its middle, so the ring then has a second tile only of keys, and values
have separate barriers: a tile of values arrives while dq and the next scores are computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, ROWS, TILE, Problem, Ring, find_ring
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals

# All sums of a program are part of products.
REDUCTIONS = 0


def scratch_of(problem: Problem, ring: Ring) -> dict[str, Any]:
    """Returns a program's shared-memory arrays by name."""
    early, block = _early_values(problem), ring.block
    stages = ring.stages + early
    query_tile = tiles.tile_memory((COMPUTE, ROWS, problem.D), problem.dtype)
    scratch = {
        "q_tiles": query_tile,
        "do_tiles": query_tile,
        "k_tiles": tiles.tile_memory((stages, block, problem.D), problem.dtype),
        "v_tiles": tiles.tile_memory((ring.stages, block, problem.D), problem.dtype),
        "bias_tiles": plgpu.SMEM((stages, block), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=2),
        "k_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=3 - early + problem.packed),
        "k_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
    }
    if early:
        scratch["v_ready"] = plgpu.Barrier(num_barriers=ring.stages, num_arrivals=1)
        scratch["v_consumed"] = plgpu.Barrier(num_barriers=ring.stages, num_arrivals=COMPUTE)
    if problem.packed:
        scratch["key_segments"] = plgpu.SMEM((stages, block), jnp.int32)
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), problem.dtype)
    return scratch


def ring_of(problem: Problem) -> Ring:
    """Returns the ring that streams keys and values."""
    wanted, part = Ring(TILE if problem.D <= 128 else ROWS, 4), "query_gradient"
    return find_ring("retrofit_attention", part, problem, wanted, scratch_of, REDUCTIONS)


def _early_values(problem: Problem) -> bool:
    """Whether keys have one stage more than values."""
    return problem.D > 128


def query_gradient(
    problem: Problem, inputs: Inputs, residuals: Residuals, ring: Ring | None = None
) -> jax.Array:
    """Computes dq [B, T, H, D]; `ring` is the same as for `gpu_forward.forward`."""
    ring = ring or ring_of(problem)
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias, *residuals]
    if problem.packed:
        operands += tiles.segment_operands(problem, inputs, ring)
    if problem.placed:
        operands.append(inputs.start)
    return tiles.run_over_queries(
        problem,
        _program,
        operands,
        jax.ShapeDtypeStruct(inputs.q.shape, problem.dtype),
        scratch_of(problem, ring),
        "retrofit_dq",
        reductions=REDUCTIONS,
    )


def _program(problem: Problem, inputs, outputs, memory):
    (dq_ref,) = outputs
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *rest = inputs
    segment_refs, rest = tiles.segment_references(problem, rest)
    stages, block = memory.bias_tiles.shape
    early, value_stages = _early_values(problem), memory.v_tiles.shape[0]
    shape = (ROWS, block)
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    head, row0, q0 = tiles.head_and_query(problem, warpgroup)
    first = segment_refs[2][batch, lax.div(q0, jnp.int32(problem.rows))] if problem.packed else 0
    place, count = (rest[0][0], problem.S // block) if problem.placed else (0, None)
    zones = tiles.key_zones(q0 + place, problem.rows, problem.window, block, first, count)

    def slots_of(tile):
        value_slot = lax.rem(tile, jnp.int32(value_stages)) + tiles.hidden_zero(tile)
        return lax.rem(tile, jnp.int32(stages)), value_slot

    def wait_until_consumed():
        for slot in range(stages):
            plgpu.barrier_wait(memory.k_consumed.at[slot])
        for slot in range(value_stages if early else 0):
            plgpu.barrier_wait(memory.v_consumed.at[slot])

    def copy():
        group = problem.H // problem.K
        program_head = lax.axis_index("heads") * problem.heads_per_program
        kv_head = lax.div(program_head, jnp.int32(group))

        def load(tile, carry):
            (slot, value_slot), keys = slots_of(tile), pl.ds(tile * block, block)
            ready = memory.k_ready.at[slot]
            plgpu.barrier_wait(memory.k_consumed.at[slot])
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], memory.k_tiles.at[slot], ready)
            plgpu.copy_gmem_to_smem(
                bias_ref.at[batch, kv_head, keys], memory.bias_tiles.at[slot], ready
            )
            if problem.packed:
                source = segment_refs[1].at[batch, keys]
                plgpu.copy_gmem_to_smem(source, memory.key_segments.at[slot], ready)
            if early:
                ready = memory.v_ready.at[value_slot]
                plgpu.barrier_wait(memory.v_consumed.at[value_slot])
            plgpu.copy_gmem_to_smem(
                v_ref.at[batch, keys, kv_head], memory.v_tiles.at[value_slot], ready
            )
            return carry

        lax.fori_loop(first, zones[-1], load, jnp.int32(0))
        wait_until_consumed()

    def load_rows(ref):
        # From device memory, because shared memory is full at D = 256.
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def compute():
        queries = pl.ds(row0, ROWS)
        q_tile, do_tile = memory.q_tiles.at[warpgroup], memory.do_tiles.at[warpgroup]
        ready = memory.q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_tile, ready)
        plgpu.copy_gmem_to_smem(do_ref.at[batch, queries, head], do_tile, ready)
        for slot in range(stages):
            plgpu.barrier_arrive(memory.k_consumed.at[slot])
        for slot in range(value_stages if early else 0):
            plgpu.barrier_arrive(memory.v_consumed.at[slot])
        minus_lse = load_rows(lse_ref.at[batch, head, queries])
        minus_delta = load_rows(delta_ref.at[batch, head, queries])
        own_segments = load_rows(segment_refs[0].at[batch, queries]) if problem.packed else None
        plgpu.barrier_wait(ready)

        def walk(dq):
            def body(tile, carry, *, bias, causal):
                (slot, value_slot), own = slots_of(tile), warpgroup + tiles.hidden_zero(tile)
                q_tile, do_tile = memory.q_tiles.at[own], memory.do_tiles.at[own]
                k_tile, v_tile = memory.k_tiles.at[slot], memory.v_tiles.at[value_slot]
                plgpu.barrier_wait(memory.k_ready.at[slot])

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
                    if early:
                        plgpu.barrier_wait(memory.v_ready.at[value_slot])
                    plgpu.wgmma(dp_ref, do_tile, v_tile.transpose((1, 0)))
                    weights = jnp.exp2(read(0, 1) * (problem.scale * LOG2E))
                    if causal:
                        weights = jnp.where(distance >= 0, weights, 0.0)
                    if problem.packed:
                        keys = tiles.load_columns(memory.key_segments.at[slot])
                        same = tiles.rows_of(own_segments, shape) == tiles.columns_of(keys, shape)
                        weights = jnp.where(same, weights, 0.0)
                    dp = read(1, 0)
                    if early:
                        plgpu.barrier_arrive(memory.v_consumed.at[value_slot])
                    return weights * dp

                ds = tiles.accumulate(
                    (start, tiles.rows_of(minus_delta, shape)),
                    score_gradient,
                    shape,
                    interpret=problem.interpret,
                )
                staged = memory.staging.at[warpgroup] if problem.interpret else None
                tiles.multiply_registers(dq, ds.astype(problem.dtype), k_tile, staged)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(memory.k_consumed.at[slot])
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
