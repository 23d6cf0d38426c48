"""Forward training attention for TPU: output and base-2 log-sum-exp.

The grid is (B, K, query blocks, key blocks); the last axis runs in sequence and keeps the running
maximum, sum and output of a query block in VMEM.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.training import tpu_blocks as blocks
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST, Inputs
from pallas_kernels.training.tpu_blocks import LANES, Problem


def query_specs(problem: Problem) -> tuple[list[pl.BlockSpec], pl.BlockSpec]:
    """Returns the block specs of q, k, v, bias (and segments), and of a query-shaped array.

    Key blocks that a query block does not see are not copied: they get the index of the nearest
    visible block, which has been copied already.
    """

    def key_block(b, i, j, scalars):
        start, first = blocks.scalars_of(problem, scalars)
        last = lax.div(start + (i + 1) * problem.query - 1, jnp.int32(problem.keys))
        if problem.placed:  # some queries may be padding, past all keys
            last = jnp.minimum(last, problem.S // problem.keys - 1)
        return jnp.clip(j, first[b, i] if problem.packed else 0, last)

    query = pl.BlockSpec(
        (None, None, problem.G, problem.query, problem.D), lambda b, h, i, j, *_: (b, h, 0, i, 0)
    )
    key = pl.BlockSpec(
        (None, None, problem.keys, problem.D),
        lambda b, h, i, j, *scalars: (b, h, key_block(b, i, j, scalars), 0),
    )
    bias = pl.BlockSpec(
        (None, None, 1, problem.keys),
        lambda b, h, i, j, *scalars: (b, h, 0, key_block(b, i, j, scalars)),
    )
    specs = [query, key, key, bias]
    if problem.packed:
        specs.append(pl.BlockSpec((None, 1, problem.query), lambda b, h, i, j, *_: (b, 0, i)))
        specs.append(
            pl.BlockSpec(
                (None, 1, problem.keys),
                lambda b, h, i, j, *scalars: (b, 0, key_block(b, i, j, scalars)),
            )
        )
    return specs, query


def visible_keys(problem: Problem, start, first):
    """Returns (query block, key block, whether the query block sees any of its keys)."""
    i, j = pl.program_id(2), pl.program_id(3)
    visible = j * problem.keys < start + (i + 1) * problem.query
    if problem.packed:
        visible &= j >= first[pl.program_id(0), i]
    return i, j, visible


def same_segment(problem: Problem, query_segments, key_segments):
    """Returns for every score whether its query and its key share a segment."""
    column = jnp.concatenate([blocks.to_column(query_segments[...])] * problem.G, axis=0)
    return column == key_segments[...]


def query_operands(problem: Problem, inputs: Inputs) -> list[jax.Array]:
    """Returns the operands of `query_specs`, after the prefetched ones."""
    operands, first = [inputs.q, inputs.k, inputs.v, inputs.bias], None
    if problem.packed:
        own, others = inputs.query_segments, inputs.segments
        first = blocks.segment_bounds(problem, own, others)[0]
        operands += [own[:, None], others[:, None]]
    return [*blocks.prefetched(problem, inputs, first), *operands]


def unpack(problem: Problem, refs) -> tuple:
    """Returns a kernel's start, bounds, [q, k, v, bias], [segments of queries, of keys], rest."""
    count = problem.packed + problem.placed
    start, bounds = blocks.scalars_of(problem, refs[:count])
    inputs, refs = refs[count : count + 4], refs[count + 4 :]
    segments = refs[:2] if problem.packed else (None, None)
    return start, bounds, inputs, segments, refs[2 * problem.packed :]


def forward(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Computes the output [B, K, G, T, D] and log-sum-exp [B, K, blocks, 1, G * query]."""
    specs, query = query_specs(problem)
    count = problem.T // problem.query
    row = pl.BlockSpec((None, None, None, 1, problem.rows), lambda b, h, i, j, *_: (b, h, i, 0, 0))
    return blocks.build(
        problem,
        _kernel,
        (problem.B, problem.K, count, problem.S // problem.keys),
        specs,
        (query, row),
        (
            jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
            jax.ShapeDtypeStruct((problem.B, problem.K, count, 1, problem.rows), jnp.float32),
        ),
        [
            pltpu.VMEM((problem.rows, LANES), jnp.float32),
            pltpu.VMEM((problem.rows, LANES), jnp.float32),
            pltpu.VMEM((problem.rows, problem.D), jnp.float32),
        ],
        "retrofit_forward",
    )(*query_operands(problem, inputs))


def _kernel(problem: Problem, *refs):
    start, first, (q_ref, k_ref, v_ref, bias_ref), segments, rest = unpack(problem, refs)
    out_ref, lse_ref, maximum_ref, total_ref, accumulator_ref = rest
    i, j, visible = visible_keys(problem, start, first)

    @pl.when(j == 0)
    def _():
        maximum_ref[...] = jnp.full_like(maximum_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        accumulator_ref[...] = jnp.zeros_like(accumulator_ref)

    def body(*, bias, masked):
        q = q_ref[...].reshape(problem.rows, problem.D)
        scores = blocks.product(problem, q, k_ref[...], (1, 1))
        if masked:
            distance = blocks.distances(problem, i, j, start, transposed=False)
            scores += jnp.where(distance > problem.window, bias_ref[...], 0.0)
            scores = jnp.where(distance >= 0, scores, HIDDEN)
            if problem.packed:
                same = same_segment(problem, *segments)
                scores = jnp.where(same, scores, HIDDEN)
        elif bias:
            scores += bias_ref[...]
        scores *= problem.multiplier
        maximum = maximum_ref[:, :1]
        new_maximum = jnp.maximum(maximum, scores.max(axis=1, keepdims=True))
        shrink = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - new_maximum)
        total = total_ref[:, :1] * shrink + weights.sum(axis=1, keepdims=True)
        maximum_ref[...] = jnp.broadcast_to(new_maximum, maximum_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        values = blocks.product(problem, weights.astype(problem.dtype), v_ref[...], (1, 0))
        accumulator_ref[...] = accumulator_ref[...] * shrink + values

    blocks.by_zone(problem, i, j, visible, body, start)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        total = total_ref[:, :1]
        output = (accumulator_ref[...] / total).astype(problem.dtype)
        out_ref[...] = output.reshape(out_ref.shape)
        lse_ref[...] = blocks.to_row(maximum_ref[:, :1] + jnp.log(total) * LOG2E)
