"""Runs of sequences through the paged cache in ragged chunks, for comparison with an oracle.

The pool (and a policy's state per page) is initialized with NaN, the pages of a row are scattered
over it, and a row has no more of them than its declared need: reading an unwritten slot, or writing
beyond the need, shows in the outputs.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.cache import Cache
from dms_jax.cache.int4 import Int4
from dms_jax.model.cached_attention import in_one_pass
from dms_jax.model.caching import init_cache
from dms_jax.model.transformer import Transformer
from dms_jax.model.unpadded import Unpadded
from dms_jax.policies import Policy
from tests.oracles import int4


@dataclasses.dataclass
class Part:
    """One call: counts[b] tokens of each sequence, padded to `width`.

    `ends_prompt[b]` marks sequences whose prompt they complete; None if there are none. With
    `places` all but attention is computed for so many tokens in line. They attend in one pass if
    nothing is evicted before them (`whole`), or if the policy says so.
    """

    counts: np.ndarray
    width: int
    prompt: bool
    ends_prompt: np.ndarray | None = None
    places: int | None = None
    whole: bool = False


@dataclasses.dataclass
class Outcome:
    """The results for the tokens of each sequence without padding, in order.

    `logits[b]` is [T_b, V]; `live[b]` and `reads[b]` are [T_b], totals over all rows.
    """

    logits: list[np.ndarray]
    live: list[np.ndarray]
    reads: list[np.ndarray]


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
        if isinstance(cache.pool.format, Int4):
            k_pages = int4.read(int4.unpack(k_pages), np.asarray(cache.pool.k_scales))
        elif cache.pool.k_scales is not None:
            k_pages = k_pages.astype(float) * np.asarray(cache.pool.k_scales)[..., None]
        rest = (np.asarray(x) for x in (cache.page_table, cache.lengths, cache.seen))
        return cls(k_pages, *rest)

    def keys(self, layer: int, sequence: int, head: int) -> np.ndarray:
        """Returns the keys in the slots of a row, [length, D]."""
        page_size = self.k_pages.shape[1]
        slots = np.arange(self.lengths[layer, sequence, head])
        pages = self.page_table[layer, sequence, head][slots // page_size]
        return self.k_pages[pages, slots % page_size]


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def forward(
    model: Transformer,
    tokens,
    counts,
    ends_prompt,
    cache: Cache,
    policy: Policy,
    one_pass: bool,
    places: int | None,
) -> tuple[jax.Array, Cache, jax.Array, jax.Array]:
    line = None if places is None else Unpadded.of(counts, tokens.shape[1], places)
    passed = model.cached(
        tokens, counts, cache, policy, one_pass=one_pass, ends_prompt=ends_prompt, line=line
    )
    logits = model.unembed(passed.hidden)
    logits = logits if line is None else line.pad(logits)
    return logits, passed.cache, passed.live, passed.reads


def poisoned_cache(
    model: Transformer,
    policy: Policy,
    slots: np.ndarray,
    *,
    page_size: int,
    table_width: int,
    kv_dtype: str | None = None,
    seed: int = 0,
) -> Cache:
    """Returns an empty cache whose rows own scattered pages for `slots` [L, B, K] slots."""
    rows = slots.shape
    num_pages = int(np.prod(rows)) * table_width
    cache = init_cache(
        model.config,
        policy,
        num_sequences=rows[1],
        num_pages=num_pages,
        page_size=page_size,
        table_width=table_width,
        dtype=model.embedding[...].dtype,
        kv_dtype=kv_dtype,
    )
    table = np.random.default_rng(seed).permutation(num_pages).reshape(*rows, table_width)
    owned = np.arange(table_width) < -(-slots // page_size)[..., None]
    return dataclasses.replace(
        cache,
        page_table=jnp.asarray(np.where(owned, table, num_pages), jnp.int32),
        pool=jax.tree.map(_poison, cache.pool),
        page_state=jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache.page_state),
    )


def _poison(pages: jax.Array) -> jax.Array:
    """Pages of NaN; packed integers cannot say it, but their scales are NaN."""
    return jnp.full_like(pages, jnp.nan if jnp.issubdtype(pages.dtype, jnp.floating) else 255)


def ragged_parts(
    seed: int,
    lengths,
    prompts,
    *,
    width: int,
    answers_width: int = 1,
    padded: int | None = None,
    places: int | None = None,
    whole=(),
) -> Iterator[Part]:
    """Returns prompts in chunks of uneven counts (sometimes 0), then answers likewise.

    Chunks of a prompt hold up to `width` tokens, and are padded to `padded`, or to `width`. With
    `places` chunks of all sequences together hold no more than so many. The first `whole[b]` tokens
    of each prompt have chunks of their own, which attend in one pass.
    """
    random = np.random.default_rng(seed)
    done = np.zeros(len(lengths), int)
    prompt_width = padded or width
    stages = [
        (prompts, width, prompt_width, True, False),
        (lengths, answers_width, answers_width, False, False),
    ]
    if len(whole):
        stages.insert(0, (np.minimum(whole, prompts), width, prompt_width, True, True))
    for end, most, shape, prompt, first in stages:
        end = np.asarray(end)
        while (done < end).any():
            counts = np.minimum(random.integers(0, most + 1, size=len(end)), end - done)
            if places is not None:
                counts = np.diff(np.minimum(np.cumsum(counts), places), prepend=0)
            if counts.any():
                ends = (counts > 0) & (done + counts == prompts) if prompt else None
                yield Part(counts.astype(np.int32), shape, prompt, ends, places, first)
                done += counts


def drive(
    model: Transformer, policy: Policy, tokens: list[np.ndarray], cache: Cache, parts, after=None
) -> Outcome:
    """Runs the parts; `after(done, rows)` is called with the cache after `done[b]` tokens."""
    done = np.zeros(len(tokens), int)
    gathered: list[list[tuple]] = [[] for _ in tokens]
    random = np.random.default_rng(1)
    for part in parts:
        # Padding can be any token.
        chunk = random.integers(0, model.config.vocab_size, size=(len(tokens), part.width))
        for row, count in enumerate(part.counts):
            chunk[row, :count] = tokens[row][done[row] : done[row] + count]
        logits, cache, live, reads = forward(
            model,
            chunk.astype(np.int32),
            part.counts,
            np.zeros(len(tokens), bool) if part.ends_prompt is None else part.ends_prompt,
            cache,
            policy,
            part.whole or in_one_pass(policy, part.width, prompt=part.prompt),
            part.places,
        )
        logits, live, reads = np.asarray(logits), np.asarray(live), np.asarray(reads)
        for row, count in enumerate(part.counts):
            gathered[row].append((logits[row, :count], live[row, :count], reads[row, :count]))
            assert not live[row, count:].any()
            assert not reads[row, count:].any()
        done += part.counts
        if after is not None:
            after(done, Rows.of(cache))
    joined = [[np.concatenate(field) for field in zip(*row, strict=True)] for row in gathered]
    return Outcome(*map(list, zip(*joined, strict=True)))
