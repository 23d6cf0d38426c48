"""Shared prompts: a prompt is read once, in one lane, and its sequence is copied to other lanes.

    lane 0   | prompt -> pages, lengths, policy state, hidden state of the last token
    lane 1   |    copies of the pages, the lengths and the state; its own first token
    lane 2   |    from the same hidden state, drawn with its own key

Nothing that a policy does to a prompt depends on the lane: its random draws are hashes of a seed,
the layer, the KV head and the position (`policies/draws.py`). So copies equal prompts that were
read one by one. Pages are copied as they are, because policies overwrite slots in place.

Copies are made block by block inside one program, with pages of one device only: a sequence is
copied only to lanes whose pages are on the same devices.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, UInt32

from dms_jax import sharding
from dms_jax.cache import Cache
from dms_jax.generation import programs
from dms_jax.generation.requests import Request
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Filter
from dms_jax.model.caching import cache_specs
from dms_jax.model.language_model import use_mesh

# Bytes of pages that are copied at a time, and held twice meanwhile. The copies are a loop of a
# traced length, whose every turn costs a GPU tens of microseconds: so blocks are large.
BLOCK_BYTES = 2**27
BLOCKS = 8  # the most blocks of one program, whose shape does not depend on how many it copies


def prompt_of(runner: Runner, request: Request, lane: int) -> Hashable | None:
    """Returns what requests in lanes share that read one prompt; None if a request shares nothing.

    A preempted request that recomputes its answer with its prompt shares nothing.
    """
    if len(request.generated) > 1:
        return None
    tokens = (*request.before, *request.prompt)
    return request.base, reading(runner, lane, tokens, request.max_length)


def reading(runner: Runner, lane: int, tokens: Sequence[int], max_length: int) -> Hashable:
    """Returns what makes the reading of a prompt in a lane the same as in another lane.

    A policy whose budget is a share of the longest length reads alike what may become as long.
    """
    limited = runner.policy.for_length(1) is not runner.policy
    return runner.allocator.shard_of(lane), max_length if limited else None, tuple(tokens)


def fork(runner: Runner, source_of: Mapping[int, int]) -> None:
    """Copies sequences to empty lanes, with the policy's state.

    Args:
      runner: the runner that holds them.
      source_of: lane -> the lane whose sequence it copies, on the same devices.

    Raises:
      CapacityError: the pages are not free; then nothing is copied.
    """
    targets, sources = list(source_of), list(source_of.values())
    extra = np.zeros_like(runner.lengths)
    extra[:, targets] = runner.lengths[:, sources]
    runner.reserve(extra, prompt=True)
    pairs = runner.allocator.copies(source_of)
    if runner.host is not None:  # then there is one shard
        runner.host.copy(pairs[0])
    lanes = np.arange(len(runner.seen), dtype=np.int32)
    lanes[targets] = sources
    block = min(max(1, BLOCK_BYTES // runner.page_bytes), runner.allocator.pages_per_shard)
    size = block * min(BLOCKS, -(-runner.allocator.pages_per_shard // block))
    longest = max(each.shape[1] for each in pairs)
    for start in range(0, max(longest, 1), size):
        pages = np.full((len(pairs), 2, size), runner.allocator.no_page, np.int32)
        for shard, each in enumerate(pairs):
            some = each[:, start : start + size]
            pages[shard, :, : some.shape[1]] = some
        blocks = -(-min(longest - start, size) // block)
        with use_mesh(runner.model.mesh):
            runner.cache = copy_lanes(
                runner.cache, pages, np.int32(blocks), lanes, block, runner.lengths.shape[2]
            )
    runner.lengths[:, targets] = runner.lengths[:, sources]
    runner.seen[targets] = runner.seen[sources]


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(4, 5))
def copy_lanes(
    cache: Cache,
    pages: Int[Array, "shards 2 n"],
    blocks: Int[Array, ""],
    lanes: Int[Array, " B"],
    block: int,
    num_kv_heads: int,
) -> Cache:
    """Copies pages, and the state of `lanes[b]` to each lane b.

    Args:
      cache: the cache.
      pages: (source, target) pages of each shard; a target that is no page is not written.
      blocks: number of blocks of pages to copy.
      lanes: the lane that each lane copies, itself for most.
      block: pages per block.
      num_kv_heads: KV heads of the model.
    """
    copy = functools.partial(_copy_shard, block=block)
    if not sharding.has_mesh():
        return copy(cache, pages, blocks, lanes)
    data, model = sharding.row_axes(len(lanes), num_kv_heads)
    if data is not None:  # lanes are numbered from 0 on every device
        lanes = lanes % (len(lanes) // sharding.axis_size(data))
    specs = cache_specs(cache, num_kv_heads)
    shards = sharding.cache_spec(("pages",), data, model)
    mapped = jax.shard_map(
        copy,
        in_specs=(specs, shards, PartitionSpec(), PartitionSpec(data)),
        out_specs=specs,
        check_vma=False,
    )
    return mapped(cache, pages, blocks, lanes)


def _copy_shard(
    cache: Cache,
    pages: Int[Array, "1 2 n"],
    blocks: Int[Array, ""],
    lanes: Int[Array, " b"],
    *,
    block: int,
) -> Cache:
    def copy_block(index: Int[Array, ""], paged: Any) -> Any:
        source, target = jax.lax.dynamic_slice_in_dim(pages[0], index * block, block, axis=1)

        def copy(x):
            if not x.size:  # no value is on the device
                return x
            # Read before written: in one fusion, a GPU would copy the whole pool for one of them.
            moved = jax.lax.optimization_barrier(x.at[source].get(mode="clip"))
            return x.at[target].set(moved, mode="drop")

        return jax.tree.map(copy, paged)

    def take(x):
        return x.at[:, lanes].get(mode="clip")

    pool, page_state = jax.lax.fori_loop(0, blocks, copy_block, (cache.pool, cache.page_state))
    return dataclasses.replace(
        cache,
        pool=pool,
        page_state=page_state,
        lengths=take(cache.lengths),
        seen=take(cache.seen[None])[0],
        row_state=jax.tree.map(take, cache.row_state),
    )


def first_tokens(
    runner: Runner,
    source_of: Mapping[int, int],
    tokens: Int[np.ndarray, " B"],
    keys: UInt32[np.ndarray, "B n"],
    rule: Filter,
) -> tuple[Array, Array | None, Array]:
    """Draws the token after a prompt for some lanes; see `programs.first_tokens`.

    Args:
      runner: the runner that ran the prompts.
      source_of: lane -> the lane that read its prompt, itself or another one.
      tokens: the newest token of every lane; it stays that of the other lanes.
      keys: random key data of every lane.
      rule: sampling settings.
    """
    lanes, sources = list(source_of), np.arange(len(tokens), dtype=np.int32)
    sources[lanes] = list(source_of.values())
    fresh = np.zeros(len(tokens), bool)
    fresh[lanes] = True
    with use_mesh(runner.model.mesh):
        return programs.first_tokens(
            runner.model.transformer,
            runner.hidden,
            sources,
            keys.copy(),  # changed while the program may still run
            runner.seen[sources].astype(np.int32),
            rule,
            fresh,
            tokens,
        )
