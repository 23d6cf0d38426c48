"""Quest (Tang et al., arXiv 2406.10774): query-aware selection of pages.

Nothing is evicted. Each page keeps the elementwise minimum and maximum of its keys; a query
scores a page by an upper bound on its attention logits,

    u(q, page) = sum_d max(q_d * min_d, q_d * max_d),

and reads only the best `budget // P` pages. Selection is separate for every query head, as in the
published evaluation; `per="kv_head"` deviates from it: the query heads of a group share the pages
with the highest sums of their scores, which the group then reads once. The prompt gets full
attention, and so do the first `dense_layers` layers. Memory is not reduced; reads are, to the
budget and two vectors per page.

Over a policy with eviction (`over=DMS(...)`) pages hold kept tokens, and slots are reused. The page
that is always read is the one with the current token, and the bounds of every written page are
recomputed from its present keys, so they never include an evicted key.
"""

import dataclasses
from typing import Annotated, Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax.cache import Pool
from dms_jax.checks import Traced, Whole, require
from dms_jax.policies.base import LayerGroup
from dms_jax.policies.budget import LONGEST, BudgetedPolicy, Tokens
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.values import (
    NOT_STORED,
    PAGES,
    CacheShape,
    Chunk,
    Footprint,
    Placement,
    PolicyState,
    Reading,
)
from dms_jax.ranking import mark_largest, marked_first
from pallas_kernels import select_largest


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class PageBounds:
    """Elementwise minimum and maximum of the keys of each page."""

    low: Float[Array, "N D"] = struct.field(metadata=PAGES)
    high: Float[Array, "N D"] = struct.field(metadata=PAGES)


@dataclasses.dataclass(frozen=True)
class Quest(BudgetedPolicy, SelectiveReading):
    """Reads the pages with the highest bound on attention.

    Attributes:
      budget: number of tokens read per query head and step, rounded down to whole pages.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio for
        each request instead, and at least one page; the kernel's page tables are then as wide as
        for all pages, not for the selected ones.
      dense_layers: number of first layers that read everything.
      force_last_page: whether the page of the current token is always read (as in the original
        kernels); otherwise the bound decides, and at least 3 pages are read (as in the original
        evaluation code).
      per: whether each query head selects pages, or the query heads of a KV head together.
      over: the policy that decides which tokens the cache holds.
    """

    budget: Annotated[Tokens, Traced(int, bounded=True)] = 1024  # the bound sizes the page tables
    dense_layers: Whole = 2
    force_last_page: bool = True
    per: Literal["query_head", "kv_head"] = "query_head"

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """Returns the first layers, which keep bounds but read everything, and the other layers."""
        dense = min(self.dense_layers, num_layers)
        everything = self.replaced(budget=LONGEST, compression_ratio=None)
        runs = (LayerGroup(0, dense, everything), LayerGroup(dense, num_layers, self))
        return tuple(run for run in runs if run.start < run.end)

    def footprint(self, tokens, *, page_size, group=1, **options) -> Footprint:
        """Returns the footprint of `over`, with reads of the bounds and a budget per query head.

        Raises:
          ConfigError: if the budget holds no page that a query can select.
        """
        least = page_size * (2 if self.force_last_page else 1)
        beside = " beside the last page, which is always read" if self.force_last_page else ""
        require(
            self.compression_ratio is not None or self.budget >= least,
            f"Quest: a budget of {self.budget} tokens holds no page of {page_size}{beside}; raise "
            f"the budget to {least}, or make pages smaller (page_size=16 as published).",
        )
        held = super().footprint(tokens, page_size=page_size, group=group, **options)
        budget = self.budget_for(tokens)
        if budget >= held.expected:
            return held
        readers = 1 if self.per == "kv_head" else group
        reads = budget * readers + held.expected / page_size
        return dataclasses.replace(held, reads=reads, attended=budget)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the state of `over`, with the bounds of empty pages."""
        size = (shape.num_pages, shape.head_dim)
        bounds = PageBounds(
            low=jnp.full(size, jnp.inf, shape.dtype), high=jnp.full(size, -jnp.inf, shape.dtype)
        )
        return dataclasses.replace(super().init_state(shape), pages=bounds)

    def written(
        self, state: PolicyState, chunk: Chunk, placement: Placement, pool: Pool
    ) -> PolicyState:
        """Computes the bounds of the pages that were written to."""
        bounds: PageBounds = state.pages
        slots, size = placement.slots, chunk.static.page_size
        if slots.shape[-1] == 1:
            column = jnp.maximum(slots, 0) // size
            written = slots != NOT_STORED
        else:  # a chunk of a prompt: all pages of the rows
            column = jnp.broadcast_to(
                jnp.arange(chunk.page_table.shape[-1]), chunk.page_table.shape
            )
            written = column * size < placement.lengths[..., None]
        nowhere = bounds.low.shape[0]  # out of range: dropped
        page = jnp.take_along_axis(chunk.page_table, column, axis=-1, mode="clip")
        keys = pool.keys(page, bounds.low.dtype)
        slot = column[..., None] * size + jnp.arange(size)
        live = (slot < placement.lengths[..., None, None])[..., None]
        page = jnp.where(written, page, nowhere)
        low = jnp.where(live, keys, jnp.inf).min(-2)
        high = jnp.where(live, keys, -jnp.inf).max(-2)
        pages = PageBounds(
            low=bounds.low.at[page].set(low, mode="drop"),
            high=bounds.high.at[page].set(high, mode="drop"),
        )
        return dataclasses.replace(state, pages=pages)

    def read(
        self, state: PolicyState, q: Float[Array, "B H D"], chunk: Chunk, placement: Placement
    ) -> Reading:
        """Selects the pages of each query head, or of each group of them."""
        page_table, lengths = chunk.page_table, placement.lengths
        page_size = chunk.static.page_size
        batch, _, num_pages = page_table.shape
        floor = 1 if self.force_last_page else 3  # as published
        selected = num_pages  # at most
        if self.compression_ratio is None:
            bound = self.bound("budget")
            if bound // 2 >= num_pages * page_size:  # a budget exceeds half of its bound
                return Reading(page_table, lengths)
            selected = min(max(bound // page_size, floor), num_pages)
        count = jnp.maximum(self.budget_of(chunk)[..., None] // page_size, floor)  # [B, 1, 1]
        score = self._score(state.pages, q, page_table)
        live = -(-lengths // page_size)
        index = jnp.arange(num_pages)
        if self.force_last_page:
            current = (placement.slots // page_size)[..., None]  # [B, K, 1, 1]
            score = jnp.where(index == current, jnp.inf, score)
        # Pages that are not live have no bounds: their scores can be anything, including NaN.
        score = jnp.where(index < live[:, :, None, None], score, -jnp.inf)
        # Scores of a sequence with overflowed numbers must be comparable, too.
        score = jnp.where(jnp.isnan(score), jnp.inf, score)
        # In ascending order: the last page, the only partial one, stays last.
        if selected < num_pages:
            best = _bounded_largest(score, count[..., None], selected)
        else:
            best = _first_largest(score, count[..., None])
        table = jnp.take_along_axis(page_table[:, :, None], best, axis=-1)
        partial = lengths - (live - 1) * page_size
        last = best == live[:, :, None, None] - 1
        has_last = (last & (jnp.arange(selected) < count[..., None])).any(-1)
        chosen = jnp.where(
            has_last, (count - 1) * page_size + partial[..., None], count * page_size
        )
        # If fewer pages are live than selected, the first `live` of them are the live ones and
        # nothing is selected: the group reads its row once, and no bounds.
        all_live = live <= count[..., 0]
        reads = jnp.where(all_live, lengths, chosen.sum(-1) + live).sum(-1, dtype=jnp.int32)
        lengths = jnp.where(all_live[..., None], lengths[..., None], chosen)
        return Reading(
            page_table=table.reshape(batch, -1, selected),
            lengths=lengths.reshape(batch, -1),
            reads=reads,
        )

    def _score(
        self, bounds: PageBounds, q: Float[Array, "B H D"], page_table: Int[Array, "B K M"]
    ) -> Float[Array, "B K G M"]:
        """Returns each page's bound on attention, summed over a group that shares pages (G = 1).

        sum_d max(q low, q high) = sum_d max(q, 0) high + min(q, 0) low: products in the stored
        dtype, accumulated in at least float32.
        """
        batch, num_kv_heads, _ = page_table.shape
        grouped = q.reshape(batch, num_kv_heads, -1, q.shape[-1])
        signed = jnp.concatenate([jnp.maximum(grouped, 0), jnp.minimum(grouped, 0)], -1)
        ends = [x.at[page_table].get(mode="clip") for x in (bounds.high, bounds.low)]
        score = jnp.einsum(
            "BKGD,BKMD->BKGM",
            signed,
            jnp.concatenate(ends, -1),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
        )
        return score.sum(2, keepdims=True) if self.per == "kv_head" else score


def _bounded_largest(
    score: Float[Array, "B K G M"], count: Int[Array, "B 1 1 1"], bound: int
) -> Int[Array, "B K G n"]:
    """Returns the pages with the `count` highest scores, in ascending order, then arbitrary ones.

    The result has `bound` columns, a static number. The bound - count surplus columns are filled by
    padding columns after the pages, which score +inf; a page that scores +inf comes before them.

    # score: [3, 1, 4, 2]  count: 2  bound: 3  columns: [3, 1, 4, 2, inf, -inf, ...]  Out: [0, 2, 3]

    Args:
      score: scores of pages.
      count: at most the bound, and at least bound - (bound // 3 + 1) (`few_sizes`).
      bound: number of pages to return, below M.
    """
    pages, spare = score.shape[-1], bound // 3 + 1
    filled = jnp.where(jnp.arange(spare) < bound - count, jnp.inf, -jnp.inf).astype(score.dtype)
    columns = jnp.broadcast_to(filled, (*score.shape[:-1], spare))
    columns = jnp.concatenate([score, columns], -1).reshape(-1, pages + spare)
    best = select_largest(columns, bound).reshape(*score.shape[:-1], bound)
    return jnp.minimum(best, pages - 1)


def _first_largest(
    score: Float[Array, "B K G M"], count: Int[Array, "B 1 1 1"]
) -> Int[Array, "B K G M"]:
    """Returns the pages with the `count` highest scores, in ascending order, then the others.

    # score: [3, 1, 3, 2]  count: 2  Out: [0, 2, 1, 3]
    """
    rows = score.reshape(-1, score.shape[-1])
    counts = jnp.broadcast_to(count[..., 0], score.shape[:-1]).reshape(-1)
    return marked_first(mark_largest(rows, counts)).reshape(score.shape)
