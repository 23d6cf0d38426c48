"""Gradients of training attention for TPU.

A program of `query_gradient` walks the key blocks of a query block, as in the forward pass. A
program of `key_gradients` walks the query blocks of a key block, over all heads of the group, with
transposed scores: dk, dv and dbias are summed in VMEM, and no two programs write to the same place.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.training import tpu_blocks as blocks
from pallas_kernels.training.inputs import Inputs, Residuals
from pallas_kernels.training.tpu_blocks import LANES, Problem
from pallas_kernels.training.tpu_forward import (
    query_operands,
    query_specs,
    same_segment,
    unpack,
    visible_keys,
)


def query_gradient(problem: Problem, inputs: Inputs, residuals: Residuals) -> jax.Array:
    """Computes dq [B, K, G, T, D]."""
    specs, query = query_specs(problem)
    row = pl.BlockSpec((None, None, None, 1, problem.rows), lambda b, h, i, j, *_: (b, h, i, 0, 0))
    return blocks.build(
        problem,
        _query_kernel,
        (problem.B, problem.K, problem.T // problem.query, problem.S // problem.keys),
        [*specs, query, row, row],
        query,
        jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
        [
            pltpu.VMEM((problem.rows, LANES), jnp.float32),
            pltpu.VMEM((problem.rows, LANES), jnp.float32),
            pltpu.VMEM((problem.rows, problem.D), jnp.float32),
        ],
        "retrofit_dq",
    )(*query_operands(problem, inputs), *residuals)


def _query_kernel(problem: Problem, *refs):
    start, first, (q_ref, k_ref, v_ref, bias_ref), segments, rest = unpack(problem, refs)
    do_ref, lse_ref, delta_ref, dq_ref, lse_column, delta_column, accumulator_ref = rest
    i, j, visible = visible_keys(problem, start, first)

    @pl.when(j == 0)
    def _():
        for row, column in ((lse_ref, lse_column), (delta_ref, delta_column)):
            column[...] = jnp.broadcast_to(row[...], (LANES, problem.rows)).T
        accumulator_ref[...] = jnp.zeros_like(accumulator_ref)

    def body(*, bias, masked):
        q = q_ref[...].reshape(problem.rows, problem.D)
        do = do_ref[...].reshape(problem.rows, problem.D)
        scores = blocks.product(problem, q, k_ref[...], (1, 1)) + lse_column[:, :1]
        seen = None
        if masked:
            distance = blocks.distances(problem, i, j, start, transposed=False)
            scores += jnp.where(distance > problem.window, bias_ref[...], 0.0)
            seen = distance >= 0
            if problem.packed:
                seen &= same_segment(problem, *segments)
        elif bias:
            scores += bias_ref[...]
        weights = jnp.exp2(scores * problem.multiplier)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        dp = blocks.product(problem, do, v_ref[...], (1, 1))
        ds = (weights * (dp + delta_column[:, :1])).astype(problem.dtype)
        accumulator_ref[...] += blocks.product(problem, ds, k_ref[...], (1, 0))

    blocks.by_zone(problem, i, j, visible, body, start)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq = (accumulator_ref[...] * problem.scale).astype(problem.dtype)
        dq_ref[...] = dq.reshape(dq_ref.shape)


def key_gradients(
    problem: Problem, inputs: Inputs, residuals: Residuals
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dk, dv [B, K, T, D] and dbias [B, K, 1, T]."""
    query_blocks = problem.T // problem.query

    def query_block(b, i, j, scalars):
        start, last = blocks.scalars_of(problem, scalars)
        first = j * problem.keys - start
        if problem.placed:  # keys may lie before the first query and after the last
            first = jnp.clip(first, 0, problem.T - 1)
        first = lax.div(first, jnp.int32(problem.query))
        return jnp.clip(i, first, last[b, j] if problem.packed else query_blocks - 1)

    query = pl.BlockSpec(
        (None, None, problem.G, problem.query, problem.D),
        lambda b, h, j, i, *scalars: (b, h, 0, query_block(b, i, j, scalars), 0),
    )
    key = pl.BlockSpec((None, None, problem.keys, problem.D), lambda b, h, j, i, *_: (b, h, j, 0))
    bias = pl.BlockSpec((None, None, 1, problem.keys), lambda b, h, j, i, *_: (b, h, 0, j))
    row = pl.BlockSpec(
        (None, None, None, 1, problem.rows),
        lambda b, h, j, i, *scalars: (b, h, query_block(b, i, j, scalars), 0, 0),
    )
    specs, operands = [query, key, key, bias], [inputs.q, inputs.k, inputs.v, inputs.bias]
    last = None
    if problem.packed:
        specs.append(
            pl.BlockSpec(
                (None, 1, problem.query),
                lambda b, h, j, i, *scalars: (b, 0, query_block(b, i, j, scalars)),
            )
        )
        specs.append(pl.BlockSpec((None, 1, problem.keys), lambda b, h, j, i, *_: (b, 0, j)))
        own, others = inputs.query_segments, inputs.segments
        last = blocks.segment_bounds(problem, own, others)[1]
        operands += [own[:, None], others[:, None]]
    return blocks.build(
        problem,
        _key_kernel,
        (problem.B, problem.K, problem.S // problem.keys, query_blocks),
        [*specs, query, row, row],
        (key, key, bias),
        (
            jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype),
            jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype),
            jax.ShapeDtypeStruct(inputs.bias.shape, jnp.float32),
        ),
        [
            pltpu.VMEM((problem.keys, problem.D), jnp.float32),
            pltpu.VMEM((problem.keys, problem.D), jnp.float32),
            pltpu.VMEM((problem.keys, LANES), jnp.float32),
            pltpu.VMEM((problem.keys, LANES), jnp.float32),
        ],
        "retrofit_dkv",
    )(*blocks.prefetched(problem, inputs, last), *operands, *residuals)


def _key_kernel(problem: Problem, *refs):
    start, last, (q_ref, k_ref, v_ref, bias_ref), segments, rest = unpack(problem, refs)
    do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dbias_ref, *sums = rest
    dk_sum, dv_sum, dbias_sum, bias_column = sums
    j, i = pl.program_id(2), pl.program_id(3)
    visible = start + (i + 1) * problem.query > j * problem.keys
    if problem.packed:
        visible &= i <= last[pl.program_id(0), j]

    @pl.when(i == 0)
    def _():
        for total in (dk_sum, dv_sum, dbias_sum):
            total[...] = jnp.zeros_like(total)
        bias_column[...] = jnp.broadcast_to(bias_ref[...], (LANES, problem.keys)).T

    def body(*, bias, masked):
        q = q_ref[...].reshape(problem.rows, problem.D)
        do = do_ref[...].reshape(problem.rows, problem.D)
        scores = blocks.product(problem, k_ref[...], q, (1, 1)) + lse_ref[...]
        seen = far = None
        if masked:
            distance = blocks.distances(problem, i, j, start, transposed=True)
            far = distance > problem.window
            scores += jnp.where(far, bias_column[:, :1], 0.0)
            seen = distance >= 0
            if problem.packed:
                own = blocks.to_column(segments[1][...])
                seen &= own == jnp.concatenate([segments[0][...]] * problem.G, axis=1)
        elif bias:
            scores += bias_column[:, :1]
        weights = jnp.exp2(scores * problem.multiplier)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        dv_sum[...] += blocks.product(problem, weights.astype(problem.dtype), do, (1, 0))
        dp = blocks.product(problem, v_ref[...], do, (1, 1))
        ds = weights * (dp + delta_ref[...])
        dk_sum[...] += blocks.product(problem, ds.astype(problem.dtype), q, (1, 0))
        if bias:
            biased = ds if far is None else jnp.where(far, ds, 0.0)
            dbias_sum[...] += biased.sum(axis=1, keepdims=True)

    blocks.by_zone(problem, i, j, visible, body, start)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        dk_ref[...] = (dk_sum[...] * problem.scale).astype(problem.dtype)
        dv_ref[...] = dv_sum[...].astype(problem.dtype)
        dbias_ref[...] = dbias_sum[...].T[:1]
