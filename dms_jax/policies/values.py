"""The values that a model and its cache policy exchange.

Shapes: B sequences, T tokens of a chunk, H query heads, K KV heads, D head dim, M pages per row,
P slots per page, S = M * P slots, N pages of the pool.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.sharding import Axes, axes
from pallas_kernels import DecodePlan

# An integer, or an integer argument of a program.
TracedInt = int | Int[Array, ""]
FOREVER = 2**30  # later than any query; additions do not overflow int32
NOT_STORED = -1  # the slot of a token that is evicted before the end of its chunk

# The axes over which arrays are sharded, declared with each field.
SEQUENCES = axes("sequences")
ROWS = axes("sequences", "kv_heads")
HEADS = axes("sequences", "tokens", "heads")
KV_HEADS = axes("sequences", "tokens", "kv_heads")
PAGES = axes("pages")


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Tokens:
    """T tokens of one layer before rotation, after the norms of queries and keys.

    Attributes:
      q, k, v: queries, keys and values.
      positions: token positions, from 0 at the start of each sequence (or packed document).
      layer: index of the layer, among those whose cache grows.
      adapter_logits: decision logits of the layer's adapter, for a policy that reads one.
      late_logits: the adapter's `late` output, about the token that leaves the window.
    """

    q: Float[Array, "B T H D"] = struct.field(metadata=HEADS)
    k: Float[Array, "B T K D"] = struct.field(metadata=KV_HEADS)
    v: Float[Array, "B T K D"] = struct.field(metadata=KV_HEADS)
    positions: Int[Array, "B T"] = struct.field(metadata=SEQUENCES)
    layer: Int[Array, ""] = struct.field(metadata=axes())
    adapter_logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    late_logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Decisions:
    """The decisions of the tokens of one layer.

    Attributes:
      logits: decision logits, positive for yes; None if the policy learns no decisions.
      marks: hard decisions (evict or merge); None if the policy decides nothing from a token.
      importance: importance weight of each token (DMC's omega), or None.
      late: a token's contribution to the score of the token that it pushes out of the window
        (KVpop).
    """

    logits: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    marks: Bool[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    importance: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)
    late: Float[Array, "B K T"] | None = struct.field(default=None, metadata=ROWS)


@dataclasses.dataclass(frozen=True)
class Static:
    """Properties of a chunk that are static in its program.

    Attributes:
      page_size: slots per page.
      scale: factor on the dot products of attention.
      soft_cap: c, if attention scores s become c tanh(s / c); None without a cap.
      num_layers: number of layers whose cache grows (the layers that policies see).
      frequencies: rotation frequencies in radians per position, one for each of the D/2 planes.
      head_axis: mesh axes over which the KV heads are sharded, if any; a mean over a layer's heads
        needs a `jax.lax.pmean` over them.
      one_pass: whether the chunk's tokens attend in one pass.
    """

    page_size: int = 1
    scale: float = 1.0
    soft_cap: float | None = None
    num_layers: int = 1
    frequencies: tuple[float, ...] = ()
    head_axis: Axes | None = None
    one_pass: bool = False


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Chunk:
    """T new tokens of every row of one layer; tokens from index `count` on are padding.

    Attributes:
      tokens: queries, keys and values before rotation (which clears borrowed neurons).
      decisions: the tokens' decisions, from `Policy.decide`.
      rotation: cos and sin of the tokens' positions.
      count: number of tokens of each sequence that are not padding.
      page_table: pages of each row.
      lengths: slots in use in each row before the chunk.
      max_lengths: maximum length of each sequence: its prompt and its longest answer.
      ends_prompt: whether the chunk's last token is the last one of its prompt.
      plan: how a GPU's programs share the rows of a step (`pallas_kernels.decode_plan`), for rows
        with one more slot each; None to plan on demand.
      sinks: the layer's sink logit of each query head, which takes part in its softmax; None for
        none.
      key_center: what a cache in 8 bits subtracts from the layer's rotated keys (`quantization`);
        None for nothing.
      static: properties that are known when the program is traced.
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
    plan: DecodePlan | None = None
    sinks: Float[Array, "K G"] | None = struct.field(default=None, metadata=axes("kv_heads"))
    key_center: Float[Array, "K D"] | None = struct.field(default=None, metadata=axes("kv_heads"))
    static: Static = struct.field(pytree_node=False, default=Static())

    @property
    def first(self) -> Int[Array, " B"]:
        """Position of the chunk's first token, equal to the number of tokens before it."""
        return self.tokens.positions[:, 0]

    @property
    def newest(self) -> Int[Array, " B"]:
        """Position of the chunk's last token that is not padding."""
        return self.first + jnp.maximum(self.count, 1) - 1

    @property
    def valid(self) -> Bool[Array, "B K T"]:
        """Whether each token of each row is not padding."""
        batch, num_tokens, num_kv_heads, _ = self.tokens.k.shape
        valid = jnp.arange(num_tokens) < self.count[:, None]
        return jnp.broadcast_to(valid[:, None], (batch, num_kv_heads, num_tokens))

    @property
    def num_slots(self) -> int:
        """Number of slots that a row's page table can address (S)."""
        return self.page_table.shape[-1] * self.static.page_size


@struct.dataclass
class Placement:
    """The slots of a chunk's tokens, and the keys that its queries see.

    Attributes:
      slots: the slot of each token; NOT_STORED if it is evicted within the chunk.
      live: number of slots in use right after each token.
      evicted: whether the key is hidden from queries beyond the window (chunks in one pass).
      past_until: index of the chunk's last query that sees each slot in use before the chunk;
        FOREVER for slots that are kept (chunks in one pass).
    """

    slots: Int[Array, "B K T"]
    live: Int[Array, "B K T"]
    evicted: Bool[Array, "B K T"]
    past_until: Int[Array, "B K S"]

    @functools.cached_property  # one array object: a reading of all slots is recognised by it
    def lengths(self) -> Int[Array, "B K"]:
        """Number of slots in use in each row after the chunk."""
        return self.live[..., -1]


def place(chunk: Chunk, slots: Array, live: Array) -> Placement:
    """Returns the placement of tokens that hide no key from any query.

    Args:
      chunk: the new tokens.
      slots: slot of each token; ignored for padding, which is not stored.
      live: number of slots in use after each token.
    """
    return Placement(
        slots=jnp.where(chunk.valid, slots, NOT_STORED),
        live=live,
        evicted=jnp.zeros_like(chunk.valid),
        past_until=jnp.full((*chunk.lengths.shape, chunk.num_slots), FOREVER, jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class Fetch:
    """The number of values, of the largest weights, that each query head fetches.

    Attributes:
      top: the most values that a query head fetches, unless `counts` is given.
      counts: that number per sequence, if it differs between sequences.
    """

    top: int
    counts: Int[Array, "B 1"] | None = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """The rows that a query attends to.

    `page_table` and `lengths` have one row per KV head ([B, K, M]; its G query heads share it) or
    one per query head ([B, H, M]). `reads` counts the key-value entries read, if it is not the sum
    of the lengths (Quest also reads two bounds per page, counted as one entry). `fetch` selects the
    values to read, if not all.
    """

    page_table: Int[Array, "B X M"]
    lengths: Int[Array, "B X"]
    reads: Int[Array, " B"] | None = None
    fetch: Fetch | None = None


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Rows:
    """Keys and values of a layer's rows by slot; zeros beyond a row's length."""

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    lengths: Int[Array, "B K"]

    @property
    def live(self) -> Bool[Array, "B K S"]:
        """Whether each slot is in use."""
        return jnp.arange(self.k.shape[2]) < self.lengths[..., None]


@dataclasses.dataclass(frozen=True)
class Observation:
    """Results of attention over a chunk, from which a policy updates its state.

    Attributes:
      q: the chunk's rotated queries.
      weights: attention weights of one query over the slots, for policies that ask for them
        (`observes_weights`); None for a one-pass chunk of a prompt.
      rows: function that gathers the contents of the rows, including the chunk.
      one_query: whether one query attended; False for a one-pass chunk of a prompt.
    """

    q: Float[Array, "B T H D"]
    weights: Float[Array, "B K G S"] | None
    rows: Callable[[], Rows]
    one_query: bool = False


@struct.dataclass
class Relaxed:
    """The differentiable form of a layer's decisions.

    Attributes:
      k, v: unrotated keys and values (partially accumulated for DMC).
      bias: bias (<= 0) on the scores of a key for queries beyond the window.
      decisions: straight-through decisions (hard forward, soft backward) for the compression loss.
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    bias: Float[Array, "B K T"]
    decisions: Float[Array, "B K T"]


@struct.dataclass
class PolicyState:
    """A policy's state beside the cache: leaves [B, K, ...] by row and leaves [N, ...] by page.

    A dataclass state declares the sharding axes of its fields.
    """

    rows: Any = struct.field(default=(), metadata=ROWS)
    pages: Any = struct.field(default=(), metadata=PAGES)


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Extended:
    """The row state of a base policy, and beside it that of a subclass.

    The base reads and replaces its own part by `base_rows` and `with_base_rows`, so a subclass may
    extend it or not.
    """

    base: Any = struct.field(metadata=ROWS)
    own: Any = struct.field(default=(), metadata=ROWS)


def base_rows(rows: Any) -> Any:
    """Returns a base policy's part of the row state."""
    return rows.base if isinstance(rows, Extended) else rows


def with_base_rows(rows: Any, base: Any) -> Any:
    """Returns the row state with the base policy's part replaced."""
    return dataclasses.replace(rows, base=base) if isinstance(rows, Extended) else base


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """The sizes from which a policy initializes its state.

    Attributes:
      num_sequences, num_kv_heads: B and K, the rows of one layer.
      group: number of query heads per KV head (G).
      head_dim: dimension of a key or value (D).
      dtype: floating-point type of the cache.
      num_pages, page_size: N and P, the size of the pool.
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
        """Shape of a number per row, (B, K)."""
        return self.num_sequences, self.num_kv_heads

    @property
    def pages(self) -> tuple[int, int]:
        """Shape of a number per slot of the pool, (N, P)."""
        return self.num_pages, self.page_size

    @property
    def wide(self) -> jnp.dtype:
        """Type of accumulators: the cache's dtype, but at least float32."""
        return jnp.promote_types(self.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The slots of a row at the end, and the entries that a decode step then reads.

    Attributes:
      expected: slots in use at the end, averaged over the rows and layers.
      at_least: lower bound on the slots in use of every row at the end.
      at_most: upper bound on the slots of a row, after its prompt was cut if the policy `shrinks`;
        None if a row can grow with the sequence.
      reads: key-value entries that a step reads for the row and its group of query heads.
      attended: key-value entries that each query head attends to.
    """

    expected: float | int
    at_least: int
    at_most: int | None
    reads: float | int
    attended: float | int


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """The size of the adapter from which a policy reads its decisions.

    Attributes:
      hidden: hidden units between the residual stream and the logits; 0 for a linear adapter.
      bias: whether the logits have a bias although the model's projections have none.
      late: whether each token has a second logit, for the token that it pushes out of the window.
    """

    hidden: int = 0
    bias: bool = False
    late: bool = False


@dataclasses.dataclass(frozen=True)
class FutureAttention:
    """The training target of a policy's logits, from attention (`policies/importance.py`).

    Attributes:
      window: distance up to which queries do not count, because they always see the key.
      learns: the target: the importance of each key, or the set of least important keys.
      reduction: whether the largest weight of a key counts, or the mean.
      sinks: number of first tokens of a document exempt from their measured importance: they are
        not trained on, or (`least_important`) count as the most important ones.
    """

    window: int
    learns: Literal["importance", "least_important"] = "importance"
    reduction: Literal["max", "mean"] = "max"
    sinks: TracedInt = 0


@dataclasses.dataclass(frozen=True)
class Retrofit:
    """The training that a model needs before it can run a policy.

    Attributes:
      possible: whether the policy has a differentiable form (`Policy.relax`).
      decisions: description of the decisions that the model learns; None if it learns none.
        Budgets, windows and thresholds may change after training; this description may not.
      borrowed_neurons: description of the neurons that carry decisions instead of taking part in
        attention; None for none. It must be the same at inference as in training.
      adapter: the adapter with the decisions; None without one.
      supervision: the logits' target in a stage "supervise"; None if unsupported.
    """

    possible: bool = False
    decisions: str | None = None
    borrowed_neurons: str | None = None
    adapter: AdapterShape | None = None
    supervision: FutureAttention | None = None

    @property
    def needed(self) -> bool:
        """Whether the policy requires a model trained for it."""
        return self.decisions is not None

    @property
    def trainable(self) -> bool:
        """Whether a model can be trained for the policy in some way."""
        return self.possible or self.supervision is not None
