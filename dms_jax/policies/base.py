"""The contract of a cache policy: decide, write, read, observe.

Every published method answers four questions about one layer's cache:

    decide   what does a token decide?            tokens             -> decisions
    write    which slot does it take?             chunk of tokens    -> slots to write
    read     what does a query attend to?         pages, lengths     -> pages, lengths
    observe  what does attention tell the policy? queries, weights   -> state

A policy is a small frozen dataclass of hyper-parameters and pure functions on arrays. It is a
pytree, and programs take it as an ordinary argument: purely numeric fields are its leaves
(`checks.Traced`), other fields are part of its structure. So one program serves every budget.
Inside a program the leaves are arrays, so code there must not branch on them; `footprint`,
`for_length`, `kept_whole` and `to_dict` are for the host. A policy's state is a pytree carried with
the cache:

* `state.rows`: leaves [B, K, ...], one entry per row (DMS's ring, DMC's sums, TOVA's victim);
* `state.pages`: leaves [N, ...], addressed by page number (Quest's bounds, H2O's scores).

A state of several arrays is a dataclass whose fields declare the axes over which a mesh splits
them: `ROWS`, `PAGES` (`policies/values.py`), or other `sharding.axes`. A field without a
declaration is refused.

Slots. A row (one layer, sequence and KV head) is a list of `length` slots; slot s lives on the
row's page s // P at offset s % P. A policy works with slots and never with the pool. Keys are
stored after rotation, so the order of slots does not affect attention.

Chunks. The same `write` serves a decode step (T = 1) and a chunk of a prompt (T > 1). If all T
queries of a chunk attend in one pass (`parallel`), the lifetime of a key must be known before
attention, as a static window and one eviction bit per key:

    key j is visible to query i >= j  iff  i - j <= window  or  not evicted[j]

Other chunks run token by token inside the layer (write, read, observe for each), except the first
tokens of a prompt, before anything is evicted (`kept_whole`).

Cuts. A policy that `shrinks` gives prompts full attention: it appends their tokens, each chunk in
one pass, then returns the retention mask of the slots (`survivors`). After a decode step it does so
again if a cut is `due`. The kept slots are compacted in order, and the freed pages are released.
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache import Pool
from dms_jax.cache.pages import few_sizes
from dms_jax.checks import Options, Traced, kinds, traced
from dms_jax.errors import ConfigError
from dms_jax.policies.values import (
    AdapterShape,
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
    """A range of layers that a policy treats in the same way.

    Attributes:
      start, end: the first layer, and one past the last.
      policy: the policy of these layers.
      host_values: whether their values live in host memory.
    """

    start: int
    end: int
    policy: "Policy"
    host_values: bool = False


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Base of all cache policies: appends every token, reads every slot, and keeps no state.

    Subclasses override the methods in which they differ. Inside programs a policy is rebuilt from
    its fields, without `__init__` and `__post_init__`, and `Traced` fields are arrays.
    """

    name: ClassVar[str]  # the public name, equal to the name of the class
    observes_weights: ClassVar[bool] = False  # observe() needs the attention weights of each query

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.name = cls.__name__
        _register(cls)

    # -- what the library must know ---------------------------------------------------------------

    @property
    def parallel(self) -> Literal["always", "prompts", "never"]:
        """Which chunks attend in one pass: all of them, those of prompts, or none.

        If prompts are treated like generated tokens ("always", "never"), the result does not depend
        on where the prompt ends.
        """
        return "always"

    def kept_whole(self, tokens: int) -> int:
        """Returns the number of tokens that the cache of a sequence holds before any eviction.

        Even if `parallel` is "never", these tokens of a prompt attend in one pass, because nothing
        is evicted among them.

        Args:
          tokens: length of the sequence.
        """
        del tokens
        return 0

    @property
    def visible_window(self) -> int:
        """Distance up to which every key is visible, evicted or not (chunks in one pass)."""
        return 0

    @property
    def shrinks(self) -> bool:
        """Whether rows are cut: prompts get full attention, then eviction (`survivors`)."""
        return False

    @property
    def appends(self) -> bool:
        """Whether rows are append-only, and all state is a function of each page's content.

        If so, the first n whole pages of each row equal the row after n * P tokens.
        """
        return False

    def frozen_slots(
        self, rows: Any, lengths: Int[Array, "*rows"], seen: Int[Array, " B"]
    ) -> Int[Array, "*rows"] | None:
        """Returns how many of each row's first slots are never written again; None: not known.

        Sequences that continue the same tokens share the pages of these slots.

        Args:
          rows: the state of the rows (`PolicyState.rows`).
          lengths: slots in use, [..., B, K].
          seen: tokens so far.
        """
        del rows, seen
        return lengths if self.appends else None

    @property
    def can_undo(self) -> bool:
        """Whether a decode step can be taken back by restoring lengths and `state.rows`.

        So `state.pages` does not change, and the slot that a token takes depends on the tokens
        before it alone: a step with another token overwrites what the first one wrote.
        """
        return False

    def overwritten(
        self, rows: Any, seen: Int[Array, " B"], count: int
    ) -> Int[Array, "*rows count"] | None:
        """Returns the slots that each of the next `count` steps may overwrite; None if none does.

        With what they hold several steps can be taken back, if `can_undo`.

        Args:
          rows: the state of the rows (`PolicyState.rows`).
          seen: tokens so far.
          count: number of steps, at most `visible_window + 1` unless the policy appends.
        """
        del rows, seen, count
        return None

    def prefix_exact(self, seen: int, *, prompt: int, max_length: int) -> bool:
        """Whether the state of a sequence depends only on the tokens that it has seen.

        If so, continuing the sequence equals prefilling all its tokens as a new prompt. True if
        tokens of prompts and answers are treated in the same way; otherwise within the prompt
        before the cut at its end, and after that as long as nothing can have been evicted.

        Args:
          seen: tokens of the sequence so far.
          prompt: tokens of its prompt.
          max_length: the most tokens that the sequence can reach.
        """
        if self.parallel != "prompts" or seen < prompt:
            return True
        return (seen == prompt and not self.shrinks) or seen <= self.kept_whole(max_length)

    @property
    def retrofit(self) -> Retrofit:
        """The training that a model needs before it can run the policy; none by default."""
        return Retrofit()

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """Returns the layers as consecutive ranges with the same treatment."""
        return (LayerGroup(0, num_layers, self),)

    def for_length(self, tokens: int) -> "Policy":
        """Returns the policy for sequences of `tokens` tokens, with its budget in tokens."""
        return self

    def footprint(
        self, tokens: int, *, page_size: int, group: int = 1, compression_ratio: float | int = 1
    ) -> Footprint:
        """Returns the slots of a row after `tokens` tokens, and the reads of a decode step then.

        Args:
          tokens: length of the sequence.
          page_size: slots per page.
          group: query heads per KV head.
          compression_ratio: 1 / (1 - fraction of tokens evicted), for learned eviction.
        """
        return Footprint(tokens, tokens, None, reads=tokens, attended=tokens)

    # -- decide -----------------------------------------------------------------------------------

    def decide(self, tokens: Tokens) -> Decisions:
        """Returns each token's decision, computed from its projections."""
        return Decisions()

    def borrowed(self, group: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """Returns the neurons of a KV head that carry decisions, each as (head, dimension).

        They take no part in attention. Heads 0 to `group` - 1 are its query heads; head `group` is
        its key.
        """
        return ()

    @final  # decode steps pass `borrowed` to a kernel instead of calling this
    def clear_borrowed(
        self, q: Float[Array, "B T H D"], k: Float[Array, "B S K D"], scale: Any = 0.0
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B S K D"]]:
        """Multiplies the neurons that `borrowed` names by `scale`.

        Applied before rotation, which would mix them into the other dimension of their plane, and
        again after rotation, which mixes that dimension into them.
        """
        num_kv_heads, head_dim = k.shape[2:]
        group = q.shape[2] // num_kv_heads
        borrowed = np.zeros((group + 1, head_dim), bool)
        for head, dim in self.borrowed(group, head_dim):
            borrowed[head, dim] = True

        def scaled(x, which):
            return jnp.where(which, x * jnp.asarray(scale, x.dtype), x) if which.any() else x

        return scaled(q, np.tile(borrowed[:-1], (num_kv_heads, 1))), scaled(k, borrowed[-1])

    # -- write ------------------------------------------------------------------------------------

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the state of one layer's empty rows [B, K, ...] and of empty pages [N, ...]."""
        return PolicyState()

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Rewrites keys and values before they are rotated and stored (partial accumulation)."""
        return state, chunk

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Returns the slots for the chunk's tokens. Appends by default."""
        live = chunk.lengths[..., None] + jnp.cumsum(chunk.valid, -1, dtype=jnp.int32)
        return state, place(chunk, live - 1, live)

    def written(
        self, state: PolicyState, chunk: Chunk, placement: Placement, pool: Pool
    ) -> PolicyState:
        """Updates the state of slots and pages after the chunk was written to the pool."""
        return state

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Returns which keys of whole sequences are hidden from queries beyond the window.

        These are the hard decisions of `write`, without a cache, for policies that are always
        parallel.
        """
        return jnp.zeros_like(chunk.valid)

    # -- read -------------------------------------------------------------------------------------

    def read(
        self, state: PolicyState, q: Float[Array, "B H D"], chunk: Chunk, placement: Placement
    ) -> Reading:
        """Chooses the pages that a query attends to. All live slots by default."""
        return Reading(chunk.page_table, placement.lengths)

    # -- observe ----------------------------------------------------------------------------------

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Updates the state from attention: of one query, or of all queries of a chunk at once."""
        return state

    def due(
        self, state: PolicyState, lengths: Int[Array, "B K"], chunk: Chunk
    ) -> Bool[Array, " B"] | None:
        """Returns which sequences must be cut after a decode step; None for never."""
        return None

    def survivors(
        self, state: PolicyState, chunk: Chunk, rows: Rows, q: Float[Array, "B T H D"] | None
    ) -> Bool[Array, "B K S"]:
        """Returns the retention mask of a cut. The kept slots are compacted in order.

        Args:
          state: the policy's state.
          chunk: the most recent tokens.
          rows: the contents of the cache, including the chunk.
          q: the chunk's rotated queries; None after a step.
        """
        return rows.live

    # -- train ------------------------------------------------------------------------------------

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Returns the differentiable form of the decisions, given logistic noise."""
        raise ConfigError(f"{self.name} has no trainable form; retrofit with DMS.")

    def predictions(self, decisions: Decisions) -> Float[Array, "B K T"]:
        """Returns the policy's prediction for each key, to be compared with its importance.

        See `Retrofit.supervision`: the logarithm of its importance, or the logit of its eviction.
        """
        raise ConfigError(f"{self.name} learns nothing from attention; use DMS, KVzap or KVpop.")

    # -- as data ----------------------------------------------------------------------------------

    def bound(self, field: str) -> int:
        """Returns a bounded field's value rounded up to one of `few_sizes`; static in programs."""
        value = getattr(self, field)
        if isinstance(value, int) and value:  # 0 is a placeholder for any number (`make_cache`)
            return few_sizes(value)
        return self.__dict__["_bounds"][field]

    def replaced(self, **changes: Any) -> "Policy":
        """Returns the policy with some fields replaced, unchecked; also inside programs."""
        new = copy.copy(self)
        new.__dict__.update(changes)
        bounds = self.__dict__.get("_bounds", {})
        new.__dict__["_bounds"] = {k: v for k, v in bounds.items() if k not in changes}
        return new

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as JSON data: its name and every field (`policies.from_dict`)."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"name": self.name} | {
            name: value.to_dict() if isinstance(value, Policy) else value
            for name, value in fields.items()
        }


def delegate[P: type[Policy]](to: str, *names: str) -> Callable[[P], P]:
    """Decorates a policy whose methods and properties of these names are those of its field `to`.

    Subclasses may override them and reach the others through `super`.
    """

    def decorate(cls: P) -> P:
        for name in names:
            own = property(operator.attrgetter(f"{to}.{name}"), doc=getattr(cls, name).__doc__)
            setattr(cls, name, own)
        return cls

    return decorate


# -- as a pytree ----------------------------------------------------------------------------------


@functools.cache
def _fields(cls: type[Policy]) -> tuple[dict[str, Traced | None], tuple[str, ...]]:
    """Returns the child fields, each with its mark, and the names of the other fields."""
    children: dict[str, Traced | None] = {}
    static: list[str] = []
    for name, kind in kinds(cls).items():
        is_policy = isinstance(kind, type) and issubclass(kind, Policy)
        if (mark := traced(kind)) is not None or is_policy:
            children[name] = mark
        else:
            static.append(name)
    return children, tuple(static)


def _flatten(policy: Policy) -> tuple[tuple[Any, ...], Any]:
    children, static = _fields(type(policy))

    def child(name: str, mark: Traced | None) -> Any:
        value = getattr(policy, name)
        known = isinstance(value, int | float | str)  # not a program's argument
        return mark.leaf(value) if mark is not None and known else value

    bounds = tuple(
        (name, policy.bound(name)) for name, mark in children.items() if mark and mark.bounded
    )
    fixed = tuple(getattr(policy, name) for name in static)
    return tuple(child(*each) for each in children.items()), (fixed, bounds)


def _unflatten(cls: type[Policy], structure: Any, values: Any) -> Policy:
    """Builds a policy from its parts, unchecked, because inside programs they are not numbers."""
    children, static = _fields(cls)
    fixed, bounds = structure
    policy = object.__new__(cls)
    policy.__dict__.update(zip(static, fixed, strict=True), _bounds=dict(bounds))
    for (name, mark), value in zip(children.items(), values, strict=True):
        number = mark.number if mark is not None else None
        value = value.item() if isinstance(value, np.generic) else value
        policy.__dict__[name] = value if number is None else number(value)
    return policy


def _register(cls: type[Policy]) -> None:
    def with_keys(policy: Policy) -> tuple[tuple[Any, ...], Any]:
        values, structure = _flatten(policy)
        names = map(jax.tree_util.GetAttrKey, _fields(cls)[0])
        return tuple(zip(names, values, strict=True)), structure

    build = functools.partial(_unflatten, cls)
    jax.tree_util.register_pytree_with_keys(cls, with_keys, build, _flatten)


_register(Policy)


LEARN_FIRST = (
    "Train the model for it (dms_jax.retrofit; dms-jax retrofit takes DMS, DMC and FixedPooling), "
    "give an `adapter` that was trained for it, or use a policy that needs no training, such as "
    "TOVA."
)


def check_adapter(policy: Policy, adapter: AdapterShape | None) -> None:
    """Raises ConfigError if a policy reads an adapter that the model does not have."""
    needed = policy.retrofit.adapter
    if needed is None or needed == adapter:
        return
    if adapter is None:
        raise ConfigError(
            f"{policy.name} reads its decisions from an adapter, which this model does not have. "
            f"{LEARN_FIRST}"
        )
    raise ConfigError(
        f"The model's adapter was trained for another policy, and {policy.name} cannot use it. "
        "Leave the policy out to run the one it was trained for, or give one that needs no "
        "training, such as TOVA."
    )


def hard_marks(decisions: Decisions) -> Bool[Array, "B K T"]:
    """Returns the hard decisions of a policy that makes them."""
    assert decisions.marks is not None
    return decisions.marks
