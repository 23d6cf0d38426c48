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

Slots. A row (one layer, sequence and KV head) is a list of `length` slots; slot s lives on the
row's page s // P at offset s % P. A policy speaks of slots and never of the pool. Keys are stored
rotated, so the order of slots means nothing to attention.

Chunks. The same `write` serves a decode step (T = 1) and a chunk of a prompt (T > 1). Where a
policy is `parallel`, all T queries of a chunk attend in one pass: the lifetime of a key must then
be known without attention, in the form of a static window and one bit per key:

    key j is visible to query i >= j  iff  i - j <= window  or  not evicted[j]

Other policies are run token by token inside the layer (write, read, observe for each).
"""

import dataclasses
import math
from typing import Any, ClassVar, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache import Pool
from dms_jax.errors import ConfigError

FOREVER = 2**30  # later than any query: int32, with room for sums
NOT_STORED = -1  # the slot of a token that is gone before the end of its chunk


@struct.dataclass
class Projections:
    """What one layer's tokens look like before rotation, after q/k norms."""

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    adapter_logits: Float[Array, "B K T"] | None  # where the policy asks for an adapter
    positions: Int[Array, "B T"]  # from 0 at the start of each sequence (or packed document)
    layer: Int[Array, ""]


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Decisions:
    """What the tokens of one layer say.

    Attributes:
      logits: decision logit per KV head, positive for yes; None if the policy learns nothing.
      marks: the hard decisions; None if the policy decides nothing from a token.
      importance: importance weight of each token (DMC's omega), or None.
    """

    logits: Float[Array, "B K T"] | None = None
    marks: Bool[Array, "B K T"] | None = None
    importance: Float[Array, "B K T"] | None = None


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Chunk:
    """T new tokens of every row of one layer. Tokens at and beyond `count` are padding.

    Borrowed neurons are already zero. Keys are unrotated in `transform` and `relax`, rotated in
    `write` and `observe`.
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    decisions: Decisions
    positions: Int[Array, "B T"]
    count: Int[Array, " B"]
    page_table: Int[Array, "B K M"]
    lengths: Int[Array, "B K"]
    page_size: int = struct.field(pytree_node=False)

    @property
    def first(self) -> Int[Array, " B"]:
        """Position of the chunk's first token, which is how many tokens came before it."""
        return self.positions[:, 0]

    @property
    def valid(self) -> Bool[Array, "B 1 T"]:
        """Which tokens are not padding."""
        return (jnp.arange(self.k.shape[1]) < self.count[:, None])[:, None]


@struct.dataclass
class Placement:
    """How a chunk enters the cache.

    Attributes:
      k, v: what is stored (rotated keys; for DMC the merged ones).
      slots: the slot each token is written to, NOT_STORED if it is gone by the chunk's end.
      lengths: slots in use after the chunk.
      live: slots in use right after each token, for the accounting.
      evicted: whether the key is hidden from queries beyond the window (parallel policies).
      past_until: the last query of the chunk (0, 1, ...) that still sees each slot that was in
        use before the chunk; FOREVER for those that stay (parallel policies).
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    slots: Int[Array, "B K T"]
    lengths: Int[Array, "B K"]
    live: Int[Array, "B K T"]
    evicted: Bool[Array, "B K T"]
    past_until: Int[Array, "B K S"]


@struct.dataclass
class Reading:
    """The rows a query attends to.

    `page_table` and `lengths` have one row per KV head ([B, K, M]; its G query heads share it) or
    one per query head ([B, H, M]). `reads` counts the key-value entries that this costs, where it
    is not the sum of the lengths (Quest: besides, one entry a page for its two bounds).
    """

    page_table: Int[Array, "B X M"]
    lengths: Int[Array, "B X"]
    reads: Int[Array, " B"] | None = None


@struct.dataclass
class Relaxed:
    """The differentiable form of a layer's decisions.

    Attributes:
      k, v: unrotated keys and values (for DMC partially merged ones).
      bias: added (<= 0) to the scores of a key for queries beyond the window.
      decisions: hard forward and soft backward (straight-through), for the compression loss.
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    bias: Float[Array, "B K T"]
    decisions: Float[Array, "B K T"]


@struct.dataclass
class PolicyState:
    """What a policy remembers, beside the cache: leaves [B, K, ...] and leaves [N, ...]."""

    rows: Any = ()
    pages: Any = ()


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all cache policies: appends everything, reads everything, learns nothing.

    Subclasses override what differs. The class attributes say what the library must prepare.
    """

    uses_adapter: ClassVar[bool] = False  # decide() wants `adapter_logits`
    observes: ClassVar[bool] = False  # observe() wants attention weights per slot
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

    def validate(self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int):
        """Raises ConfigError if the policy cannot serve a model of this shape."""

    def groups(self, num_layers: int) -> tuple[tuple[int, int, "Policy"], ...]:
        """Returns (first layer, end layer, policy) for runs of layers that are treated alike."""
        return ((0, num_layers, self),)

    def parallel(self, *, prompt: bool) -> bool:
        """Whether the tokens of a chunk (of a prompt, or of an answer) may attend in one pass."""
        del prompt
        return True

    def slot_limit(self, page_size: int) -> int | None:
        """The most slots a row can come to hold, None if it grows with the sequence."""
        del page_size
        return None

    @property
    def read_budget(self) -> int | None:
        """Tokens that each query head selects to read; None where everything live is read."""
        return None

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
        """Builds the policy from `to_dict` data without its name; ConfigError names what is odd."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ConfigError(
                f"{cls.__name__} has no option {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        return cls(**fields)


def hard_marks(decisions: Decisions) -> Bool[Array, "B K T"]:
    """The hard decisions of a policy that makes them."""
    assert decisions.marks is not None
    return decisions.marks


def row_shape(chunk: Chunk) -> tuple[int, int, int]:
    """Returns (B, K, T) of a chunk."""
    batch, num_tokens, num_kv_heads, _ = chunk.k.shape
    return batch, num_kv_heads, num_tokens


def slot_shape(chunk: Chunk) -> tuple[int, int, int]:
    """Returns (B, K, S) with S the slots that the page table can address."""
    batch, num_kv_heads, num_pages = chunk.page_table.shape
    return batch, num_kv_heads, num_pages * chunk.page_size


def require(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def is_static_int(value: Any, least: int = 0) -> bool:
    """Whether the value is a plain integer (a bool is not) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: Any) -> bool:
    """Whether the value is a plain, finite number (a bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
