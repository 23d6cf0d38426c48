"""The loop over the layers of a model, in groups where a policy treats some layers differently.

Layers are stacked, so that compile time does not grow with depth.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dms_jax.policies.base import LayerGroup

# (carry, layer, index, group, its own part of `per_layer`) -> (carry, result)
Body = Callable[[Any, Any, Any, LayerGroup, Any], tuple[Any, Any]]


def scan_layers(
    body: Body,
    carry: Any,
    layers: Any,
    groups: Sequence[LayerGroup],
    per_layer: Any,
    *,
    unroll: bool = False,
    block: int = 1,
) -> tuple[Any, Any]:
    """Runs `body` over the layers; returns the carry and the stacked results.

    Args:
      body: the pass through one layer.
      carry: what the first layer is given.
      layers: the layers' parameters, stacked.
      groups: the layers as ranges that are treated alike.
      per_layer: arrays [L, ...] of which each layer is given its own.
      unroll: whether the whole loop is unrolled.
      block: layers in a turn of the loop, at most; each group has turns of one length.

    A single group whose turns are single layers passes its parameters to the scan, whose transpose
    stacks their gradients. Otherwise the stacks of matrices are indexed: to slice them would copy
    the weights, and so would an index that is read from an array. Where it follows from the number
    of the turn, XLA's matrix products read the stack in place (saves 8 ms a step of Llama-3.1-8B on
    an H200). All else that a layer has of its own is small, and is sliced once a turn.
    """
    if len(groups) == 1 and block == 1:

        def one(carry, xs):
            layer, index, own = xs
            return body(carry, layer, index, groups[0], own)

        xs = (layers, jnp.arange(groups[0].end), per_layer)
        return jax.lax.scan(one, carry, xs, unroll=unroll)
    parameters, structure = jax.tree.flatten(layers)
    matrices = [x if x.ndim > 2 else None for x in parameters]
    vectors = [x if x.ndim <= 2 else None for x in parameters]
    results = []
    for group in groups:
        length = group.end - group.start
        size = max(size for size in range(1, block + 1) if length % size == 0)
        # Traced and lowered once for all layers of a turn.
        one = jax.jit(functools.partial(_call, body, group))

        def turn(state, xs, one=one, size=size):
            carry, first = state
            results = []
            for place in range(size):
                index = first + place
                vectors, own = jax.tree.map(lambda x, place=place: x[place], xs)
                layer = [
                    vector if matrix is None else _layer_of(matrix, index)
                    for matrix, vector in zip(matrices, vectors, strict=True)
                ]
                layer = jax.tree.unflatten(structure, layer)
                carry, result = one(carry, layer, index, own)
                results.append(result)
            return (carry, first + size), jax.tree.map(lambda *each: jnp.stack(each), *results)

        def in_turns(x, group=group, size=size):
            x = x[group.start : group.end]
            return x.reshape(len(x) // size, size, *x.shape[1:])

        xs = jax.tree.map(in_turns, (vectors, per_layer))
        (carry, _), result = jax.lax.scan(turn, (carry, jnp.int32(group.start)), xs, unroll=unroll)
        results.append(
            jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), result)
        )
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _call(body: Body, group: LayerGroup, carry, layer, index, own) -> tuple[Any, Any]:
    return body(carry, layer, index, group, own)


def _layer_of(stack: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)
