"""The contract of a cache policy: decide, write, read, observe.

Every system of the papers answers four questions about one layer's cache:

    decide   what does a token say?             projections        -> decisions
    write    how does it enter the cache?       chunk of tokens    -> slots to write, new lengths
    read     what does a query attend to?       pages, lengths     -> pages, lengths
    observe  what did the reading teach?        attention weights  -> state

A policy is a small frozen dataclass of hyper-parameters (hashable, so a static argument of `jit`)
and pure functions on arrays. What it must remember is a pytree, carried beside the cache:

* `state.rows`: leaves [B, K, ...], one entry per row (DMS's ring, DMC's sums, TOVA's victim);
* `state.pages`: leaves [N, ...], addressed by page number (Quest's bounds, H2O's scores).

A state of several arrays is a dataclass whose fields declare the axes that meshes split: `ROWS`,
`PAGES` (`policies/values.py`), or others of `sharding.axes`. What declares none is refused.

Slots. A row (one layer, sequence and KV head) is a list of `length` slots; slot s lives on the
row's page s // P at offset s % P. A policy speaks of slots and never of the pool. Keys are stored
rotated, so the order of slots means nothing to attention.

Chunks. The same `write` serves a decode step (T = 1) and a chunk of a prompt (T > 1). Where a
policy is `parallel`, all T queries of a chunk attend in one pass: the lifetime of a key must then
be known without attention, in the form of a static window and one bit per key:

    key j is visible to query i >= j  iff  i - j <= window  or  not evicted[j]

Other policies are run token by token inside the layer (write, read, observe for each).

Cuts. A policy that `shrinks` lets a prompt attend to all of itself, a chunk in one pass, and then
names the slots that stay (`survivors`); where it is `due`, it does so again after a step. The kept
slots close ranks in their order, and the pages behind them are given back. `observe_prompt` and
`remember` show it the prompt's attention and queries, chunk by chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache import Pool
from dms_jax.checks import Options, check_names, show
from dms_jax.errors import ConfigError
from dms_jax.policies.values import (
    FOREVER,
    NOT_STORED,
    Chunk,
    Decisions,
    Placement,
    PolicyState,
    Projections,
    Reading,
    Relaxed,
    Rows,
    row_shape,
    slot_shape,
)


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Base of all cache policies: appends everything, reads everything, learns nothing.

    Subclasses override what differs. The class attributes say what the library must prepare.
    """

    uses_adapter: ClassVar[bool] = False  # decide() wants `adapter_logits`
    observes: ClassVar[bool] = False  # observe() wants attention weights per slot
    remembers: ClassVar[bool] = False  # remember() wants the queries of every chunk
    split_invariant: ClassVar[bool] = True  # prompt and steps: the same result for every split
    trainable: ClassVar[bool] = False  # has a differentiable form (relax)
    learned: ClassVar[bool] = False  # means nothing on a model that was not retrofitted for it

    # Keys this far back are visible whatever is decided (parallel policies).
    @property
    def visible_window(self) -> int:
        """Distance up to which every key is visible."""
        return 0

    @property
    def borrowed_neurons(self) -> str | None:
        """Which neurons carry decisions and take no part in attention; None for none.

        A model works with exactly the neurons out of attention that it was retrofitted with.
        """
        return None

    @property
    def trained_decisions(self) -> str | None:
        """What a model learns its decisions to mean, in words; None if there is nothing to learn.

        Budgets, windows and thresholds may change after training; what this says may not.
        """
        return None

    def validate(self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int):
        """Raises ConfigError if the policy cannot serve a model of this shape."""

    def check_page_size(self, page_size: int) -> None:
        """Raises ConfigError if the policy cannot work with pages of so many tokens."""

    def groups(self, num_layers: int) -> tuple[tuple[int, int, "Policy"], ...]:
        """Returns (first layer, end layer, policy) for runs of layers that are treated alike."""
        return ((0, num_layers, self),)

    def parallel(self, *, prompt: bool) -> bool:
        """Whether the tokens of a chunk (of a prompt, or of an answer) may attend in one pass."""
        del prompt
        return True

    @property
    def shrinks(self) -> bool:
        """Whether rows are rewritten shorter: prompts are read whole, then cut (`survivors`)."""
        return False

    @property
    def future_positions(self) -> int:
        """How many positions to come `Chunk.future` averages; 0 for none."""
        return 0

    def slot_limit(self, page_size: int) -> int | None:
        """The most slots a row can come to hold, None if it grows with the sequence.

        Of a policy that `shrinks`, once the prompt has been cut.
        """
        del page_size
        return None

    def mean_slot_limit(self, page_size: int) -> int | None:
        """As `slot_limit`, on average over a layer's rows and the layers; for estimates."""
        return self.slot_limit(page_size)

    def for_horizon(self, tokens: int) -> "Policy":
        """The policy for sequences of so many tokens, with a budget of its own if it is a share."""
        del tokens
        return self

    @property
    def read_budget(self) -> int | None:
        """Tokens that each query head selects to read; None where everything live is read."""
        return None

    @property
    def fetches(self) -> int | None:
        """Values that each query head fetches by its weights; None to read them with the keys."""
        return None

    def device_value_layers(self, num_layers: int) -> int:
        """First layers whose values are on the device; those of the others live on the host."""
        return num_layers

    @property
    def renormalizes(self) -> bool:
        """Whether the weights of fetched values are made to sum to one."""
        return False

    # -- decide -----------------------------------------------------------------------------------

    def decide(self, projections: Projections) -> Decisions:
        """Reads each token's decision off its projections."""
        del projections
        return Decisions()

    def clear_borrowed(
        self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale: Any = 0.0
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
        """Multiplies the neurons that carry decisions by `scale`; applied before and after RoPE."""
        del scale
        return q, k

    # -- write ------------------------------------------------------------------------------------

    def init_rows(
        self, num_sequences: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> Any:
        """Returns `state.rows` of one layer's empty cache, leaves [B, K, ...]."""
        del num_sequences, num_kv_heads, head_dim, dtype
        return ()

    def init_row_state(
        self, num_sequences: int, num_kv_heads: int, group: int, head_dim: int, dtype: jnp.dtype
    ) -> Any:
        """As `init_rows`, which it is for policies that remember nothing per query head."""
        del group
        return self.init_rows(num_sequences, num_kv_heads, head_dim, dtype)

    def init_pages(self, num_pages: int, page_size: int, head_dim: int, dtype: jnp.dtype) -> Any:
        """Returns `state.pages` of an empty pool, leaves [N, ...]."""
        del num_pages, page_size, head_dim, dtype
        return ()

    def transform(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Rewrites unrotated keys and values before they are stored (DMC merges them here)."""
        return state, chunk

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Says where the chunk's tokens go. `chunk.k` is rotated by now. Appends by default."""
        new = jnp.broadcast_to(chunk.valid, chunk.lengths.shape + chunk.k.shape[1:2])
        live = chunk.lengths[..., None] + jnp.cumsum(new, -1, dtype=jnp.int32)
        return state, Placement(
            k=chunk.k,
            v=chunk.v,
            slots=jnp.where(new, live - 1, NOT_STORED),
            lengths=live[..., -1],
            live=live,
            evicted=jnp.zeros_like(new),
            past_until=jnp.full(slot_shape(chunk), FOREVER, jnp.int32),
        )

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Which keys of whole sequences are hidden from queries beyond the window.

        The hard decisions of `write` without a cache (parallel policies).
        """
        return jnp.zeros(row_shape(chunk), bool)

    def stored(
        self, state: PolicyState, pool: Pool, chunk: Chunk, placement: Placement
    ) -> PolicyState:
        """Learns from the pool, into which the chunk has been written (Quest's bounds)."""
        del pool, chunk, placement
        return state

    # -- read -------------------------------------------------------------------------------------

    def read(
        self, state: PolicyState, q: Float[Array, "B H D"], chunk: Chunk, placement: Placement
    ) -> Reading:
        """Chooses the pages a query attends to. Everything live by default."""
        del state, q
        return Reading(chunk.page_table, placement.lengths)

    # -- observe ----------------------------------------------------------------------------------

    def observe(
        self,
        state: PolicyState,
        weights: Float[Array, "B K G S"],
        chunk: Chunk,
        placement: Placement,
        head_axis: str | None,
    ) -> PolicyState:
        """Learns from the attention weights of one query over the slots in use.

        `head_axis` names the mesh axis over which KV heads are split, if any: a mean over all
        heads of the layer needs a `jax.lax.pmean` over it.
        """
        del weights, chunk, placement, head_axis
        return state

    def remember(self, state: PolicyState, q: Float[Array, "B T H D"], chunk: Chunk) -> PolicyState:
        """Learns from the queries of a chunk: rotated in `q`, unrotated in `chunk.queries`."""
        del q, chunk
        return state

    def observe_prompt(
        self,
        state: PolicyState,
        q: Float[Array, "B T H D"],
        rows: Callable[[], Rows],
        chunk: Chunk,
        scale: float,
    ) -> PolicyState:
        """As `observe`, of a chunk of a prompt that was read in one pass; `rows()` holds it too."""
        del q, rows, chunk, scale
        return state

    # -- shrink -----------------------------------------------------------------------------------

    def due(
        self, lengths: Int[Array, "B K"], chunk: Chunk, head_axis: str | None
    ) -> Bool[Array, " B"] | None:
        """Which sequences are to be cut after a step; None for never."""
        del lengths, chunk, head_axis
        return None

    def survivors(
        self,
        state: PolicyState,
        q: Float[Array, "B T H D"] | None,
        rows: Rows,
        chunk: Chunk,
        scale: float,
        head_axis: str | None,
    ) -> Bool[Array, "B K S"]:
        """Which slots stay when a row is cut. The kept ones close ranks, in their order.

        Args:
          state: what the policy remembers.
          q: the chunk's rotated queries; None after a step.
          rows: what the cache holds, the chunk included.
          chunk: the tokens that came last.
          scale: factor on the dot products.
          head_axis: see `observe`.
        """
        del state, q, chunk, scale, head_axis
        return rows.live

    # -- train ------------------------------------------------------------------------------------

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """The differentiable form of the decisions, given logistic noise."""
        del chunk, noise
        raise ConfigError(f"{self.name} has no trainable form; retrofit with DMS.")

    # -- as data ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The policy's public name."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as JSON data: its name and every field."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Policy":
        """Builds the policy from `to_dict` data without its name."""
        check_names(cls.__name__, fields, [field.name for field in dataclasses.fields(cls)])
        return cls(**fields)


def check_policy(policy: Any) -> None:
    """Raises ConfigError for what is no policy (the name of one, most often)."""
    if not isinstance(policy, Policy):
        raise ConfigError(f"Not a cache policy: {show(policy)}. Use e.g. dms_jax.DMS(window=256).")


def check_adapter(policy: Policy, *, has_adapter: bool) -> None:
    """Raises ConfigError for a policy that reads an adapter on a model without one."""
    if policy.uses_adapter and not has_adapter:
        raise ConfigError(
            f"{policy.name} reads its decisions from an adapter, which this model does not have. "
            "Retrofit the model first, or load a checkpoint with adapter tensors."
        )


def hard_marks(decisions: Decisions) -> Bool[Array, "B K T"]:
    """The hard decisions of a policy that makes them."""
    assert decisions.marks is not None
    return decisions.marks
