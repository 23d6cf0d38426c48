"""What passes between a model and its cache policy: the arrays of one layer.

Shapes: B sequences, T tokens of a chunk, H query heads, K KV heads, D head dim, M pages a row, P
tokens a page, S = M * P slots, N pages of the pool.
"""

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
PAGES = axes("pages")


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

    logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    marks: Bool[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    importance: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Chunk:
    """T new tokens of every row of one layer. Tokens at and beyond `count` are padding.

    Borrowed neurons are already zero. Keys are unrotated in `transform` and `relax`, rotated in
    `write` and `observe`.

    Attributes:
      queries: unrotated queries, for policies that ask for them (`remembers`).
      horizon: tokens that each sequence can come to, its prompt and its longest answer.
      ends_prompt: whether the chunk's last token is the last one of its prompt.
      layer: number of the layer, of `num_layers`.
      future: mean cos and sin of the `Policy.future_positions` positions after each token.
    """

    k: Float[Array, "B T K D"] = struct.field(metadata=axes("sequences", "tokens", "kv_heads"))
    v: Float[Array, "B T K D"] = struct.field(metadata=axes("sequences", "tokens", "kv_heads"))
    decisions: Decisions
    positions: Int[Array, "B T"] = struct.field(metadata=SEQUENCES)
    count: Int[Array, " B"] = struct.field(metadata=SEQUENCES)
    page_table: Int[Array, "B K M"] = struct.field(metadata=ROWS)
    lengths: Int[Array, "B K"] = struct.field(metadata=ROWS)
    page_size: int = struct.field(pytree_node=False)
    queries: Float[Array, "B T H D"] | None = struct.field(
        default=None, metadata=axes("sequences", "tokens", "heads")
    )
    horizon: Int[Array, " B"] | None = struct.field(default=None, metadata=SEQUENCES)
    ends_prompt: Bool[Array, " B"] | None = struct.field(default=None, metadata=SEQUENCES)
    layer: Int[Array, ""] | None = struct.field(default=None, metadata=axes())
    future: tuple[Float[Array, "B T half"], Float[Array, "B T half"]] | None = struct.field(
        default=None, metadata=SEQUENCES
    )
    num_layers: int = struct.field(pytree_node=False, default=1)

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
    is not the sum of the lengths (Quest: besides, one entry a page for its two bounds). `fetches`
    is how many values each query head of a sequence fetches, where sequences differ in it.
    """

    page_table: Int[Array, "B X M"]
    lengths: Int[Array, "B X"]
    reads: Int[Array, " B"] | None = None
    fetches: Int[Array, "B 1"] | None = None


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


def row_shape(chunk: Chunk) -> tuple[int, int, int]:
    """Returns (B, K, T) of a chunk."""
    batch, num_tokens, num_kv_heads, _ = chunk.k.shape
    return batch, num_kv_heads, num_tokens


def slot_shape(chunk: Chunk) -> tuple[int, int, int]:
    """Returns (B, K, S) with S the slots that the page table can address."""
    batch, num_kv_heads, num_pages = chunk.page_table.shape
    return batch, num_kv_heads, num_pages * chunk.page_size
