"""The contract of a cache policy: decide, write, read, observe.

Every system of the papers answers four questions about one layer's cache:

    decide   what does a token say?             tokens             -> decisions
    write    how does it enter the cache?       chunk of tokens    -> slots to write
    read     what does a query attend to?       pages, lengths     -> pages, lengths
    observe  what did the reading teach?        queries, weights   -> state

A policy is a small frozen dataclass of hyper-parameters (hashable, so a static argument of `jit`)
and pure functions on arrays. What it must remember is a pytree, carried beside the cache:

* `state.rows`: leaves [B, K, ...], one entry per row (DMS's ring, DMC's sums, TOVA's victim);
* `state.pages`: leaves [N, ...], addressed by page number (Quest's bounds, H2O's scores).

A state of several arrays is a dataclass whose fields declare the axes that meshes split: `ROWS`,
`PAGES` (`policies/values.py`), or others of `sharding.axes`. What declares none is refused.

Slots. A row (one layer, sequence and KV head) is a list of `length` slots; slot s lives on the
row's page s // P at offset s % P. A policy speaks of slots and never of the pool. Keys are stored
rotated, so the order of slots means nothing to attention.

Chunks. The same `write` serves a decode step (T = 1) and a chunk of a prompt (T > 1). Where all T
queries of a chunk attend in one pass (`parallel`), the lifetime of a key must be known without
attention, in the form of a static window and one bit per key:

    key j is visible to query i >= j  iff  i - j <= window  or  not evicted[j]

Other chunks are run token by token inside the layer (write, read, observe for each).

Cuts. A policy that `shrinks` lets a prompt attend to all of itself, a chunk in one pass, and then
names the slots that stay (`survivors`); where it is `due`, it does so again after a step. The kept
slots close ranks in their order, and the pages behind them are given back.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache import Pool
from dms_jax.checks import Options, show
from dms_jax.errors import ConfigError
from dms_jax.policies.values import (
    CacheShape,
    Chunk,
    Decisions,
    Footprint,
    Observation,
    Placement,
    PolicyState,
    Reading,
    Relaxed,
    Retrofit,
    Rows,
    Tokens,
    place,
)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that a policy treats alike.

    Attributes:
      start, end: the layers from `start` up to, not including, `end`.
      policy: the policy of these layers.
      host_values: whether their values live in host memory.
    """

    start: int
    end: int
    policy: "Policy"
    host_values: bool = False


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Base of all cache policies: appends everything, reads everything, learns nothing.

    Subclasses override what differs.
    """

    name: ClassVar[str]  # the public name, which is that of the class
    observes_weights: ClassVar[bool] = False  # observe() wants the attention weights of each query

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.name = cls.__name__

    # -- what the library must know ---------------------------------------------------------------

    @property
    def parallel(self) -> Literal["always", "prompts", "never"]:
        """Which chunks attend in one pass: all of them, those of prompts, or none.

        Where prompts are treated like answers ("always", "never"), the result does not depend on
        where the prompt ends.
        """
        return "always"

    @property
    def visible_window(self) -> int:
        """Distance up to which every key is visible whatever is decided (chunks in one pass)."""
        return 0

    @property
    def shrinks(self) -> bool:
        """Whether rows are rewritten shorter: prompts are read whole, then cut (`survivors`)."""
        return False

    @property
    def retrofit(self) -> Retrofit:
        """What a model must be trained for; nothing by default."""
        return Retrofit()

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """The layers, in runs that are treated alike."""
        return (LayerGroup(0, num_layers, self),)

    def for_length(self, tokens: int) -> "Policy":
        """The policy for sequences of so many tokens: a budget that is a share is worked out."""
        return self

    def footprint(
        self, tokens: int, *, page_size: int, group: int = 1, compression_ratio: float | int = 1
    ) -> Footprint:
        """What a row holds after `tokens` tokens, and what a step then reads.

        Args:
          tokens: tokens of the sequence.
          page_size: slots a page.
          group: query heads of each KV head.
          compression_ratio: of learned eviction, 1 / (1 - share of tokens that are evicted).
        """
        return Footprint(tokens, tokens, None, reads=tokens, attended=tokens)

    # -- decide -----------------------------------------------------------------------------------

    def decide(self, tokens: Tokens) -> Decisions:
        """Reads each token's decision off its projections."""
        return Decisions()

    def clear_borrowed(
        self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale: Any = 0.0
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
        """Multiplies the neurons that carry decisions by `scale`; applied before and after RoPE."""
        return q, k

    # -- write ------------------------------------------------------------------------------------

    def init_state(self, shape: CacheShape) -> PolicyState:
        """The state of one layer's empty rows [B, K, ...] and of empty pages [N, ...]."""
        return PolicyState()

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Rewrites keys and values before they are rotated and stored (partial accumulation)."""
        return state, chunk

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Says where the chunk's tokens go. Appends by default."""
        live = chunk.lengths[..., None] + jnp.cumsum(chunk.valid, -1, dtype=jnp.int32)
        return state, place(chunk, live - 1, live)

    def written(
        self, state: PolicyState, chunk: Chunk, placement: Placement, pool: Pool
    ) -> PolicyState:
        """Keeps its books of slots and pages, once the chunk is in the pool."""
        return state

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Which keys of whole sequences are hidden from queries beyond the window.

        The hard decisions of `write` without a cache (policies that are always parallel).
        """
        return jnp.zeros_like(chunk.valid)

    # -- read -------------------------------------------------------------------------------------

    def read(
        self, state: PolicyState, q: Float[Array, "B H D"], chunk: Chunk, placement: Placement
    ) -> Reading:
        """Chooses the pages a query attends to. Everything live by default."""
        return Reading(chunk.page_table, placement.lengths)

    # -- observe ----------------------------------------------------------------------------------

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Learns from attention over a chunk: from one query, or all of a chunk in one pass."""
        return state

    def due(self, lengths: Int[Array, "B K"], chunk: Chunk) -> Bool[Array, " B"] | None:
        """Which sequences are to be cut after a step; None for never."""
        return None

    def survivors(
        self, state: PolicyState, chunk: Chunk, rows: Rows, q: Float[Array, "B T H D"] | None
    ) -> Bool[Array, "B K S"]:
        """Which slots stay when a row is cut. The kept ones close ranks, in their order.

        Args:
          state: what the policy remembers.
          chunk: the tokens that came last.
          rows: what the cache holds, the chunk included.
          q: the chunk's rotated queries; None after a step.
        """
        return rows.live

    # -- train ------------------------------------------------------------------------------------

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """The differentiable form of the decisions, given logistic noise."""
        raise ConfigError(f"{self.name} has no trainable form; retrofit with DMS.")

    # -- as data ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as JSON data: its name and every field (`policies.from_dict`)."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"name": self.name} | {
            name: value.to_dict() if isinstance(value, Policy) else value
            for name, value in fields.items()
        }


def check_policy(policy: Any) -> None:
    """Raises ConfigError for what is no policy (the name of one, most often)."""
    if not isinstance(policy, Policy):
        raise ConfigError(f"Not a cache policy: {show(policy)}. Use e.g. dms_jax.DMS(window=256).")


def check_adapter(policy: Policy, *, has_adapter: bool) -> None:
    """Raises ConfigError for a policy that reads an adapter on a model without one."""
    if policy.retrofit.adapter and not has_adapter:
        raise ConfigError(
            f"{policy.name} reads its decisions from an adapter, which this model does not have. "
            "Retrofit the model first, or load a checkpoint with adapter tensors."
        )


def hard_marks(decisions: Decisions) -> Bool[Array, "B K T"]:
    """The hard decisions of a policy that makes them."""
    assert decisions.marks is not None
    return decisions.marks
