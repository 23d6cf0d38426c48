"""The attention weight that slots receive, on NVIDIA Hopper GPUs: two passes over the scores.

    lse_i = log2 of sum over seen slots j of exp2(c q_i k_j)       c = scale log2(e)
    sums_j = sum over queries i that see j, and heads of the group, of exp2(c q_i k_j - lse_i) / G

In the first pass a program owns 128 queries of one head and streams the keys, like attention; in
the second it owns 128 keys of one KV head and streams the queries of every head of the group with
their log-sum-exp, so sums stay in registers, deterministic and without atomics. Scores of the
second pass are transposed, k q^T: its rows are keys.

A query sees a key if the key's `since` is at most the query's position, so a tile loads one number
per row and one per column. `plan` lists the tiles to visit, and which of them need no comparison.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.padding import pad_axis
from pallas_kernels.received.reference import NEVER
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_tiles import COMPUTE, ROWS, TILE, Problem, Ring, find_ring
from pallas_kernels.training.inputs import HIDDEN, LOG2E, LOWEST

HEAD_DIMS = (64, 96, 128, 256)
# The log-sum-exp of a padded query, with which all its weights are zero.
NOTHING = 1e30


def why_not(q, k, positions, since, *, scale: float) -> str | None:
    """Returns why this kernel cannot serve the call, or None if it can."""
    del positions, since
    if target_gpu().capability[0] != 9:
        return f"needs Hopper's wgmma, and the GPU is a {target_gpu().kind}"
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        # wgmma would round float32 to TF32.
        return f"serves bfloat16 operands alone, got {q.dtype} and {k.dtype}"
    if q.shape[3] not in HEAD_DIMS:
        return f"the head dim must be one of {HEAD_DIMS}, got {q.shape[3]}"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def scratch_of(problem: Problem, ring: Ring, streamed: int = 3) -> dict[str, Any]:
    """Returns a program's shared-memory arrays by name; `streamed` arrays make up a tile."""
    stages, block = ring.stages, ring.block
    return {
        "own_tiles": tiles.tile_memory((COMPUTE, ROWS, problem.D), problem.dtype),
        "own_places": plgpu.SMEM((COMPUTE, ROWS), jnp.int32),
        "tiles": tiles.tile_memory((stages, block, problem.D), problem.dtype),
        "places": plgpu.SMEM((stages, block), jnp.int32),
        "lse": plgpu.SMEM((stages, block), jnp.float32),
        "results": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        "own_ready": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=2),
        "ready": plgpu.Barrier(num_barriers=stages, num_arrivals=streamed),
        "consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=COMPUTE),
    }


def ring_of(problem: Problem) -> Ring:
    """Returns the ring that streams tiles."""
    return find_ring("received_attention", "both", problem, Ring(TILE, 4), scratch_of)


def plan(positions: jax.Array, since: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Plans the visits of both passes, over tiles of TILE queries and of TILE keys.

    A tile of queries visits the tiles of keys before `end`; before `whole_end` all its queries see
    all of the keys. A tile of keys is visited by the tiles of queries from `first` to `end`; from
    `whole_first` on all their queries see all of its keys. Padded queries do not count: see
    NOTHING.

    Args:
      positions: position of each query [B, T], -1 for padding.
      since: first position that sees each key [B, K, S].

    Returns:
      (whole_end, end) of each tile of queries [B, K, T / TILE, 2], and (first, whole_first, end)
      of each tile of keys [B, K, S / TILE, 3].
    """
    queries = positions.reshape(positions.shape[0], 1, -1, 1, TILE)
    keys = since.reshape(*since.shape[:2], 1, -1, TILE)
    seen = keys.min(-1) <= queries.max(-1)  # [B, K, query tiles, key tiles]
    whole = seen & (keys.max(-1) <= jnp.where(queries >= 0, queries, NEVER).min(-1))
    query_tile, key_tile = (lax.broadcasted_iota(jnp.int32, seen.shape, axis) for axis in (2, 3))
    end = jnp.where(seen, key_tile + 1, 0).max(3)
    whole_end = jnp.where(whole, NEVER, key_tile).min(3)
    over_keys = jnp.stack([jnp.minimum(whole_end, end), end], axis=-1)
    end = jnp.where(seen, query_tile + 1, 0).max(2)
    first = jnp.minimum(jnp.where(seen, query_tile, NEVER).min(2), end)
    partial = ~whole & (query_tile < end[:, :, None])
    whole_first = jnp.maximum(jnp.where(partial, query_tile + 1, 0).max(2), first)
    return over_keys, jnp.stack([first, whole_first, end], axis=-1)


def received_attention_mosaic(
    q,
    k,
    positions,
    since,
    *,
    scale: float,
    interpret: bool = False,
    ring: Ring | None = None,
) -> jax.Array:
    """Computes `received_attention` on Hopper GPUs.

    Args:
      q: see `received_attention`.
      k: see `received_attention`.
      positions: see `received_attention`.
      since: see `received_attention`.
      scale: see `received_attention`.
      interpret: run in the interpreter, for tests.
      ring: the ring that streams tiles; None for `ring_of`.
    """
    num_slots = k.shape[2]
    # Padding may be anything, and 0 * NaN is NaN.
    q = pad_axis(jnp.where((positions >= 0)[..., None, None], q, 0), 1, TILE)
    k = pad_axis(k, 2, TILE)
    positions = pad_axis(positions, 1, TILE, constant_values=-1)
    since = pad_axis(since, 2, TILE, constant_values=NEVER)
    over_keys, over_queries = plan(positions, since)
    batch, length, heads, dim = q.shape
    problem = Problem(
        B=batch,
        T=length,
        S=k.shape[2],
        H=heads,
        K=k.shape[1],
        D=dim,
        window=0,
        scale=scale,
        dtype=jnp.dtype(q.dtype),
        packed=False,
        placed=False,
        interpret=interpret,
    )
    ring = ring or ring_of(problem)
    lse = tiles.run(
        problem,
        _log_sum_exp,
        [q, positions, k, since, over_keys],
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        scratch_of(problem, ring, streamed=2),
        {"heads": heads, "queries": length // TILE},
        "received_lse",
    )
    sums = tiles.run(
        problem,
        _sums,
        [k, since, q, positions, lse, over_queries],
        jax.ShapeDtypeStruct(since.shape, jnp.float32),
        scratch_of(problem, ring),
        # The first keys have the most queries, so those of all heads start first.
        {"keys": problem.S // TILE, "heads": problem.K},
        "received_sums",
    )
    return sums[:, :, :num_slots]


def _log_sum_exp(problem: Problem, inputs, outputs, memory):
    """The first pass: rows are queries, columns are keys."""
    q_ref, positions_ref, k_ref, since_ref, ends_ref = inputs
    (lse_ref,) = outputs
    batch, head, program = (lax.axis_index(name) for name in ("batch", "heads", "queries"))
    kv_head = lax.div(head, jnp.int32(problem.H // problem.K))
    ends = ends_ref.at[batch, kv_head, program]
    whole_end, end = ends[0], ends[1]

    def own(start):
        queries = pl.ds(program * TILE + start, ROWS)
        return q_ref.at[batch, queries, head], positions_ref.at[batch, queries]

    def streamed(step):
        keys = pl.ds(step * memory.tiles.shape[1], memory.tiles.shape[1])
        return k_ref.at[batch, kv_head, keys], since_ref.at[batch, kv_head, keys]

    def compute(positions, product):
        def body(step, carry, masked):
            maximum, total = carry
            scores, since, _ = product(step, places=masked)
            if masked:
                seen = tiles.rows_of(positions, scores.shape) >= since
                scores = jnp.where(seen, scores, HIDDEN)
            multiplier = problem.scale * LOG2E
            new_maximum = jnp.maximum(maximum, scores.max(axis=1) * multiplier)
            weights = scores * multiplier - tiles.rows_of(new_maximum, scores.shape)
            total = total * jnp.exp2(maximum - new_maximum) + jnp.exp2(weights).sum(axis=1)
            return new_maximum, total

        carry = tiles.row_vector(LOWEST), tiles.row_vector(0.0)
        carry = lax.fori_loop(0, whole_end, lambda i, c: body(i, c, False), carry)
        maximum, total = lax.fori_loop(whole_end, end, lambda i, c: body(i, c, True), carry)
        return jnp.where(positions >= 0, maximum + jnp.log(total) * LOG2E, NOTHING)

    def target(start):
        return lse_ref.at[batch, head, pl.ds(program * TILE + start, ROWS)]

    _stream(problem, memory, own, streamed, end, compute, target)


def _sums(problem: Problem, inputs, outputs, memory):
    """The second pass: rows are keys, columns are the queries of one head after the other."""
    k_ref, since_ref, q_ref, positions_ref, lse_ref, ends_ref = inputs
    (sums_ref,) = outputs
    batch, kv_head, program = (lax.axis_index(name) for name in ("batch", "heads", "keys"))
    group = problem.H // problem.K
    ends = ends_ref.at[batch, kv_head, program]
    first, whole_first, end = ends[0], ends[1], ends[2]
    visits = end - first

    def own(start):
        keys = pl.ds(program * TILE + start, ROWS)
        return k_ref.at[batch, kv_head, keys], since_ref.at[batch, kv_head, keys]

    def streamed(step):
        head = kv_head * group + lax.div(step, visits)
        block = memory.tiles.shape[1]
        queries = pl.ds((first + lax.rem(step, visits)) * block, block)
        return (
            q_ref.at[batch, queries, head],
            positions_ref.at[batch, queries],
            lse_ref.at[batch, head, queries],
        )

    def compute(since, product):
        def body(step, sums, masked):
            scores, positions, lse = product(step, places=masked, lse=True)
            weights = jnp.exp2(scores * (problem.scale * LOG2E) - lse)
            if masked:
                seen = tiles.rows_of(since, scores.shape) <= positions
                weights = jnp.where(seen, weights, 0.0)
            return sums + weights.sum(axis=1)

        def add_head(index, sums):
            start = index * visits
            whole, stop = start + (whole_first - first), start + visits
            sums = lax.fori_loop(start, whole, lambda i, x: body(i, x, True), sums)
            return lax.fori_loop(whole, stop, lambda i, x: body(i, x, False), sums)

        return lax.fori_loop(0, group, add_head, tiles.row_vector(0.0)) * (1 / group)

    def target(start):
        return sums_ref.at[batch, kv_head, pl.ds(program * TILE + start, ROWS)]

    _stream(problem, memory, own, streamed, group * visits, compute, target)


def _stream(
    problem: Problem,
    memory,
    own: Callable[..., tuple],
    streamed: Callable[..., tuple],
    steps,
    compute: Callable[..., Any],
    target: Callable[..., Any],
) -> None:
    """Streams tiles past the rows of the computing warpgroups, which store one number per row.

    Args:
      problem: the static parameters.
      memory: see `scratch_of`.
      own: returns the tile and the places of the rows from this one of the program on.
      streamed: returns the tile, the places and the log-sum-exp, if any, of the columns of a step.
      steps: number of steps.
      compute: returns the numbers, given the places of the rows and `product(step, places=, lse=)`.
        It must call `product` for every step in order; that returns the scores of the step and, if
        requested, the places and the log-sum-exp of their columns.
      target: returns the reference that stores the numbers of the rows from this one on.
    """
    warpgroup = lax.axis_index("warpgroup")
    stages, block = memory.places.shape
    shape = (ROWS, block)
    targets = memory.tiles, memory.places, memory.lse

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def copy():
        def load(step, carry):
            slot = slot_of(step)
            plgpu.barrier_wait(memory.consumed.at[slot])
            for source, into in zip(streamed(step), targets, strict=False):
                plgpu.copy_gmem_to_smem(source, into.at[slot], memory.ready.at[slot])
            return carry

        lax.fori_loop(0, steps, load, jnp.int32(0))
        for slot in range(stages):
            plgpu.barrier_wait(memory.consumed.at[slot])

    def multiply():
        own_tile, own_places = memory.own_tiles.at[warpgroup], memory.own_places.at[warpgroup]
        start, ready = warpgroup * ROWS, memory.own_ready.at[warpgroup]
        for source, into in zip(own(start), (own_tile, own_places), strict=True):
            plgpu.copy_gmem_to_smem(source, into, ready)
        for slot in range(stages):
            plgpu.barrier_arrive(memory.consumed.at[slot])
        plgpu.barrier_wait(ready)

        def product(step, *, places: bool, lse: bool = False):
            slot = slot_of(step)
            plgpu.barrier_wait(memory.ready.at[slot])

            def scores_of(scores):
                plgpu.wgmma(scores, own_tile, memory.tiles.at[slot].transpose((1, 0)))
                return scores[...]

            scores = pl.run_scoped(scores_of, plgpu.ACC(shape, jnp.float32))
            columns = [
                tiles.columns_of(tiles.load_columns(ref.at[slot]), shape) if asked else None
                for ref, asked in ((memory.places, places), (memory.lse, lse))
            ]
            tiles.release(memory.consumed.at[slot], interpret=problem.interpret)
            return scores, *columns

        result = memory.results.at[warpgroup]
        result[...] = compute(tiles.load_rows(own_places), product)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, target(start))
        plgpu.wait_smem_to_gmem(0)

    tiles.roles(warpgroup, multiply, copy)
