"""Gradients of 64 wide keys (D = 256), shared by two warpgroups of an NVIDIA GPU.

One warpgroup accumulates dv and the other dk, each all columns, so no product is computed twice.
Each needs one product of scores; the weights go from the first to the second through shared memory,
in float32:

    warpgroup 0:    S^T = k q^T      p^T = exp2(S^T - lse)              dv += p^T do
    warpgroup 1:    dP^T = v do^T    dS^T = p^T * (dP^T - delta)        dk += dS^T q

Only the first warpgroup reads keys and only the second reads values, so each can write its result
over them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import ROWS, Problem
from pallas_kernels.training.inputs import LOG2E


@dataclass(frozen=True)
class Walk:
    """The walk of a program over the queries of its keys.

    Attributes:
      warpgroup: number of the computing warpgroup.
      row0: place of the first key, counted from the first query.
      over_tiles: calls `body(slot, tile, carry, bias_zone=, causal=)` for all tiles of queries.
    """

    warpgroup: jax.Array
    row0: jax.Array
    over_tiles: Callable


def wide_memory(block: int) -> dict:
    """Returns the memory shared by both warpgroups: the weights of a tile, and their barriers."""
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    return {
        "weights": plgpu.SMEM((ROWS, block), jnp.float32, transforms=transforms),
        "weights_ready": plgpu.Barrier(num_arrivals=1),
        "weights_consumed": plgpu.Barrier(num_arrivals=1),
    }


def compute_wide(problem: Problem, walk: Walk, results, memory) -> None:
    """Computes the gradients of a program's keys; `results` refer to its dk, dv and dbias."""
    dk_ref, dv_ref, dbias_ref = results
    stages, _, block = memory.column_values.shape
    for slot in range(stages):
        plgpu.barrier_arrive(memory.q_consumed.at[slot])
    plgpu.barrier_wait(memory.k_ready)

    @pl.when(walk.warpgroup == 0)
    def _():
        dv = _value_gradient(problem, walk, memory, (ROWS, block))
        tile = memory.k_tiles.at[0]
        tile[...] = dv.astype(problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, dv_ref)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(walk.warpgroup == 1)
    def _():
        dk, dbias = _key_gradient(problem, walk, memory, (ROWS, block))
        tile, sums = memory.v_tiles.at[0], memory.row_values.at[1]
        tile[...] = (dk * problem.scale).astype(problem.dtype)
        sums[...] = dbias
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, dk_ref)
        plgpu.copy_smem_to_gmem(sums, dbias_ref)
        plgpu.wait_smem_to_gmem(0)


def _value_gradient(problem: Problem, walk: Walk, memory, shape: tuple[int, int]):
    """Returns dv [64, D], and passes every tile of weights to the other warpgroup."""
    block = shape[1]
    bias = tiles.load_rows(memory.row_values.at[0])
    own_segments = tiles.load_rows(memory.key_segments.at[0]) if problem.packed else None

    def accumulate(dv):
        def body(slot, tile, carry, *, bias_zone, causal):
            q_tile, do_tile = memory.q_tiles.at[slot], memory.do_tiles.at[slot]
            plgpu.barrier_wait(memory.q_ready.at[slot])
            k_tile = memory.k_tiles.at[tiles.hidden_zero(tile)]
            if bias_zone == "select" or causal:
                # Rows are keys here, so these are key - query.
                distance = tiles.distances(shape, walk.row0, tile * block)
            start = tiles.columns_of(tiles.load_columns(memory.column_values.at[slot, 0]), shape)
            if bias_zone is not None:
                added = tiles.rows_of(bias, shape)
                if bias_zone == "select":
                    added = jnp.where(distance < -problem.window, added, 0.0)
                start = start + added

            def weigh(refs, read):
                plgpu.wgmma(refs[0], k_tile, q_tile.transpose((1, 0)))
                weights = jnp.exp2(read(0, 0) * (problem.scale * LOG2E))
                if causal:
                    weights = jnp.where(distance <= 0, weights, 0.0)
                if problem.packed:
                    others = tiles.load_columns(memory.query_segments.at[slot])
                    same = tiles.rows_of(own_segments, shape) == tiles.columns_of(others, shape)
                    weights = jnp.where(same, weights, 0.0)
                return weights

            weights = tiles.accumulate((start,), weigh, shape, interpret=problem.interpret)
            plgpu.barrier_wait(memory.weights_consumed)
            memory.weights[...] = weights
            plgpu.barrier_arrive(memory.weights_ready)
            staged = memory.staging.at[0] if problem.interpret else None
            tiles.multiply_registers(dv, weights.astype(problem.dtype), do_tile, staged)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory.q_consumed.at[slot])
            return carry

        walk.over_tiles(body, jnp.int32(0))
        plgpu.barrier_wait(memory.weights_consumed)
        return dv[...]

    return pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.D), jnp.float32))


def _key_gradient(problem: Problem, walk: Walk, memory, shape: tuple[int, int]):
    """Returns dk [64, D], not yet scaled, and dbias [64]."""
    block = shape[1]
    plgpu.barrier_arrive(memory.weights_consumed)

    def accumulate(dk):
        def body(slot, tile, dbias, *, bias_zone, causal):
            del causal  # The weights of masked scores are zero.
            q_tile, do_tile = memory.q_tiles.at[slot], memory.do_tiles.at[slot]
            plgpu.barrier_wait(memory.q_ready.at[slot])
            v_tile = memory.v_tiles.at[tiles.hidden_zero(tile)]
            minus_delta = tiles.load_columns(memory.column_values.at[slot, 1])

            def score_gradient(refs, read):
                plgpu.wgmma(refs[0], v_tile, do_tile.transpose((1, 0)))
                dp = read(0, 0)
                plgpu.barrier_wait(memory.weights_ready)
                weights = plgpu.load(memory.weights, layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(memory.weights_consumed)
                return weights * dp

            start = tiles.columns_of(minus_delta, shape)
            ds = tiles.accumulate((start,), score_gradient, shape, interpret=problem.interpret)
            staged = memory.staging.at[1] if problem.interpret else None
            tiles.multiply_registers(dk, ds.astype(problem.dtype), q_tile, staged)
            if bias_zone == "all":
                dbias = dbias + ds.sum(axis=1)
            elif bias_zone == "select":
                distance = tiles.distances(shape, walk.row0, tile * block)
                dbias = dbias + jnp.where(distance < -problem.window, ds, 0.0).sum(axis=1)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory.q_consumed.at[slot])
            return dbias

        dbias = walk.over_tiles(body, tiles.row_vector(0.0))
        return dk[...], dbias

    return pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.D), jnp.float32))
