"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens and the most recent ones.

A query at position i sees key j iff j < sinks (the attention sinks) or j is among the last
`budget - sinks` tokens, including i itself.

Difference from the publication: keys are rotated by their true positions, so the sinks move away
from the query as the text grows. The paper numbers tokens within the cache, which keeps the
distances of recent tokens and keeps the sinks at most `budget` positions away, so a model can run
beyond the positions of its training; here it cannot (in kvpress only with KeyRerotationPress). The
reason: keys are stored after rotation, and the distance of a sink would differ between the queries
of a pass. The kept tokens are the same.

With a budget in tokens the lifetime of every key is known in advance, so delayed eviction applies,
and a prompt runs in one pass in which each token sees only its window and the sinks. With a
compression ratio the budget differs between sequences. Then a prompt gets full attention and is cut
to the sinks and the most recent tokens at its end, as in the authors' code and in kvpress, and each
token of an answer takes the slot of the oldest token that is not a sink. With
`prefill="evict_past_budget"` prompt tokens beyond the budget do so too, one by one, and so see only
the window and the sinks.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from dms_jax.checks import Whole, require
from dms_jax.policies import budget as budgets
from dms_jax.policies.budget import EvictionByToken, bounded, highest
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import (
    FOREVER,
    CacheShape,
    Chunk,
    Decisions,
    Footprint,
    Placement,
    PolicyState,
    Rows,
    Tokens,
    place,
)


@dataclasses.dataclass(frozen=True)
class StreamingLLM(EvictionByToken, DelayedEviction):
    """Keeps the attention sinks and a window of recent tokens.

    Attributes:
      budget: number of live tokens per row, including the current one.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio for
        each request instead, and at least one token more than the sinks.
      prefill: with a compression ratio, whether a prompt gets full attention and one cut at its end
        (dense_then_evict), or its tokens beyond the budget run one by one (evict_past_budget). With
        a budget in tokens a prompt always runs in one pass, in which each token sees its window.
      sinks: number of first tokens that are never evicted.
    """

    budget: budgets.Tokens = 1024  # static, like the sinks: both set the size of the window
    sinks: Whole = 4

    def __post_init__(self):
        super().__post_init__()
        require(
            self.budget > self.sinks,
            f"StreamingLLM: a budget of {self.budget} tokens holds nothing beside {self.sinks} "
            "sinks; raise the budget.",
        )

    @property
    def least_budget(self) -> int:
        """See `BudgetedPolicy.least_budget`: one token more than the sinks."""
        return self.sinks + 1

    @property
    def shrinks(self) -> bool:
        """See `Policy.shrinks`: with a compression ratio, after a dense prompt."""
        return self.compression_ratio is not None and super().shrinks

    @property
    def parallel(self):
        """See `Policy.parallel`: always, if all sequences have the same window."""
        return "always" if self.compression_ratio is None else super().parallel

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`: the recent tokens without the current one."""
        return self.budget - self.sinks - 1

    @property
    def can_undo(self) -> bool:
        """See `Policy.can_undo`: unless with a compression ratio pages hold positions."""
        return self.compression_ratio is None and super().can_undo

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns a footprint of at most the budget."""
        return bounded(tokens, self.budget_for(tokens))

    def decide(self, tokens: Tokens) -> Decisions:
        """Marks every token but the sinks for eviction."""
        batch, num_tokens = tokens.positions.shape
        shape = (batch, tokens.k.shape[2], num_tokens)
        marks = (tokens.positions >= self.sinks)[:, None]
        return Decisions(marks=jnp.broadcast_to(marks, shape))

    def frozen_slots(self, rows, lengths, seen):
        """See `Policy.frozen_slots`: none with a compression ratio."""
        if self.compression_ratio is not None:
            return None
        return super().frozen_slots(rows, lengths, seen)

    # -- with a compression ratio -----------------------------------------------------------------

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the ring of delayed eviction, or with a ratio each slot's token position."""
        if self.compression_ratio is None:
            return super().init_state(shape)
        return PolicyState(pages=jnp.zeros(shape.pages, jnp.int32))

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Gives a token beyond the budget the slot of the oldest token that is not a sink.

        A one-pass chunk is appended: it lies within the budget, or in a prompt that will be cut.
        """
        if self.compression_ratio is None:
            return super().write(state, chunk)
        positions = slot_values(state.pages, chunk.page_table)
        held = jnp.arange(chunk.num_slots) < chunk.lengths[..., None]
        leaves = jnp.where(held & (positions >= self.sinks), positions, FOREVER)
        oldest = jnp.argmin(leaves, -1, keepdims=True).astype(jnp.int32)
        full = (chunk.lengths >= self.budget_of(chunk))[..., None] & (not chunk.static.one_pass)
        live = chunk.lengths[..., None] + jnp.cumsum(chunk.valid & ~full, -1, dtype=jnp.int32)
        return state, place(chunk, jnp.where(full, oldest, live - 1), live)

    def written(self, state, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """Stores the positions of the new tokens if there is a compression ratio."""
        if self.compression_ratio is None:
            return state
        positions = jnp.broadcast_to(chunk.tokens.positions[:, None], placement.slots.shape)
        pages = put_slots(state.pages, chunk.page_table, placement.slots, positions)
        return dataclasses.replace(state, pages=pages)

    def survivors(self, state, chunk: Chunk, rows: Rows, q) -> Bool[Array, "B K S"]:
        """Keeps the sinks and the most recent tokens, within the budget."""
        positions = slot_values(state.pages, chunk.page_table)
        worth = jnp.where(positions < self.sinks, jnp.inf, positions)
        return highest(jnp.where(rows.live, worth, -jnp.inf), self.budget_of(chunk))
