"""Gradients of training attention with respect to keys, values and bias, for NVIDIA GPUs.

One program owns 128 keys of one KV head and walks the queries of every head of its group, so the
gradients are summed in registers, deterministically, without atomics or a later sum over heads.
Scores are transposed, S^T = k q^T, so that the bias is one value per row:

    dv += p^T do        dk += dS^T q        dbias += row sums of dS^T over far queries

At D = 256 the accumulators of 64 keys would need twice the registers of a warpgroup, so both
warpgroups take the same 64 keys, and each accumulates one of dk and dv: see `gpu_wide_gradients`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, ROWS, Problem, Ring, find_ring
from pallas_kernels.training.gpu_wide_gradients import Walk, compute_wide, wide_memory
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals


def _is_wide(problem: Problem) -> bool:
    return problem.D > 128


def _keys(problem: Problem) -> int:
    return ROWS if _is_wide(problem) else ROWS * COMPUTE


def scratch_of(problem: Problem, ring: Ring) -> dict[str, Any]:
    """Returns a program's shared-memory arrays by name."""
    block, stages, dtype = ring.block, ring.stages, problem.dtype
    parts = _keys(problem) // ROWS
    key_tile = tiles.tile_memory((parts, ROWS, problem.D), dtype)
    query_tile = tiles.tile_memory((stages, block, problem.D), dtype)
    scratch = {
        "k_tiles": key_tile,
        "v_tiles": key_tile,
        "q_tiles": query_tile,
        "do_tiles": query_tile,
        "row_values": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        "column_values": plgpu.SMEM((stages, 2, block), jnp.float32),
        "k_ready": plgpu.Barrier(num_arrivals=2 * parts + parts * (1 + problem.packed)),
        "q_ready": plgpu.Barrier(num_barriers=stages, num_arrivals=4 + problem.packed),
        "q_consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
    }
    if _is_wide(problem):
        scratch |= wide_memory(block)
    if problem.packed:
        scratch["key_segments"] = plgpu.SMEM((COMPUTE, ROWS), jnp.int32)
        scratch["query_segments"] = plgpu.SMEM((stages, block), jnp.int32)
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), dtype)
    return scratch


def ring_of(problem: Problem) -> Ring:
    """Returns the ring that streams queries and the gradients of their outputs."""
    return find_ring("retrofit_attention", "key_gradient", problem, Ring(ROWS, 2), scratch_of)


def key_gradients(
    problem: Problem, inputs: Inputs, residuals: Residuals, ring: Ring | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dk, dv [B, T, K, D] and dbias [B, K, T]; `ring` streams the queries."""
    ring = ring or ring_of(problem)
    keys = _keys(problem)
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias, *residuals]
    if problem.packed:
        others, own = inputs.query_segments, inputs.segments
        overlap = tiles.segment_overlap(own, others, keys, ring.block)
        last = overlap.shape[-1] - jnp.argmax(overlap[..., ::-1], axis=-1)
        operands += [others, own, last.astype(jnp.int32)]
    if problem.placed:
        operands.append(inputs.start)
    out_type = (
        jax.ShapeDtypeStruct(inputs.k.shape, problem.dtype),
        jax.ShapeDtypeStruct(inputs.v.shape, problem.dtype),
        jax.ShapeDtypeStruct(inputs.bias.shape, jnp.float32),
    )
    # The first keys have the most queries, so those of all heads start first, and no long program
    # is left for the end.
    grid = {"keys": problem.S // keys, "heads": problem.K}
    scratch = scratch_of(problem, ring)
    return tiles.run(problem, _program, operands, out_type, scratch, grid, "retrofit_dkv")


def query_zones(keys: int, window: int, block: int, k0, last):
    """Returns tiles (first, diagonal end, near end, boundary end, end) of keys [k0, k0 + keys).

    Places are relative to the first query; keys may lie before the first and after the last query.
    """
    first = jnp.minimum(lax.div(jnp.maximum(k0, 0), jnp.int32(block)), last)
    diagonal_end = jnp.clip(tiles.ceil_div(jnp.maximum(k0 + keys, 0), block), first, last)
    # A tile is near iff its last query is within the window of the first key, and far iff its
    # first query is beyond the window of the last key.
    near_end = lax.div(jnp.maximum(k0 + window + 1, 0), jnp.int32(block))
    boundary_end = tiles.ceil_div(jnp.maximum(k0 + keys + window, 0), block)
    near_end = jnp.clip(near_end, diagonal_end, last)
    boundary_end = jnp.clip(boundary_end, near_end, last)
    return first, diagonal_end, near_end, boundary_end, last


def query_kinds(keys: int, window: int, block: int) -> tuple[tuple[str | None, bool], ...]:
    """Returns, for each zone of `query_zones`, how the bias applies and whether keys are masked."""
    diagonal_bias = "select" if window < keys + block - 2 else None
    return (diagonal_bias, True), (None, False), ("select", False), ("all", False)


def _program(problem: Problem, inputs, outputs, memory):
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *rest = inputs
    segment_refs, rest = tiles.segment_references(problem, rest)
    dk_ref, dv_ref, dbias_ref = outputs
    stages, _, block = memory.column_values.shape
    shape, keys = (ROWS, block), _keys(problem)
    group = problem.H // problem.K
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    kv_head, program = lax.axis_index("heads"), lax.axis_index("keys")
    k0 = program * keys
    last = segment_refs[2][batch, program] if problem.packed else problem.T // block
    place = rest[0][0] if problem.placed else 0
    first, *ends = query_zones(keys, problem.window, block, k0 - place, jnp.int32(last))
    trips = ends[-1] - first

    def slot_of(head, tile):
        return lax.rem(head * trips + (tile - first), jnp.int32(stages))

    def copy():
        for part in range(keys // ROWS):
            rows = pl.ds(k0 + part * ROWS, ROWS)
            pairs = [
                (k_ref.at[batch, rows, kv_head], memory.k_tiles.at[part]),
                (v_ref.at[batch, rows, kv_head], memory.v_tiles.at[part]),
                (bias_ref.at[batch, kv_head, rows], memory.row_values.at[part]),
            ]
            if problem.packed:
                pairs.append((segment_refs[1].at[batch, rows], memory.key_segments.at[part]))
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source, target, memory.k_ready)

        def load_head(index, carry):
            head = kv_head * group + index

            def load(tile, carry):
                slot, queries = slot_of(index, tile), pl.ds(tile * block, block)
                ready = memory.q_ready.at[slot]
                plgpu.barrier_wait(memory.q_consumed.at[slot])
                pairs = [
                    (q_ref.at[batch, queries, head], memory.q_tiles.at[slot]),
                    (lse_ref.at[batch, head, queries], memory.column_values.at[slot, 0]),
                    (do_ref.at[batch, queries, head], memory.do_tiles.at[slot]),
                    (delta_ref.at[batch, head, queries], memory.column_values.at[slot, 1]),
                ]
                if problem.packed:
                    pairs.append(
                        (segment_refs[0].at[batch, queries], memory.query_segments.at[slot])
                    )
                for source, target in pairs:
                    plgpu.copy_gmem_to_smem(source, target, ready)
                return carry

            return lax.fori_loop(first, ends[-1], load, carry)

        lax.fori_loop(0, group, load_head, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(memory.q_consumed.at[slot])

    def walk_tiles(body, carry):
        kinds = query_kinds(keys, problem.window, block)

        def walk_head(head, carry):
            for (zone, causal), lower, upper in zip(kinds, (first, *ends), ends, strict=False):

                def step(tile, carry, zone=zone, causal=causal):
                    return body(slot_of(head, tile), tile, carry, bias_zone=zone, causal=causal)

                carry = lax.fori_loop(lower, upper, step, carry)
            return carry

        return lax.fori_loop(0, group, walk_head, carry)

    def compute():
        row0 = k0 + warpgroup * ROWS
        k_tile, v_tile = memory.k_tiles.at[warpgroup], memory.v_tiles.at[warpgroup]
        for slot in range(stages):
            plgpu.barrier_arrive(memory.q_consumed.at[slot])
        plgpu.barrier_wait(memory.k_ready)
        bias = tiles.load_rows(memory.row_values.at[warpgroup])
        own_segments = (
            tiles.load_rows(memory.key_segments.at[warpgroup]) if problem.packed else None
        )

        def walk(dk, dv):
            def body(slot, tile, dbias, *, bias_zone, causal):
                q_tile, do_tile = memory.q_tiles.at[slot], memory.do_tiles.at[slot]
                staged = memory.staging.at[warpgroup] if problem.interpret else None
                plgpu.barrier_wait(memory.q_ready.at[slot])
                if bias_zone == "select" or causal:
                    # Rows are keys here, so these are key - query.
                    distance = tiles.distances(shape, row0 - place, tile * block)

                added = tiles.rows_of(bias, shape)
                if bias_zone == "select":
                    added = jnp.where(distance < -problem.window, added, 0.0)
                start = tiles.columns_of(
                    tiles.load_columns(memory.column_values.at[slot, 0]), shape
                )
                if bias_zone is not None:
                    start = start + added
                minus_delta = tiles.columns_of(
                    tiles.load_columns(memory.column_values.at[slot, 1]), shape
                )

                def score_gradient(refs, read):
                    scores_ref, dp_ref = refs
                    plgpu.wgmma(scores_ref, k_tile, q_tile.transpose((1, 0)))
                    plgpu.wgmma(dp_ref, v_tile, do_tile.transpose((1, 0)))
                    weights = jnp.exp2(read(0, 1) * (problem.scale * LOG2E))
                    if causal:
                        weights = jnp.where(distance <= 0, weights, 0.0)
                    if problem.packed:
                        others = tiles.load_columns(memory.query_segments.at[slot])
                        same = tiles.rows_of(own_segments, shape) == tiles.columns_of(others, shape)
                        weights = jnp.where(same, weights, 0.0)
                    operand = weights.astype(problem.dtype)
                    tiles.multiply_registers(dv, operand, do_tile, staged)
                    return weights * read(1, 1)

                ds = tiles.accumulate(
                    (start, minus_delta), score_gradient, shape, interpret=problem.interpret
                )
                tiles.multiply_registers(dk, ds.astype(problem.dtype), q_tile, staged)
                if bias_zone == "all":
                    dbias = dbias + ds.sum(axis=1)
                elif bias_zone == "select":
                    dbias = dbias + jnp.where(distance < -problem.window, ds, 0.0).sum(axis=1)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(memory.q_consumed.at[slot])
                return dbias

            dbias = walk_tiles(body, tiles.row_vector(0.0))
            return dk[...], dv[...], dbias

        accumulator = plgpu.ACC((ROWS, problem.D), jnp.float32)
        dk, dv, dbias = pl.run_scoped(walk, accumulator, accumulator)
        k_tile[...] = (dk * problem.scale).astype(problem.dtype)
        v_tile[...] = dv.astype(problem.dtype)
        memory.row_values.at[warpgroup][...] = dbias
        plgpu.commit_smem()
        rows = pl.ds(row0, ROWS)
        plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[batch, rows, kv_head])
        plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[batch, rows, kv_head])
        plgpu.copy_smem_to_gmem(memory.row_values.at[warpgroup], dbias_ref.at[batch, kv_head, rows])
        plgpu.wait_smem_to_gmem(0)

    if _is_wide(problem):
        rows = pl.ds(k0, ROWS)
        wide = Walk(warpgroup, k0 - place, walk_tiles)
        results = (
            dk_ref.at[batch, rows, kv_head],
            dv_ref.at[batch, rows, kv_head],
            dbias_ref.at[batch, kv_head, rows],
        )
        compute = functools.partial(compute_wide, problem, wide, results, memory)
    tiles.roles(warpgroup, compute, copy)
