"""Gradients of training attention with respect to keys, values and bias, for NVIDIA GPUs.

One program owns 128 keys of one KV head and walks the queries of every head of its group, so the
gradients sum in registers: no atomics, no sum over heads afterwards, the same bits every time.
Scores are held transposed, S^T = k q^T, which makes the bias a value per row and leaves

    dv += p^T do        dk += dS^T q        dbias += row sums of dS^T over far queries

At D = 256 the accumulators of 64 keys fill a warpgroup's registers twice over; there both
warpgroups take the same 64 keys and accumulate half of the columns each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, LOG2E, ROWS, Problem, Ring, find_ring


def _split_columns(problem: Problem) -> bool:
    return problem.D > 128


def _keys(problem: Problem) -> int:
    return ROWS if _split_columns(problem) else ROWS * COMPUTE


def resident(problem: Problem) -> int:
    """Rows of D elements that a program keeps: its keys and values."""
    return 2 * _keys(problem)


def ring_of(problem: Problem) -> Ring:
    """Return how the kernel streams queries and the gradients of their outputs."""
    part = "key_gradient"
    return find_ring("retrofit_attention", part, problem, resident(problem), Ring(ROWS, 2))


def key_gradients(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_bias: jax.Array,
    segments: jax.Array | None,
    output_gradient: jax.Array,
    minus_lse: jax.Array,
    minus_delta: jax.Array,
    ring: Ring | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute dk, dv [B, T, K, D] and dbias [B, K, T]; arguments as for `query_gradient`."""
    ring = ring or ring_of(problem)
    block, stages = ring.block, ring.stages
    keys = _keys(problem)
    parts = keys // ROWS
    key_tile = tiles.tile_memory((parts, ROWS, problem.D), q.dtype)
    query_tile = tiles.tile_memory((stages, block, problem.D), q.dtype)
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
    operands = [q, k, v, raw_bias, output_gradient, minus_lse, minus_delta]
    if _split_columns(problem):
        scratch["done"] = plgpu.Barrier(num_arrivals=COMPUTE)
    if segments is not None:
        scratch["key_segments"] = plgpu.SMEM((COMPUTE, ROWS), jnp.int32)
        scratch["query_segments"] = plgpu.SMEM((stages, block), jnp.int32)
        overlap = tiles.segment_overlap(segments, keys, block)
        last = overlap.shape[-1] - jnp.argmax(overlap[..., ::-1], axis=-1)
        operands += [segments, last.astype(jnp.int32)]
    if problem.interpret:
        scratch["staging"] = tiles.tile_memory((COMPUTE, ROWS, block), q.dtype)

    def kernel(*refs, **memory):
        _program(problem, refs[: len(operands)], refs[len(operands) :], **memory)

    out_type = (
        jax.ShapeDtypeStruct(k.shape, k.dtype),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct(raw_bias.shape, jnp.float32),
    )
    # The first keys have the most queries: all heads' first keys start first, so that no long
    # program is left for the end.
    grid = {"keys": problem.T // keys, "heads": problem.K}
    run = tiles.build_kernel(problem, kernel, out_type, scratch, grid, "retrofit_dkv")
    return run(*operands)


def _query_zones(problem: Problem, block: int, k0, last):
    """Tile numbers (first, diagonal end, near end, boundary end, end) for keys [k0, k0 + keys)."""
    keys, window = _keys(problem), problem.window
    first = lax.div(k0, jnp.int32(block))
    diagonal_end = jnp.minimum(tiles.ceil_div(k0 + keys, block), last)
    # A tile is near iff its last query is within the window of the first key, and far iff its
    # first query is beyond the window of the last key.
    near_end = lax.div(jnp.maximum(k0 + window + 1, 0), jnp.int32(block))
    boundary_end = tiles.ceil_div(k0 + keys + window, block)
    near_end = jnp.clip(near_end, diagonal_end, last)
    boundary_end = jnp.clip(boundary_end, near_end, last)
    return first, diagonal_end, near_end, boundary_end, last


def _program(
    problem: Problem,
    inputs,
    outputs,
    *,
    k_tiles,
    v_tiles,
    q_tiles,
    do_tiles,
    row_values,
    column_values,
    k_ready,
    q_ready,
    q_consumed,
    done: Any = None,
    key_segments: Any = None,
    query_segments: Any = None,
    staging: Any = None,
):
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *segment_refs = inputs
    dk_ref, dv_ref, dbias_ref = outputs
    stages, _, block = column_values.shape
    shape, keys = (ROWS, block), _keys(problem)
    split, group = _split_columns(problem), problem.H // problem.K
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    kv_head, program = lax.axis_index("heads"), lax.axis_index("keys")
    k0 = program * keys
    last = segment_refs[1][batch, program] if problem.packed else problem.T // block
    first, *ends = _query_zones(problem, block, k0, jnp.int32(last))
    trips = ends[-1] - first

    def slot_of(head, tile):
        return lax.rem(head * trips + (tile - first), jnp.int32(stages))

    def copy():
        for part in range(keys // ROWS):
            rows = pl.ds(k0 + part * ROWS, ROWS)
            pairs = [
                (k_ref.at[batch, rows, kv_head], k_tiles.at[part]),
                (v_ref.at[batch, rows, kv_head], v_tiles.at[part]),
                (bias_ref.at[batch, kv_head, rows], row_values.at[part]),
            ]
            if problem.packed:
                pairs.append((segment_refs[0].at[batch, rows], key_segments.at[part]))
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source, target, k_ready)

        def load_head(index, carry):
            head = kv_head * group + index

            def load(tile, carry):
                slot, queries = slot_of(index, tile), pl.ds(tile * block, block)
                ready = q_ready.at[slot]
                plgpu.barrier_wait(q_consumed.at[slot])
                pairs = [
                    (q_ref.at[batch, queries, head], q_tiles.at[slot]),
                    (lse_ref.at[batch, head, queries], column_values.at[slot, 0]),
                    (do_ref.at[batch, queries, head], do_tiles.at[slot]),
                    (delta_ref.at[batch, head, queries], column_values.at[slot, 1]),
                ]
                if problem.packed:
                    pairs.append((segment_refs[0].at[batch, queries], query_segments.at[slot]))
                for source, target in pairs:
                    plgpu.copy_gmem_to_smem(source, target, ready)
                return carry

            return lax.fori_loop(first, ends[-1], load, carry)

        lax.fori_loop(0, group, load_head, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(q_consumed.at[slot])

    def meet(barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def compute():
        # Always 0 where both warpgroups share the tile; a traced number, as run_state asks for.
        part = lax.div(warpgroup, jnp.int32(COMPUTE)) if split else warpgroup
        row0 = k0 if split else k0 + warpgroup * ROWS
        width = problem.D // COMPUTE if split else problem.D
        k_tile, v_tile = k_tiles.at[part], v_tiles.at[part]
        for slot in range(stages):
            plgpu.barrier_arrive(q_consumed.at[slot])
        plgpu.barrier_wait(k_ready)
        bias = tiles.load_rows(row_values.at[part])
        own_segments = tiles.load_rows(key_segments.at[part]) if problem.packed else None

        def columns(ref):
            if not split:
                return ref
            return ref.at[:, pl.ds(pl.multiple_of(warpgroup * width, width), width)]

        def walk(dk, dv):
            def body(head, tile, dbias, *, bias_zone, causal):
                slot = slot_of(head, tile)
                q_tile, do_tile = q_tiles.at[slot], do_tiles.at[slot]
                staged = None if staging is None else staging.at[warpgroup]
                plgpu.barrier_wait(q_ready.at[slot])
                if bias_zone == "select" or causal:
                    # Rows are keys here, so this is key - query.
                    distance = tiles.distances(shape, row0, tile * block)

                added = tiles.rows_of(bias, shape)
                if bias_zone == "select":
                    added = jnp.where(distance < -problem.window, added, 0.0)
                start = tiles.columns_of(tiles.load_columns(column_values.at[slot, 0]), shape)
                if bias_zone is not None:
                    start = start + added
                minus_delta = tiles.columns_of(tiles.load_columns(column_values.at[slot, 1]), shape)

                def score_gradient(refs, read):
                    scores_ref, dp_ref = refs
                    plgpu.wgmma(scores_ref, k_tile, q_tile.transpose((1, 0)))
                    plgpu.wgmma(dp_ref, v_tile, do_tile.transpose((1, 0)))
                    weights = jnp.exp2(read(0, 1) * (problem.scale * LOG2E))
                    if causal:
                        weights = jnp.where(distance <= 0, weights, 0.0)
                    if problem.packed:
                        others = tiles.load_columns(query_segments.at[slot])
                        same = tiles.rows_of(own_segments, shape) == tiles.columns_of(others, shape)
                        weights = jnp.where(same, weights, 0.0)
                    operand = weights.astype(problem.dtype)
                    tiles.multiply_registers(dv, operand, columns(do_tile), staged)
                    return weights * read(1, 1)

                ds = tiles.accumulate(
                    (start, minus_delta), score_gradient, shape, interpret=problem.interpret
                )
                tiles.multiply_registers(dk, ds.astype(problem.dtype), columns(q_tile), staged)
                if bias_zone == "all":
                    dbias = dbias + ds.sum(axis=1)
                elif bias_zone == "select":
                    dbias = dbias + jnp.where(distance < -problem.window, ds, 0.0).sum(axis=1)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_consumed.at[slot])
                return dbias

            diagonal_bias = "select" if problem.window < keys + block - 2 else None
            kinds = ((diagonal_bias, True), (None, False), ("select", False), ("all", False))

            def walk_head(head, dbias):
                for (zone, causal), lower, upper in zip(kinds, (first, *ends), ends, strict=False):

                    def step(tile, dbias, zone=zone, causal=causal):
                        return body(head, tile, dbias, bias_zone=zone, causal=causal)

                    dbias = lax.fori_loop(lower, upper, step, dbias)
                return dbias

            dbias = lax.fori_loop(0, group, walk_head, tiles.row_vector(0.0))
            return dk[...], dv[...], dbias

        accumulator = plgpu.ACC((ROWS, width), jnp.float32)
        dk, dv, dbias = pl.run_scoped(walk, accumulator, accumulator)
        if split:
            # Both warpgroups read these tiles: neither writes before the other is through.
            meet(done)
        columns(k_tile)[...] = (dk * problem.scale).astype(problem.dtype)
        columns(v_tile)[...] = dv.astype(problem.dtype)
        row_values.at[warpgroup][...] = dbias
        plgpu.commit_smem()
        rows = pl.ds(row0, ROWS)

        def write_keys():
            plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[batch, rows, kv_head])
            plgpu.copy_smem_to_gmem(row_values.at[warpgroup], dbias_ref.at[batch, kv_head, rows])

        def write_values():
            plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[batch, rows, kv_head])

        if split:
            # The halves meet in one tile; each warpgroup writes one of the two out.
            meet(done)
            pl.when(warpgroup == 0)(write_keys)
            pl.when(warpgroup == 1)(write_values)
        else:
            write_keys()
            write_values()
        plgpu.wait_smem_to_gmem(0)

    tiles.roles(warpgroup, compute, copy)
