"""The loop over the layers of a model, which are of a few repeating kinds.

Layers are stacked, and the loop runs over the shortest repeating group of kinds, so that compile
time does not grow with depth. A policy may treat some layers differently (the first two of Quest),
and so does a model: sliding layers keep their window under any policy, while the cache of other
layers grows.

    layers of Gemma 3    s s s s s f  s s s s s f  s s s s s f  s s
    stretches            one of three turns of six layers, and one of one turn of two
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from dms_jax.checks import require
from dms_jax.config import LayerKind, ModelConfig
from dms_jax.policies.base import LayerGroup, Policy
from dms_jax.policies.streaming import StreamingLLM
from dms_jax.policies.values import ROWS
from dms_jax.policies.vanilla import Vanilla


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class ByCache:
    """Values of layers by kind of cache, each stacked over the layers of its kind.

    A model without windows uses the `growing` part directly, not a pair.

    Attributes:
      growing: values of the layers whose cache grows.
      windowed: values of the layers with a window.
    """

    growing: Any = struct.field(default=None, metadata=ROWS)
    windowed: Any = struct.field(default=None, metadata=ROWS)


@dataclasses.dataclass(frozen=True)
class Role:
    """How a layer is run.

    Attributes:
      group: the policy, and the layers that it treats like this one.
      kind: its attention span and rotation.
    """

    group: LayerGroup
    kind: LayerKind

    @property
    def policy(self) -> Policy:
        """The policy of the layer's rows."""
        return self.group.policy

    @property
    def windowed(self) -> bool:
        """Whether the layer keeps a window."""
        return self.kind.window is not None


def check_layers(config: ModelConfig, policy: Policy) -> None:
    """Raises ConfigError if a policy has no layers to manage in a model, or cannot manage them.

    Sliding layers keep their window under any policy.
    """
    if config.window is None:
        return
    require(
        config.num_full_layers > 0 or type(policy) is Vanilla,
        f"Every layer of this model keeps a window of {config.window} tokens, and the cache grows "
        f"in none: there is nothing for {policy.name} to compress. Run it with Vanilla().",
    )
    require(
        not any(group.host_values for group in policy.groups(config.num_full_layers)),
        f"{policy.name}: values in host memory are not supported for models with sliding windows; "
        "give the policy values='device'.",
    )


def window_policy(config: ModelConfig) -> Policy:
    """Returns the policy of sliding layers: exactly the last tokens, in a ring."""
    assert config.window is not None
    return StreamingLLM(budget=config.window, sinks=0)


def roles(config: ModelConfig, policy: Policy) -> list[Role]:
    """Returns the role of each layer. The policy's layers are those whose cache grows."""
    kinds, windowed = config.kinds, config.windowed
    groups = policy.groups(config.num_full_layers)
    of_window = LayerGroup(0, 0, window_policy(config)) if any(windowed) else None
    made: dict[Any, Role] = {}  # one object for all layers with the same role
    found, number = [], 0
    for layer in range(config.num_layers):
        group, kind = of_window, kinds[layer % len(kinds)]
        if not windowed[layer]:
            group = next(group for group in groups if number < group.end)
            number += 1
        assert group is not None
        found.append(made.setdefault((id(group), kind), Role(group, kind)))
    return found


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive layers: a repeated group of roles.

    Attributes:
      start: the first layer.
      group: the roles of the layers in one turn.
      turns: number of repetitions.
    """

    start: int
    group: tuple[Role, ...]
    turns: int

    @property
    def end(self) -> int:
        """The layer after the last."""
        return self.start + len(self.group) * self.turns


def stretches(each: Sequence[Role], period: int) -> list[Stretch]:
    """Returns the layers as stretches with turns of `period` layers, fewer at the end."""
    found, start = [], 0
    while start < len(each):
        size = min(period, len(each) - start)
        end = start + size
        while end + size <= len(each) and all(
            each[i] is each[i - size] for i in range(end, end + size)
        ):
            end += size
        found.append(Stretch(start, tuple(each[start : start + size]), (end - start) // size))
        start = end
    return found


# (carry, layer, index, role, its slice of `per_layer`) -> (carry, result)
Body = Callable[[Any, Any, Any, Role, Any], tuple[Any, Any]]


def scan_layers(
    body: Body,
    carry: Any,
    layers: Any,
    each: Sequence[Stretch],
    per_layer: Any,
    *,
    unroll: bool = False,
    block: int = 1,
    gradients: bool = False,
) -> tuple[Any, Any]:
    """Runs `body` over the layers; returns the carry and the stacked results.

    Args:
      body: the pass through one layer.
      carry: the first layer's carry.
      layers: the layers' parameters, stacked.
      each: the layers, as stretches.
      per_layer: arrays [L, ...], and `ByCache` with one array for each kind of cache. Each layer
        gets its slice; results are stacked the same way.
      unroll: whether the whole loop is unrolled.
      block: the most layers in a turn of the loop, unless a group of roles is longer; the turns of
        a stretch have one length.
      gradients: whether parameters have gradients, which are then stacked by turns.

    A single stretch of turns of one layer passes its parameters to the scan, whose transpose stacks
    their gradients. Otherwise the stacks of matrices are indexed. Slicing would copy the weights,
    and so would an index read from an array; if the index follows from the number of the turn,
    XLA's matrix products read the stack in place (saves 8 ms per step of Llama-3.1-8B on an H200).
    A layer's other parameters are small, and are sliced once per turn. The gradient of an indexed
    stack would have the stack's size in every turn, so with `gradients` matrices are sliced like
    the rest.
    """
    if len(each) == 1 and len(each[0].group) == 1 and block == 1:
        (role,) = each[0].group

        def one(carry, xs):
            layer, index, own = xs
            return body(carry, layer, index, role, _own(own, role, lambda x: x, lambda x: x))

        xs = (layers, jnp.arange(each[0].end), per_layer)
        return jax.lax.scan(one, carry, xs, unroll=unroll)
    parameters, structure = jax.tree.flatten(layers)
    indexed = [x.ndim > 2 and not gradients for x in parameters]
    matrices = [x if apart else None for x, apart in zip(parameters, indexed, strict=True)]
    vectors = [None if apart else x for x, apart in zip(parameters, indexed, strict=True)]
    results = []
    before = {True: 0, False: 0}  # layers with a window, and others
    for stretch in each:
        turns = max(
            turns
            for turns in range(1, max(1, block // len(stretch.group)) + 1)
            if stretch.turns % turns == 0
        )
        group = stretch.group * turns
        size = len(group)
        # Trace and lower once for all layers of a role.
        ones = {id(role): jax.jit(functools.partial(_call, body, role)) for role in stretch.group}

        def turn(state, xs, group=group, ones=ones):
            carry, first = state
            results = []
            for place, role in enumerate(group):
                index = first + place
                vectors, own = _part(xs, group, place)
                layer = [
                    vector if matrix is None else _layer_of(matrix, index)
                    for matrix, vector in zip(matrices, vectors, strict=True)
                ]
                layer = jax.tree.unflatten(structure, layer)
                carry, result = ones[id(role)](carry, layer, index, own)
                results.append(result)
            return (carry, first + len(group)), _join(results, lambda *each: jnp.stack(each))

        count = stretch.turns // turns

        def in_turns(x, start, end, size, count=count):
            return x[start:end].reshape(count, size, *x.shape[1:])

        xs = _by_cache(
            (vectors, per_layer),
            functools.partial(in_turns, start=stretch.start, end=stretch.end, size=size),
            {
                which: functools.partial(in_turns, start=before[which], end=end, size=own)
                for which in (True, False)
                for own in [sum(role.windowed is which for role in group)]
                for end in [before[which] + count * own]
            },
        )
        (carry, _), result = jax.lax.scan(
            turn, (carry, jnp.int32(stretch.start)), xs, unroll=unroll
        )
        results.append(
            jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), result)
        )
        for role in group:
            before[role.windowed] += count
    return carry, _join(results, lambda *parts: jnp.concatenate(parts))


def _is_by_cache(x: Any) -> bool:
    return isinstance(x, ByCache)


def _by_cache(tree: Any, every: Callable, own: dict[bool, Callable]) -> Any:
    """Maps arrays of all layers with `every`, and arrays of layers with or without a window."""

    def of(x):
        if not _is_by_cache(x):
            return every(x)
        growing, windowed = jax.tree.map(own[False], x.growing), jax.tree.map(own[True], x.windowed)
        return ByCache(growing, windowed)

    return jax.tree.map(of, tree, is_leaf=_is_by_cache)


def _part(xs: Any, group: tuple[Role, ...], place: int) -> Any:
    """Returns a turn's values of the layer at a place."""
    role = group[place]
    number = sum(other.windowed is role.windowed for other in group[:place])
    return _own(xs, role, lambda x: x[place], lambda x: x[number])


def _own(tree: Any, role: Role, every: Callable, own: Callable) -> Any:
    """Maps arrays of all layers with `every`, and arrays of layers like this one with `own`."""

    def of(x):
        if not _is_by_cache(x):
            return every(x)
        return jax.tree.map(own, x.windowed if role.windowed else x.growing)

    return jax.tree.map(of, tree, is_leaf=_is_by_cache)


def _join(results: list[Any], join: Callable) -> Any:
    """Joins results leaf by leaf; each contributes the `ByCache` parts of its layers."""

    def of(*each):
        if not _is_by_cache(each[0]):
            return join(*each)
        growing = [x.growing for x in each if x.growing is not None]
        windowed = [x.windowed for x in each if x.windowed is not None]
        return ByCache(
            jax.tree.map(join, *growing) if growing else None,
            jax.tree.map(join, *windowed) if windowed else None,
        )

    return jax.tree.map(of, *results, is_leaf=_is_by_cache)


def _call(body: Body, role: Role, carry, layer, index, own) -> tuple[Any, Any]:
    return body(carry, layer, index, role, own)


def _layer_of(stack: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)
