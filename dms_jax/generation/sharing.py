"""Shared prompts: a prompt is read once, in one lane, and its sequence is copied to other lanes.

    lane 0   | prompt -> pages, lengths, policy state, hidden state of the last token
    lane 1   |    copies of the pages, the lengths and the state; its own first token
    lane 2   |    from the same hidden state, drawn with its own key

Nothing that a policy does to a prompt depends on the lane: its random draws are hashes of a seed,
the layer, the KV head and the position (`policies/draws.py`). So copies equal prompts that were
read one by one. Pages are copied as they are, because policies overwrite slots in place.

Copies are made block by block, a call of one program each, with pages of one device only: a
sequence is copied only to lanes whose pages are on the same devices. A loop of a traced length in
the program would hold the host up on a GPU until the last page is copied, and first tokens too.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

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

BLOCK_BYTES = 2**27  # of pages that are copied at a time, and held twice meanwhile


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
    longest = max(each.shape[1] for each in pairs)
    block = no_pages(runner).shape[-1]
    for start in range(0, max(longest, 1), block):
        pages = no_pages(runner)
        for shard, each in enumerate(pairs):
            some = each[:, start : start + block]
            pages[shard, :, : some.shape[1]] = some
        with use_mesh(runner.model.mesh):
            runner.cache = copy_lanes(runner.cache, pages, lanes, runner.lengths.shape[2])
    runner.lengths[:, targets] = runner.lengths[:, sources]
    runner.seen[targets] = runner.seen[sources]


def no_pages(runner: Runner) -> Int[np.ndarray, "shards 2 n"]:
    """Returns a block of `copy_lanes` in which nothing is copied."""
    block = min(max(1, BLOCK_BYTES // runner.page_bytes), runner.allocator.pages_per_shard)
    return np.full((runner.num_shards, 2, block), runner.allocator.no_page, np.int32)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def copy_lanes(
    cache: Cache,
    pages: Int[Array, "shards 2 n"],
    lanes: Int[Array, " B"],
    num_kv_heads: int,
) -> Cache:
    """Copies pages, and the state of `lanes[b]` to each lane b.

    Args:
      cache: the cache.
      pages: (source, target) pages of each shard; a target that is no page is not written.
      lanes: the lane that each lane copies, itself for most.
      num_kv_heads: KV heads of the model.
    """
    if not sharding.has_mesh():
        return _copy_shard(cache, pages, lanes)
    data, model = sharding.row_axes(len(lanes), num_kv_heads)
    if data is not None:  # lanes are numbered from 0 on every device
        lanes = lanes % (len(lanes) // sharding.axis_size(data))
    specs = cache_specs(cache, num_kv_heads)
    shards = sharding.cache_spec(("pages",), data, model)
    mapped = jax.shard_map(
        _copy_shard,
        in_specs=(specs, shards, PartitionSpec(data)),
        out_specs=specs,
        check_vma=False,
    )
    return mapped(cache, pages, lanes)


def _copy_shard(cache: Cache, pages: Int[Array, "1 2 n"], lanes: Int[Array, " b"]) -> Cache:
    source, target = pages[0]

    def copy(x):
        if not x.size:  # no value is on the device
            return x
        # Read before written: in one fusion, a GPU would copy the whole pool for one of them.
        moved = jax.lax.optimization_barrier(x.at[source].get(mode="clip"))
        return x.at[target].set(moved, mode="drop")

    def take(x):
        return x.at[:, lanes].get(mode="clip")

    return dataclasses.replace(
        cache,
        pool=jax.tree.map(copy, cache.pool),
        page_state=jax.tree.map(copy, cache.page_state),
        lengths=take(cache.lengths),
        seen=take(cache.seen[None])[0],
        row_state=jax.tree.map(take, cache.row_state),
    )


def first_tokens(
    runner: Runner,
    source_of: Mapping[int, int],
    tokens: Int[np.ndarray | jax.Array, " B"],
    seeds: UInt32[np.ndarray, "B 2"],
    rule: Filter,
) -> tuple[Array, Array | None, Array]:
    """Draws the token after a prompt for some lanes; see `programs.first_tokens`.

    Args:
      runner: the runner that ran the prompts.
      source_of: lane -> the lane that read its prompt, itself or another one.
      tokens: the newest token of every lane; it stays that of the other lanes.
      seeds: see `programs.request_keys`.
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
            seeds,
            runner.seen[sources].astype(np.int32),
            rule,
            fresh,
            runner.everywhere(tokens),
        )
