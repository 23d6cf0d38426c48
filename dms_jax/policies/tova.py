"""TOVA (Oren et al., arXiv 2401.06104): token omission via attention.

Up to `budget` tokens everything is kept. Beyond, after each query the token with the smallest
attention weight is dropped, whichever it is (no sinks, no window: the newest may go). The weight
is that of the last query, averaged over all query heads of the layer, so all heads of a layer
drop the same token; `per="head"` averages over each KV head's own group instead.

The query attends to budget + 1 tokens, then one goes: its slot is taken by the next token. Here
the rule holds inside the prompt too ("evict past the budget", as the DMS paper ran it).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dms_jax.policies.base import (
    FOREVER,
    NOT_STORED,
    Chunk,
    Placement,
    Policy,
    PolicyState,
    is_static_int,
    require,
    slot_shape,
)


@dataclasses.dataclass(frozen=True)
class TOVA(Policy):
    """Drops the token that the last query attended to least.

    Attributes:
      budget: tokens that survive each query; one more is live while it attends.
      per: average the weights over the layer, or over each KV head's group.
    """

    budget: int = 1024
    per: Literal["layer", "head"] = "layer"

    observes = True

    def __post_init__(self):
        require(
            is_static_int(self.budget, least=1),
            f"TOVA: budget must be a whole number of at least 1, got {self.budget!r}.",
        )
        require(
            self.per in ("layer", "head"), f"TOVA: per must be 'layer' or 'head', got {self.per!r}."
        )

    def parallel(self, *, prompt: bool) -> bool:
        """Who is dropped depends on attention: token by token."""
        del prompt
        return False

    def slot_limit(self, page_size: int) -> int:
        """The budget and the current token."""
        del page_size
        return self.budget + 1

    def init_rows(self, num_sequences, num_kv_heads, head_dim, dtype) -> Int[Array, "B K"]:
        """The slot that the next token takes, NOT_STORED for a new one."""
        del head_dim, dtype
        return jnp.full((num_sequences, num_kv_heads), NOT_STORED, jnp.int32)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Takes the victim's slot, or a new one. One token at a time."""
        victim = state.rows
        valid = jnp.broadcast_to((chunk.count > 0)[:, None], victim.shape)
        append = valid & (victim == NOT_STORED)
        lengths = chunk.lengths + append
        slots = jnp.where(append, chunk.lengths, jnp.where(valid, victim, NOT_STORED))
        return state, Placement(
            k=chunk.k,
            v=chunk.v,
            slots=slots[..., None],
            lengths=lengths,
            live=lengths[..., None],
            evicted=jnp.zeros((*slots.shape, 1), bool),
            past_until=jnp.full(slot_shape(chunk), FOREVER, jnp.int32),
        )

    def observe(
        self,
        state: PolicyState,
        weights: Float[Array, "B K G S"],
        chunk: Chunk,
        placement: Placement,
        head_axis: str | None,
    ) -> PolicyState:
        """Names the victim once more than `budget` tokens are live."""
        mean = weights.mean(2)
        if self.per == "layer":
            mean = jnp.broadcast_to(mean.mean(1, keepdims=True), mean.shape)
            if head_axis is not None:
                mean = jax.lax.pmean(mean, head_axis)
        live = jnp.arange(mean.shape[-1]) < placement.lengths[..., None]
        victim = jnp.argmin(jnp.where(live, mean, jnp.inf), -1).astype(jnp.int32)
        victim = jnp.where(placement.lengths > self.budget, victim, NOT_STORED)
        return dataclasses.replace(
            state, rows=jnp.where((chunk.count > 0)[:, None], victim, state.rows)
        )
