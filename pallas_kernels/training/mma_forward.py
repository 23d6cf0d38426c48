"""Forward training attention with the products of Ampere: output and base-2 log-sum-exp.

One program takes a tile of queries of one head and walks the key tiles like the Hopper kernel
(`gpu_forward`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stores import store
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training import mma_tiles
from pallas_kernels.training.gpu_tiles import Problem
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST, Inputs
from pallas_kernels.training.mma_tiles import Blocks


def blocks_of(problem: Problem) -> Blocks:
    """Returns the tiles of the kernel."""
    wide = 16 if mma_tiles.on_blackwell() else 32
    return Blocks(64, 64 if problem.D <= 128 else wide)


def forward(
    problem: Problem, inputs: Inputs, blocks: Blocks | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T]."""
    blocks = blocks or blocks_of(problem)
    out_type = (
        jax.ShapeDtypeStruct(inputs.q.shape, problem.dtype),
        jax.ShapeDtypeStruct((problem.B, problem.H, problem.T), jnp.float32),
    )
    key_tile = mma_tiles.tile_memory(blocks.columns, problem)
    scratch = {
        "q_tile": mma_tiles.tile_memory(blocks.rows, problem),
        "k_tile": key_tile,
        "v_tile": key_tile,
    }
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias]
    operands += mma_tiles.operands_over_keys(problem, inputs, blocks)
    grid = {"heads": problem.H, "queries": problem.T // blocks.rows}
    program = functools.partial(_program, blocks=blocks)
    name = "retrofit_forward_mma"
    return tiles.run(problem, program, operands, out_type, scratch, grid, name, warpgroups=1)


def _program(problem: Problem, inputs, outputs, memory, *, blocks: Blocks):
    q_ref, k_ref, v_ref, bias_ref, *rest = inputs
    out_ref, lse_ref = outputs
    batch, head = lax.axis_index("batch"), lax.axis_index("heads")
    kv_head = mma_tiles.kv_head_of(problem, head)
    walk = mma_tiles.walk_over_keys(problem, blocks, rest)
    shape, queries = (blocks.rows, blocks.columns), walk.queries
    multiplier = problem.scale * LOG2E

    def load(ref, tile):
        keys = mma_tiles.tokens(tile, blocks.columns)
        return mma_tiles.load_tile(ref.at[batch, keys, kv_head])

    memory.q_tile[...] = mma_tiles.load_tile(q_ref.at[batch, queries, head])

    def body(tile, carry, *, bias, causal):
        k_tile, accumulator, maximum, total = carry
        keys = mma_tiles.tokens(tile, blocks.columns)
        v_tile = load(v_ref, tile)
        if bias is not None:
            added = mma_tiles.columns_at(bias_ref.at[batch, kv_head, keys])
        memory.k_tile[...] = k_tile
        scores = mma_tiles.full(shape)
        scores = mma_tiles.multiply_transposed(problem, scores, memory.q_tile, memory.k_tile)
        distance = tiles.distances(shape, walk.place, tile * blocks.columns)
        if bias is not None:
            added = tiles.columns_of(added, shape)
            if bias == "select":
                added = jnp.where(distance > problem.window, added, 0.0)
            scores += added
        scores = walk.hide(scores, tile, distance if causal else None, HIDDEN)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * multiplier)
        shrink = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * multiplier - tiles.rows_of(new_maximum, shape))
        total = total * shrink + weights.sum(axis=1)
        accumulator = accumulator * tiles.rows_of(shrink, accumulator.shape)
        following = load(k_ref, jnp.minimum(tile + 1, walk.last))
        memory.v_tile[...] = v_tile
        accumulator = mma_tiles.multiply(problem, accumulator, weights, memory.v_tile)
        return following, accumulator, new_maximum, total

    carry = (
        load(k_ref, walk.bounds[0]),
        mma_tiles.full((blocks.rows, problem.D)),
        mma_tiles.row_vector(blocks.rows, LOWEST),
        mma_tiles.row_vector(blocks.rows, 0.0),
    )
    diagonal_bias = problem.window < blocks.rows + blocks.columns - 2
    carry = tiles.zone_loops(body, walk.bounds, carry, diagonal_bias=diagonal_bias)
    _, accumulator, maximum, total = carry
    accumulator = accumulator * tiles.rows_of(1.0 / total, accumulator.shape)
    store(out_ref.at[batch, queries, head], accumulator.astype(problem.dtype))
    store(lse_ref.at[batch, head, queries], maximum + jnp.log(total) * LOG2E)
