"""Gradients of training attention with respect to keys, values and bias, with Ampere's products.

One program owns the keys of one tile and walks the queries of every head of its group, with the
formulas of the Hopper kernel (`gpu_key_gradient`). At D = 256 the gradients of 64 keys would need
twice the registers of a warpgroup, so two programs take the same keys, and each sums half of the
columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.stores import store
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training import mma_tiles
from pallas_kernels.training.gpu_key_gradient import query_kinds, query_zones
from pallas_kernels.training.gpu_tiles import Problem
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals
from pallas_kernels.training.mma_tiles import Blocks


def blocks_of(problem: Problem) -> Blocks:
    """Returns the tiles of the kernel."""
    most = 64 if mma_tiles.on_blackwell() else 128
    return Blocks(64, 32 if most >= problem.D else 16)


def _parts(problem: Problem) -> int:
    """Returns the number of programs that share the columns of a tile of keys."""
    return 2 if problem.D > 128 else 1


def key_gradients(
    problem: Problem, inputs: Inputs, residuals: Residuals, blocks: Blocks | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dk, dv [B, S, K, D] and dbias [B, K, S]."""
    blocks = blocks or blocks_of(problem)
    key_tile = mma_tiles.tile_memory(blocks.rows, problem)
    query_tile = mma_tiles.tile_memory(blocks.columns, problem)
    scratch = {"k_tile": key_tile, "v_tile": key_tile, "q_tile": query_tile, "do_tile": query_tile}
    operands = [inputs.q, inputs.k, inputs.v, inputs.bias, *residuals]
    if problem.packed:
        own, others = inputs.segments, inputs.query_segments
        overlap = tiles.segment_overlap(own, others, blocks.rows, blocks.columns)
        last = overlap.shape[-1] - jnp.argmax(overlap[..., ::-1], axis=-1)
        operands += [own, others, last.astype(jnp.int32)]
    if problem.placed:
        operands.append(inputs.start)
    out_type = (
        jax.ShapeDtypeStruct(inputs.k.shape, problem.dtype),
        jax.ShapeDtypeStruct(inputs.v.shape, problem.dtype),
        jax.ShapeDtypeStruct(inputs.bias.shape, jnp.float32),
    )
    # As on Hopper, the first keys of all heads start first: they have the most queries.
    grid = {"keys": problem.S // blocks.rows, "heads": problem.K, "part": _parts(problem)}
    program = functools.partial(_program, blocks=blocks)
    name = "retrofit_dkv_mma"
    return tiles.run(problem, program, operands, out_type, scratch, grid, name, warpgroups=1)


def _program(problem: Problem, inputs, outputs, memory, *, blocks: Blocks):
    q_ref, k_ref, v_ref, bias_ref, do_ref, lse_ref, delta_ref, *rest = inputs
    segment_refs, rest = tiles.segment_references(problem, rest)
    dk_ref, dv_ref, dbias_ref = outputs
    block, shape = blocks.columns, (blocks.rows, blocks.columns)
    group, width = problem.H // problem.K, problem.D // _parts(problem)
    batch, kv_head, program = (lax.axis_index(name) for name in ("batch", "heads", "keys"))
    k0 = program * blocks.rows
    keys = pl.ds(k0, blocks.rows)
    last = segment_refs[2][batch, program] if problem.packed else problem.T // block
    place = rest[0][0] if problem.placed else 0
    first, *ends = query_zones(blocks.rows, problem.window, block, k0 - place, jnp.int32(last))
    part = lax.axis_index("part")
    columns = pl.ds(pl.multiple_of(part * width, width), width)
    own = slice(None) if _parts(problem) == 1 else columns

    def load(ref, head, tile):
        queries = mma_tiles.tokens(tile, block)
        return mma_tiles.load_tile(ref.at[batch, queries, head])

    memory.k_tile[...] = mma_tiles.load_tile(k_ref.at[batch, keys, kv_head])
    memory.v_tile[...] = mma_tiles.load_tile(v_ref.at[batch, keys, kv_head])
    bias = mma_tiles.rows_at(bias_ref.at[batch, kv_head, keys])
    segments = mma_tiles.rows_at(segment_refs[0].at[batch, keys]) if problem.packed else None

    def body(head, tile, carry, *, bias_zone, causal):
        q_tile, dk, dv, dbias = carry
        queries = mma_tiles.tokens(tile, block)
        do_tile = load(do_ref, head, tile)
        start = mma_tiles.columns_at(lse_ref.at[batch, head, queries])
        minus_delta = mma_tiles.columns_at(delta_ref.at[batch, head, queries])
        if problem.packed:
            others = mma_tiles.columns_at(segment_refs[1].at[batch, queries])
        memory.q_tile[...] = q_tile
        scores = mma_tiles.multiply_transposed(
            problem, mma_tiles.full(shape), memory.k_tile, memory.q_tile
        )
        # Rows are keys here, so these are key - query.
        distance = tiles.distances(shape, k0 - place, tile * block)
        scores += tiles.columns_of(start, shape)
        if bias_zone is not None:
            added = tiles.rows_of(bias, shape)
            if bias_zone == "select":
                added = jnp.where(distance < -problem.window, added, 0.0)
            scores += added
        weights = jnp.exp2(scores * (problem.scale * LOG2E))
        if causal:
            weights = jnp.where(distance <= 0, weights, 0.0)
        if problem.packed:
            same = tiles.rows_of(segments, shape) == tiles.columns_of(others, shape)
            weights = jnp.where(same, weights, 0.0)
        following = load(q_ref, head, jnp.minimum(tile + 1, ends[-1] - 1))
        memory.do_tile[...] = do_tile
        dv = mma_tiles.multiply(problem, dv, weights, memory.do_tile.at[:, own])
        gradient = mma_tiles.multiply_transposed(
            problem, mma_tiles.full(shape), memory.v_tile, memory.do_tile
        )
        ds = weights * (gradient + tiles.columns_of(minus_delta, shape))
        dk = mma_tiles.multiply(problem, dk, ds, memory.q_tile.at[:, own])
        if bias_zone == "all":
            dbias = dbias + ds.sum(axis=1)
        elif bias_zone == "select":
            dbias = dbias + jnp.where(distance < -problem.window, ds, 0.0).sum(axis=1)
        return following, dk, dv, dbias

    def walk_head(index, carry):
        head = kv_head * group + index
        carry = (load(q_ref, head, jnp.minimum(first, problem.T // block - 1)), *carry)
        kinds = query_kinds(blocks.rows, problem.window, block)
        for (zone, causal), lower, upper in zip(kinds, (first, *ends), ends, strict=False):

            def step(tile, carry, zone=zone, causal=causal):
                return body(head, tile, carry, bias_zone=zone, causal=causal)

            carry = lax.fori_loop(lower, upper, step, carry)
        return carry[1:]

    sums = mma_tiles.full((blocks.rows, width))
    carry = sums, sums, mma_tiles.row_vector(blocks.rows, 0.0)
    dk, dv, dbias = lax.fori_loop(0, group, walk_head, carry)
    store(dk_ref.at[batch, keys, kv_head, own], (dk * problem.scale).astype(problem.dtype))
    store(dv_ref.at[batch, keys, kv_head, own], dv.astype(problem.dtype))

    @pl.when(part == 0)
    def _():
        store(dbias_ref.at[batch, kv_head, keys], dbias)
