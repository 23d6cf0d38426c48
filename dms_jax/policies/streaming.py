"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens and the most recent ones.

A query at position i sees key j iff j < sinks (the attention sinks) or j is among the last
`budget - sinks` tokens, itself included. Rotations keep the true positions.

With a budget in tokens every key carries its own lifetime: delayed eviction. A share of the request
is another number for each sequence, and for each turn of a conversation, so that tokens come one by
one: beyond the budget, each takes the slot of the oldest token that is no sink.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from dms_jax.checks import Whole, require
from dms_jax.policies.base import (
    FOREVER,
    NOT_STORED,
    Chunk,
    Decisions,
    Placement,
    PolicyState,
    Projections,
    row_shape,
    slot_shape,
)
from dms_jax.policies.budget import BudgetedPolicy
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.slots import put_slots, slot_values


@dataclasses.dataclass(frozen=True)
class StreamingLLM(BudgetedPolicy, DelayedEviction):
    """Attention sinks and a recent window.

    Attributes:
      budget: live tokens per row, the current one included.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio of
        each request instead, and one token beside the sinks at least.
      sinks: first tokens that are never evicted.
    """

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
        """One token beside the sinks."""
        return self.sinks + 1

    def parallel(self, *, prompt: bool) -> bool:
        """Where the window is the same for every sequence."""
        del prompt
        return self.compression_ratio is None

    @property
    def visible_window(self) -> int:
        """The recent tokens, without the current one."""
        return self.budget - self.sinks - 1

    def slot_limit(self, page_size: int) -> int | None:
        """Never more than the budget."""
        del page_size
        return None if self.compression_ratio is not None else self.budget

    def decide(self, projections: Projections) -> Decisions:
        """Everything but the sinks leaves with the window."""
        batch, num_tokens = projections.positions.shape
        shape = (batch, projections.k.shape[2], num_tokens)
        marks = (projections.positions >= self.sinks)[:, None]
        return Decisions(marks=jnp.broadcast_to(marks, shape))

    # -- a share of the request -------------------------------------------------------------------

    def init_rows(self, num_sequences, num_kv_heads, head_dim, dtype) -> Any:
        """The ring of delayed eviction; nothing for a share."""
        if self.compression_ratio is not None:
            return ()
        return super().init_rows(num_sequences, num_kv_heads, head_dim, dtype)

    def init_pages(self, num_pages, page_size, head_dim, dtype) -> Any:
        """The positions of tokens, for a share."""
        if self.compression_ratio is None:
            return super().init_pages(num_pages, page_size, head_dim, dtype)
        return jnp.zeros((num_pages, page_size), jnp.int32)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Beyond the budget, the newcomer takes the slot of the oldest token that is no sink."""
        if self.compression_ratio is None:
            return super().write(state, chunk)
        assert chunk.k.shape[1] == 1
        positions = slot_values(state.pages, chunk.page_table)
        held = jnp.arange(slot_shape(chunk)[-1]) < chunk.lengths[..., None]
        leaves = jnp.where(held & (positions >= self.sinks), positions, FOREVER)
        oldest = jnp.argmin(leaves, -1, keepdims=True).astype(jnp.int32)
        valid = jnp.broadcast_to(chunk.valid, row_shape(chunk))
        full = (chunk.lengths >= self.budget_of(chunk))[..., None]
        slots = jnp.where(full, oldest, chunk.lengths[..., None])
        slots = jnp.where(valid, slots, NOT_STORED)
        live = chunk.lengths[..., None] + (valid & ~full).astype(jnp.int32)
        newest = jnp.broadcast_to(chunk.positions[:, None], slots.shape)
        pages = put_slots(state.pages, chunk.page_table, slots, newest)
        return dataclasses.replace(state, pages=pages), Placement(
            k=chunk.k,
            v=chunk.v,
            slots=slots,
            lengths=live[..., -1],
            live=live,
            evicted=jnp.zeros_like(valid),
            past_until=jnp.full(slot_shape(chunk), FOREVER, jnp.int32),
        )
