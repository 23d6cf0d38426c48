"""Gradient of training attention with respect to the queries, with the products of Ampere.

The kernel is built like the forward kernel (`mma_forward`), with the formulas of the Hopper kernel
(`gpu_query_gradient`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stores import store
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training import mma_tiles
from pallas_kernels.training.gpu_tiles import Problem
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals
from pallas_kernels.training.mma_tiles import Blocks


def blocks_of(problem: Problem) -> Blocks:
    """Returns the tiles of the kernel."""
    return Blocks(64, 64 if problem.D <= 64 else 32 if problem.D <= 128 else 16)


def query_gradient(
    problem: Problem, inputs: Inputs, residuals: Residuals, blocks: Blocks | None = None
) -> jax.Array:
    """Computes dq [B, T, H, D]."""
    blocks = blocks or blocks_of(problem)
    query_tile = mma_tiles.tile_memory(blocks.rows, problem)
    key_tile = mma_tiles.tile_memory(blocks.columns, problem)
    scratch = {"q_tile": query_tile, "do_tile": query_tile, "k_tile": key_tile, "v_tile": key_tile}
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias, *residuals]
    operands += mma_tiles.operands_over_keys(problem, inputs, blocks)
    out_type = jax.ShapeDtypeStruct(inputs.q.shape, problem.dtype)
    grid = {"heads": problem.H, "queries": problem.T // blocks.rows}
    program = functools.partial(_program, blocks=blocks)
    name = "retrofit_dq_mma"
    return tiles.run(problem, program, operands, out_type, scratch, grid, name, warpgroups=1)


def _program(problem: Problem, inputs, outputs, memory, *, blocks: Blocks):
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *rest = inputs
    (dq_ref,) = outputs
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    kv_head = mma_tiles.kv_head_of(problem, head)
    walk = mma_tiles.walk_over_keys(problem, blocks, rest)
    shape, queries = (blocks.rows, blocks.columns), walk.queries

    def load(ref, tile):
        keys = mma_tiles.tokens(tile, blocks.columns)
        return mma_tiles.load_tile(ref.at[batch, keys, kv_head])

    memory.q_tile[...] = mma_tiles.load_tile(q_ref.at[batch, queries, head])
    memory.do_tile[...] = mma_tiles.load_tile(do_ref.at[batch, queries, head])
    minus_lse = mma_tiles.rows_at(lse_ref.at[batch, head, queries])
    minus_delta = mma_tiles.rows_at(delta_ref.at[batch, head, queries])

    def body(tile, carry, *, bias, causal):
        k_tile, dq = carry
        keys = mma_tiles.tokens(tile, blocks.columns)
        v_tile = load(v_ref, tile)
        if bias is not None:
            added = tiles.columns_of(mma_tiles.columns_at(bias_ref.at[batch, kv_head, keys]), shape)
        memory.k_tile[...] = k_tile
        scores = tiles.rows_of(minus_lse, shape)
        scores = mma_tiles.multiply_transposed(problem, scores, memory.q_tile, memory.k_tile)
        distance = tiles.distances(shape, walk.place, tile * blocks.columns)
        if bias is not None:
            if bias == "select":
                added = jnp.where(distance > problem.window, added, 0.0)
            scores += added
        weights = jnp.exp2(scores * (problem.scale * LOG2E))
        weights = walk.hide(weights, tile, distance if causal else None, 0.0)
        following = load(k_ref, jnp.minimum(tile + 1, walk.last))
        memory.v_tile[...] = v_tile
        gradient = tiles.rows_of(minus_delta, shape)
        gradient = mma_tiles.multiply_transposed(problem, gradient, memory.do_tile, memory.v_tile)
        dq = mma_tiles.multiply(problem, dq, weights * gradient, memory.k_tile)
        return following, dq

    diagonal_bias = problem.window < blocks.rows + blocks.columns - 2
    carry = load(k_ref, walk.bounds[0]), mma_tiles.full((blocks.rows, problem.D))
    _, dq = tiles.zone_loops(body, walk.bounds, carry, diagonal_bias=diagonal_bias)
    store(dq_ref.at[batch, queries, head], (dq * problem.scale).astype(problem.dtype))
