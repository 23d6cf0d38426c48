"""Runs sequences through the paged cache in ragged chunks, for comparison with an oracle.

They run through a whole model, or only through the attention of its layers (`attend_cached`).

The pool (and a policy's state per page) is initialized with NaN, the pages of a row are scattered
over it, and a row has only as many pages as it declares to need: reading an unwritten slot, or
writing beyond these pages, changes the outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache import Cache
from dms_jax.config import LayerKind, ModelConfig
from dms_jax.model.cached_attention import attend_cached, in_one_pass, in_use, plan_steps
from dms_jax.model.caching import init_cache
from dms_jax.model.cutting import LayerCache, cut_layers
from dms_jax.model.layer_loop import Role, Stretch, scan_layers
from dms_jax.model.transformer import Transformer
from dms_jax.model.unpadded import Unpadded
from dms_jax.policies import Policy
from dms_jax.policies.values import Chunk, Decisions, PolicyState, Static, Tokens
from tests.oracles.transformer import LayerInput


@dataclasses.dataclass
class Part:
    """One call: counts[b] tokens of each sequence, padded to `width`.

    `ends_prompt[b]` marks sequences whose prompt they complete; None if there are none. With
    `places`, everything but attention runs over that many packed tokens. Tokens attend in one pass
    if nothing is evicted before them (`whole`), or if the policy says so.
    """

    counts: np.ndarray
    width: int
    prompt: bool
    ends_prompt: np.ndarray | None = None
    places: int | None = None
    whole: bool = False


@struct.dataclass
class Chunked:
    """The results of a chunk, with its padding.

    `live` and `reads` are totals over all rows of a sequence, after each token.
    """

    outputs: Float[Array, "B T *shape"]
    cache: Cache
    live: Int[Array, "B T"]
    reads: Int[Array, "B T"]


@dataclasses.dataclass
class Outcome:
    """The results for the tokens of each sequence without padding, in order.

    `outputs[b]` is [T_b, ...]; `live[b]` and `reads[b]` are [T_b], totals over all rows.
    """

    outputs: list[np.ndarray]
    live: list[np.ndarray]
    reads: list[np.ndarray]


# (part, tokens done, which prompts end, cache, in one pass) -> the results
Run = Callable[[Part, np.ndarray, np.ndarray, Cache, bool], Chunked]


@dataclasses.dataclass
class Rows:
    """The rows of a cache, copied to the host."""

    k_pages: np.ndarray
    page_table: np.ndarray
    lengths: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, cache: Cache) -> "Rows":
        k_pages = np.asarray(cache.k_pages)
        if cache.pool.k_scales is not None:
            k_pages = k_pages.astype(float) * np.asarray(cache.pool.k_scales)[..., None]
        rest = (np.asarray(x) for x in (cache.page_table, cache.lengths, cache.seen))
        return cls(k_pages, *rest)

    def keys(self, layer: int, sequence: int, head: int) -> np.ndarray:
        """Returns the keys in the slots of a row, [length, D]."""
        page_size = self.k_pages.shape[1]
        slots = np.arange(self.lengths[layer, sequence, head])
        pages = self.page_table[layer, sequence, head][slots // page_size]
        return self.k_pages[pages, slots % page_size]


@functools.partial(jax.jit, static_argnames=("one_pass", "places"))
def run_model(
    policy: Policy,
    model: Transformer,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    ends_prompt: Bool[Array, " B"],
    cache: Cache,
    *,
    one_pass: bool,
    places: int | None,
) -> Chunked:
    """Runs a chunk through a whole model; the outputs are logits."""
    line = None if places is None else Unpadded.of(counts, tokens.shape[1], places)
    passed = model.cached(
        tokens, counts, cache, policy, one_pass=one_pass, ends_prompt=ends_prompt, line=line
    )
    logits = model.unembed(passed.hidden)
    logits = logits if line is None else line.pad(logits)
    return Chunked(logits, passed.cache, passed.live, passed.reads)


@functools.partial(jax.jit, static_argnames=("one_pass", "static"))
def run_layers(
    policy: Policy,
    tokens: Tokens,
    counts: Int[Array, " B"],
    ends_prompt: Bool[Array, " B"],
    cache: Cache,
    *,
    one_pass: bool,
    static: Static,
) -> Chunked:
    """Runs a chunk through the attention of every layer and nothing else.

    Layers get their tokens [L, B, T, ...]; the outputs are attention's, by token.
    """
    num_layers, width = tokens.q.shape[0], tokens.q.shape[2]
    positions = cache.seen[:, None] + jnp.arange(width, dtype=cache.seen.dtype)
    tokens = dataclasses.replace(
        tokens, positions=jnp.broadcast_to(positions, (num_layers, *positions.shape))
    )
    angles = positions[..., None] * jnp.asarray(static.frequencies)
    first = jax.tree.map(lambda x: x[0], tokens)
    shared = Chunk(
        tokens=dataclasses.replace(first, adapter_logits=None, late_logits=None),
        decisions=Decisions(),
        rotation=(jnp.cos(angles), jnp.sin(angles)),
        count=counts,
        page_table=cache.page_table[0],
        lengths=cache.lengths[0],
        max_lengths=cache.max_lengths,
        ends_prompt=ends_prompt,
        static=static,
    )

    def body(carry, layer, index, role, rows):
        pool, page_state = carry
        page_table, lengths, row_state, plan = rows
        attended = attend_cached(
            role.policy,
            LayerCache(pool, PolicyState(rows=row_state, pages=page_state)),
            layer,
            dataclasses.replace(shared, page_table=page_table, lengths=lengths, plan=plan),
            one_pass=one_pass,
        )
        state = attended.cache.state
        own = in_use(attended.lengths, counts)
        totals = [own if each is None else each for each in (attended.live, attended.reads)]
        return (attended.cache.pool, state.pages), (
            (attended.lengths, state.rows, *totals),
            attended.out,
        )

    one_step = width == 1 and not one_pass
    plan = plan_steps(cache, counts) if one_step else None
    rows = (cache.page_table, cache.lengths, cache.row_state, plan)
    each = [
        Stretch(group.start, (Role(group, LayerKind(None, None)),), group.end - group.start)
        for group in policy.groups(num_layers)
    ]
    (pool, page_state), ((lengths, row_state, live, reads), out) = scan_layers(
        body, (cache.pool, cache.page_state), tokens, each, rows
    )
    live, reads = live.sum(0), reads.sum(0)
    if one_step:
        state = PolicyState(rows=row_state, pages=page_state)
        pool, state, lengths, read_again = cut_layers(
            policy,
            pool,
            state,
            shared,
            cache.page_table,
            lengths,
            centers=None,
            dtype=out.dtype,
        )
        page_state, reads = state.pages, reads + read_again[:, None]
    cache = dataclasses.replace(
        cache,
        pool=pool,
        lengths=lengths,
        seen=cache.seen + counts,
        row_state=row_state,
        page_state=page_state,
    )
    return Chunked(jnp.moveaxis(out, 0, 2), cache, live, reads)


def poisoned_cache(
    config: ModelConfig,
    policy: Policy,
    slots: np.ndarray,
    *,
    page_size: int,
    table_width: int,
    max_lengths=None,
    kv_dtype: str | None = None,
    seed: int = 0,
) -> Cache:
    """Returns an empty float64 cache whose rows own scattered pages for `slots` [L, B, K] slots."""
    rows = slots.shape
    num_pages = int(np.prod(rows)) * table_width
    cache = init_cache(
        config,
        policy,
        num_sequences=rows[1],
        num_pages=num_pages,
        page_size=page_size,
        table_width=table_width,
        dtype=jnp.float64,
        kv_dtype=kv_dtype,
    )
    table = np.random.default_rng(seed).permutation(num_pages).reshape(*rows, table_width)
    owned = np.arange(table_width) < -(-slots // page_size)[..., None]
    longest = np.zeros(rows[1]) if max_lengths is None else max_lengths
    return dataclasses.replace(
        cache,
        max_lengths=jnp.asarray(longest, jnp.int32),
        page_table=jnp.asarray(np.where(owned, table, num_pages), jnp.int32),
        pool=jax.tree.map(_poison, cache.pool),
        page_state=jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache.page_state),
    )


def _poison(pages: jax.Array) -> jax.Array:
    """Fills pages with NaN; packed integers have no NaN, but their scales do."""
    return jnp.full_like(pages, jnp.nan if jnp.issubdtype(pages.dtype, jnp.floating) else 255)


def ragged_parts(
    seed: int,
    lengths,
    prompts,
    *,
    width: int,
    answers_width: int = 1,
    places: int | None = None,
    whole=(),
) -> Iterator[Part]:
    """Returns prompts in chunks of uneven counts (sometimes 0), then answers likewise.

    Chunks of a prompt hold up to `width` tokens, and are padded to it. With `places`, chunks of all
    sequences together hold at most that many tokens. The first `whole[b]` tokens of each prompt
    have separate chunks, which attend in one pass.
    """
    random = np.random.default_rng(seed)
    done = np.zeros(len(lengths), int)
    stages = [(prompts, width, True, False), (lengths, answers_width, False, False)]
    if len(whole):
        stages.insert(0, (np.minimum(whole, prompts), width, True, True))
    for end, most, prompt, first in stages:
        end = np.asarray(end)
        while (done < end).any():
            counts = np.minimum(random.integers(0, most + 1, size=len(end)), end - done)
            if places is not None:
                counts = np.diff(np.minimum(np.cumsum(counts), places), prepend=0)
            if counts.any():
                ends = (counts > 0) & (done + counts == prompts) if prompt else None
                yield Part(counts.astype(np.int32), most, prompt, ends, places, first)
                done += counts


def drive(policy: Policy, lengths, cache: Cache, parts, run: Run, after=None) -> Outcome:
    """Runs the parts; `after(done, rows)` is called with the cache after `done[b]` tokens."""
    done = np.zeros(len(lengths), int)
    gathered: list[list[tuple]] = [[] for _ in lengths]
    for part in parts:
        ends = np.zeros(len(lengths), bool) if part.ends_prompt is None else part.ends_prompt
        one_pass = part.whole or in_one_pass(policy, part.width, prompt=part.prompt)
        chunked = run(part, done, ends, cache, one_pass)
        cache = chunked.cache
        results = [np.asarray(x) for x in (chunked.outputs, chunked.live, chunked.reads)]
        for row, count in enumerate(part.counts):
            gathered[row].append(tuple(x[row, :count] for x in results))
            assert not any(x[row, count:].any() for x in results[1:])
        done += part.counts
        if after is not None:
            after(done, Rows.of(cache))
    joined = [[np.concatenate(field) for field in zip(*row, strict=True)] for row in gathered]
    return Outcome(*map(list, zip(*joined, strict=True)))


def with_padding(sequences: list[np.ndarray], part: Part, done, random) -> np.ndarray:
    """Returns the part's tokens of [T, ...] each; padding can be any token."""
    start = random.integers(0, [len(one) for one in sequences], size=(part.width, len(sequences)))
    chunk = np.stack([one[at] for one, at in zip(sequences, start.T, strict=True)])
    for row, count in enumerate(part.counts):
        chunk[row, :count] = sequences[row][done[row] : done[row] + count]
    return chunk


def of_model(policy: Policy, model: Transformer, tokens: list[np.ndarray]) -> Run:
    """Returns a function that runs parts through a model."""
    random = np.random.default_rng(1)

    def run(part: Part, done, ends, cache: Cache, one_pass: bool) -> Chunked:
        chunk = with_padding(tokens, part, done, random)
        options = dict(one_pass=one_pass, places=part.places)
        return run_model(policy, model, chunk, part.counts, ends, cache, **options)

    return run


def of_layers(policy: Policy, sequences: list[list[LayerInput]], static: Static) -> Run:
    """Returns a function that runs parts only through the attention of each sequence's layers."""
    random = np.random.default_rng(1)
    adapter = policy.retrofit.adapter

    def run(part: Part, done, ends, cache: Cache, one_pass: bool) -> Chunked:
        def of(name: str) -> np.ndarray:
            each = [
                [getattr(layer, name) for layer in layers]
                for layers in zip(*sequences, strict=True)
            ]
            return np.stack([with_padding(one, part, done, random) for one in each])

        q, k, v = map(of, ("q", "k", "v"))
        own = np.moveaxis(of("own"), 2, 3) if adapter else None
        late = np.moveaxis(of("late"), 2, 3) if adapter and adapter.late else None
        places = np.zeros(q.shape[:3], np.int32)
        tokens = Tokens(q, k, v, places, np.arange(len(q), dtype=np.int32), own, late)
        options = dict(one_pass=one_pass, static=static)
        return run_layers(policy, tokens, part.counts, ends, cache, **options)

    return run
