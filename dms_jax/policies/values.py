"""What passes between a model and its cache policy.

Shapes: B sequences, T tokens of a chunk, H query heads, K KV heads, D head dim, M pages a row, P
tokens a page, S = M * P slots, N pages of the pool.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.sharding import axes

FOREVER = 2**30  # later than any query: int32, with room for sums
NOT_STORED = -1  # the slot of a token that is gone before the end of its chunk

# The axes over which arrays are split, declared beside each field.
SEQUENCES = axes("sequences")
ROWS = axes("sequences", "kv_heads")
HEADS = axes("sequences", "tokens", "heads")
KV_HEADS = axes("sequences", "tokens", "kv_heads")
PAGES = axes("pages")


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Tokens:
    """T tokens of one layer before rotation, after the norms of queries and keys.

    Attributes:
      q, k, v: queries, keys and values.
      positions: from 0 at the start of each sequence (or packed document).
      layer: number of the layer.
      adapter_logits: decision logits of the layer's adapter, for a policy that reads one.
    """

    q: Float[Array, "B T H D"] = struct.field(metadata=HEADS)
    k: Float[Array, "B T K D"] = struct.field(metadata=KV_HEADS)
    v: Float[Array, "B T K D"] = struct.field(metadata=KV_HEADS)
    positions: Int[Array, "B T"] = struct.field(metadata=SEQUENCES)
    layer: Int[Array, ""] = struct.field(metadata=axes())
    adapter_logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Decisions:
    """What the tokens of one layer say.

    Attributes:
      logits: decision logit per KV head, positive for yes; None if the policy learns nothing.
      marks: the hard decisions; None if the policy decides nothing from a token.
      importance: importance weight of each token (DMC's omega), or None.
    """

    logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    marks: Bool[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    importance: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)


@dataclasses.dataclass(frozen=True)
class Static:
    """What is known of a chunk when its program is traced.

    Attributes:
      page_size: slots a page.
      scale: factor on the dot products of attention.
      num_layers: layers of the model.
      frequencies: radians by which one position turns each plane of a key, D/2 of them.
      head_axis: mesh axis over which the KV heads are split, if any: a mean over the heads of a
        layer needs a `jax.lax.pmean` over it.
    """

    page_size: int = 1
    scale: float = 1.0
    num_layers: int = 1
    frequencies: tuple[float, ...] = ()
    head_axis: str | None = None


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Chunk:
    """T new tokens of every row of one layer. Tokens at and beyond `count` are padding.

    Attributes:
      tokens: queries, keys and values before rotation; borrowed neurons are zero.
      decisions: what `decide` said of the tokens.
      rotation: cos and sin of the tokens' positions.
      count: tokens of each sequence that are not padding.
      page_table: pages of each row.
      lengths: slots that each row used before the chunk.
      max_lengths: tokens that each sequence can come to, its prompt and its longest answer.
      ends_prompt: whether the chunk's last token is the last one of its prompt.
      static: what is no array.
    """

    tokens: Tokens
    decisions: Decisions
    rotation: tuple[Float[Array, "B T half"], Float[Array, "B T half"]] = struct.field(
        metadata=SEQUENCES
    )
    count: Int[Array, " B"] = struct.field(metadata=SEQUENCES)
    page_table: Int[Array, "B K M"] = struct.field(metadata=ROWS)
    lengths: Int[Array, "B K"] = struct.field(metadata=ROWS)
    max_lengths: Int[Array, " B"] | None = struct.field(default=None, metadata=SEQUENCES)
    ends_prompt: Bool[Array, " B"] | None = struct.field(default=None, metadata=SEQUENCES)
    static: Static = struct.field(pytree_node=False, default=Static())

    @property
    def first(self) -> Int[Array, " B"]:
        """Position of the chunk's first token, which is how many tokens came before it."""
        return self.tokens.positions[:, 0]

    @property
    def newest(self) -> Int[Array, " B"]:
        """Position of the chunk's last token that is not padding."""
        return self.first + jnp.maximum(self.count, 1) - 1

    @property
    def valid(self) -> Bool[Array, "B K T"]:
        """Which tokens of each row are not padding."""
        batch, num_tokens, num_kv_heads, _ = self.tokens.k.shape
        valid = jnp.arange(num_tokens) < self.count[:, None]
        return jnp.broadcast_to(valid[:, None], (batch, num_kv_heads, num_tokens))

    @property
    def num_slots(self) -> int:
        """S, the slots that a row's page table can address."""
        return self.page_table.shape[-1] * self.static.page_size


@struct.dataclass
class Placement:
    """How a chunk enters the cache.

    Attributes:
      slots: the slot each token is written to, NOT_STORED if it is gone by the chunk's end.
      live: slots in use right after each token.
      evicted: whether the key is hidden from queries beyond the window (chunks in one pass).
      past_until: the last query of the chunk (0, 1, ...) that still sees each slot that was in
        use before the chunk; FOREVER for those that stay (chunks in one pass).
    """

    slots: Int[Array, "B K T"]
    live: Int[Array, "B K T"]
    evicted: Bool[Array, "B K T"]
    past_until: Int[Array, "B K S"]

    @property
    def lengths(self) -> Int[Array, "B K"]:
        """Slots in use after the chunk."""
        return self.live[..., -1]


def place(chunk: Chunk, slots: Array, live: Array) -> Placement:
    """The placement of tokens that hide no key from any query.

    Args:
      chunk: the tokens.
      slots: slot of each token; padding is not stored whatever it says.
      live: slots in use after each token.
    """
    return Placement(
        slots=jnp.where(chunk.valid, slots, NOT_STORED),
        live=live,
        evicted=jnp.zeros_like(chunk.valid),
        past_until=jnp.full((*chunk.lengths.shape, chunk.num_slots), FOREVER, jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Which values each query head fetches by its attention weights, in place of reading them all.

    Attributes:
      top: the most values that any query head fetches.
      counts: how many each sequence fetches, where they differ in it.
      renormalize: whether the weights of the fetched values are made to sum to one.
    """

    top: int
    counts: Int[Array, "B 1"] | None = None
    renormalize: bool = False


@dataclasses.dataclass(frozen=True)
class Reading:
    """The rows a query attends to.

    `page_table` and `lengths` have one row per KV head ([B, K, M]; its G query heads share it) or
    one per query head ([B, H, M]). `reads` counts the key-value entries that this costs, where it
    is not the sum of the lengths (Quest: besides, one entry a page for its two bounds). `fetch`
    says which values are read where not all are.
    """

    page_table: Int[Array, "B X M"]
    lengths: Int[Array, "B X"]
    reads: Int[Array, " B"] | None = None
    fetch: Fetch | None = None


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Rows:
    """What the rows of a layer hold, slot by slot; zeros beyond a row's length."""

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    lengths: Int[Array, "B K"]

    @property
    def live(self) -> Bool[Array, "B K S"]:
        """Which slots are in use."""
        return jnp.arange(self.k.shape[2]) < self.lengths[..., None]


@dataclasses.dataclass(frozen=True)
class Observation:
    """What attention over a chunk leaves for its policy to learn from.

    Attributes:
      q: the chunk's rotated queries.
      weights: attention weights of one query over the slots, for policies that ask for them
        (`observes_weights`); None for a chunk of a prompt that was read in one pass.
      rows: gathers what the rows hold, the chunk included.
    """

    q: Float[Array, "B T H D"]
    weights: Float[Array, "B K G S"] | None
    rows: Callable[[], Rows]


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
    """What a policy remembers, beside the cache: leaves [B, K, ...] and leaves [N, ...].

    A state that is a dataclass declares the axes of its own fields.
    """

    rows: Any = struct.field(default=(), metadata=ROWS)
    pages: Any = struct.field(default=(), metadata=PAGES)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes from which a policy makes its empty state.

    Attributes:
      num_sequences, num_kv_heads: B and K, the rows of one layer.
      group: G, query heads of each KV head.
      head_dim: D.
      dtype: dtype of the cache.
      num_pages, page_size: N and P of the pool.
    """

    num_sequences: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    group: int = 1
    num_pages: int = 0
    page_size: int = 1

    @property
    def rows(self) -> tuple[int, int]:
        """(B, K)."""
        return self.num_sequences, self.num_kv_heads

    @property
    def pages(self) -> tuple[int, int]:
        """(N, P)."""
        return self.num_pages, self.page_size

    @property
    def wide(self) -> jnp.dtype:
        """The dtype of sums: that of the cache, and float32 at least."""
        return jnp.promote_types(self.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one row comes to hold, and what a decode step then reads of it.

    Attributes:
      expected: slots in use at the end, averaged over the rows and layers.
      at_least: slots that every row is sure to hold at the end.
      at_most: slots that no row exceeds, None if it grows with the sequence; of a policy that
        `shrinks`, once its prompt was cut.
      reads: key-value entries that a step reads for the row and its group of query heads.
      attended: entries that each query head attends to.
    """

    expected: float | int
    at_least: int
    at_most: int | None
    reads: float | int
    attended: float | int


@dataclasses.dataclass(frozen=True)
class Retrofit:
    """What a model must be trained for before a policy means anything on it.

    Attributes:
      possible: whether the policy has a differentiable form (`Policy.relax`).
      decisions: what the model learns its decisions to mean, in words; None where it learns none.
        Budgets, windows and thresholds may change after training; what this says may not.
      borrowed_neurons: which neurons carry the decisions and take no part in attention; None for
        none. A model works with exactly the neurons out of attention that it was trained with.
      adapter: whether decisions are read from an adapter.
    """

    possible: bool = False
    decisions: str | None = None
    borrowed_neurons: str | None = None
    adapter: bool = False

    @property
    def needed(self) -> bool:
        """Whether the policy means nothing on a model that was not trained for it."""
        return self.decisions is not None
