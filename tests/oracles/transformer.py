"""A decoder of the Llama and Qwen families in NumPy float64, around any policy's simulation.

One sequence at a time; per layer, with x the residual stream [T, E]:

    q, k, v = W_q n(x), W_k n(x), W_v n(x)          n(x) = x / sqrt(mean(x^2) + epsilon) * scale
    q, k    = n_q(q), n_k(k) per head where the family has them, then rotated by the policy
    x      += W_o attention(q, k, v)
    x      += W_down (silu(W_gate n'(x)) * W_up n'(x))

A layer with a window sees its last tokens under any policy; policies count only the other layers.

Shapes: T tokens, E model dim, H query heads, K KV heads, D head dim, F feed-forward, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tests.oracles import importance, rope, streaming
from tests.oracles.trace import Trace


@dataclasses.dataclass
class Linear:
    kernel: np.ndarray
    bias: np.ndarray | None

    def __call__(self, x: np.ndarray, inputs: int = 1) -> np.ndarray:
        y = np.tensordot(x, self.kernel, axes=inputs)
        return y if self.bias is None else y + self.bias


@dataclasses.dataclass
class Layer:
    """q [E, H, D], k and v [E, K, D], o [H, D, E], gate and up [E, F], down [F, E].

    `window` is the number of tokens that a query sees, itself among them, or None; `theta` is the
    base of the rotation, or None for none.
    """

    attention_norm: np.ndarray
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    mlp_norm: np.ndarray
    gate: Linear
    up: Linear
    down: Linear
    window: int | None
    theta: float | None
    adapter_norm: np.ndarray | None
    adapter: Linear | None
    adapter_hidden: Linear | None = None
    adapter_late: Linear | None = None


@dataclasses.dataclass
class Weights:
    """embedding [V, E], unembedding [E, V]."""

    embedding: np.ndarray
    layers: list[Layer]
    final_norm: np.ndarray
    unembedding: np.ndarray
    epsilon: float


def unchanged(x: np.ndarray) -> np.ndarray:
    return x


CENTERED = 8192  # positions
LONGEST = 512  # positions of the models


def key_center(layer: Layer) -> np.ndarray:
    """Returns the mean [K, D] of a layer's biases over the first positions, rotated to each.

    Planes that turn by a radian or more over the longest sequence have no center.
    """
    if layer.k.bias is None or layer.k_norm is not None:
        return np.zeros(layer.k.kernel.shape[1:])
    total = np.zeros_like(layer.k.bias)
    for start in range(0, CENTERED, 16):
        positions = np.arange(start, start + 16) * (layer.theta is not None)
        turn = rope.angles(positions, total.shape[-1], layer.theta or 1.0)
        total = total + rope.rotate_tokens(np.stack([layer.k.bias] * 16), *turn).sum(0)
    half = total.shape[-1] // 2
    turn = 0.0 if layer.theta is None else layer.theta ** (-np.arange(half) / half) * LONGEST
    return np.where(np.tile(turn < np.ones(half), 2), total / CENTERED, 0.0)


@dataclasses.dataclass
class LayerInput:
    """A policy's input in one layer: q [T, H, D], k, v [T, K, D] before rotation, after norms.

    cos and sin are [T, D/2]. `own` and `late` [T, K] are the layer's adapter outputs for each
    token, and for the token that leaves the window with it. `stored` returns keys and values after
    a round trip through a cache of few bits. In a whole model `residual` [T, E] is the stream
    before the layer's input norm.
    """

    index: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    own: np.ndarray | None = None
    late: np.ndarray | None = None
    stored: Callable[[np.ndarray], np.ndarray] = unchanged
    residual: np.ndarray | None = None
    weights: Layer | None = None
    epsilon: float = 0.0

    @functools.cached_property
    def key_center(self) -> np.ndarray:
        """What a cache of few bits subtracts from rotated keys, [K, D]."""
        if self.weights is None or self.stored is unchanged:
            return np.zeros(self.k.shape[1:])
        return key_center(self.weights)

    def stored_keys(self, k: np.ndarray) -> np.ndarray:
        """Returns rotated keys [T, K, D] as they are read back."""
        return self.stored(k - self.key_center) + self.key_center

    @property
    def rotated(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rotated q, rotated k and v; k and v as stored."""
        turn = (self.cos, self.sin)
        k = self.stored_keys(rope.rotate_tokens(self.k, *turn))
        return rope.rotate_tokens(self.q, *turn), k, self.stored(self.v)


@dataclasses.dataclass
class Pass:
    """Logits [T, V], and each layer's input and trace."""

    logits: np.ndarray
    inputs: list[LayerInput]
    traces: list[Trace]


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def adapter_outputs(layer: Layer, x: np.ndarray, epsilon: float) -> list[np.ndarray | None]:
    """Returns the outputs of a layer's adapter for the residual stream [T, E]."""
    heads = layer.adapter, layer.adapter_late
    if layer.adapter is None:
        return [None, None]
    x = importance.features(x, layer.adapter_norm, layer.adapter_hidden, epsilon)
    return [None if head is None else head(x) for head in heads]


def run(
    weights: Weights, tokens, simulate: Callable[[LayerInput], Trace], stored: Callable = unchanged
) -> Pass:
    """Runs tokens [T] through all layers, the attention of each by `simulate`."""
    x = weights.embedding[np.asarray(tokens)]
    epsilon = weights.epsilon
    inputs, traces = [], []
    for layer in weights.layers:
        normed = rms_norm(x, layer.attention_norm, epsilon)
        q, k, v = layer.q(normed), layer.k(normed), layer.v(normed)
        if layer.q_norm is not None:
            q, k = rms_norm(q, layer.q_norm, epsilon), rms_norm(k, layer.k_norm, epsilon)
        positions = np.arange(len(x)) if layer.theta else np.zeros(len(x))
        cos, sin = rope.angles(positions, q.shape[-1], layer.theta or 1.0)
        said = adapter_outputs(layer, x, epsilon)
        index = sum(each.weights.window is None for each in inputs)
        inputs.append(LayerInput(index, q, k, v, cos, sin, *said, stored, x, layer, epsilon))
        if layer.window is None:
            traces.append(simulate(inputs[-1]))
        else:
            options = dict(sinks=0, recent=layer.window)
            traces.append(streaming.simulate(*inputs[-1].rotated, **options))
        x = x + layer.o(traces[-1].outputs, inputs=2)
        normed = rms_norm(x, layer.mlp_norm, epsilon)
        gate = layer.gate(normed)
        x = x + layer.down(gate / (1 + np.exp(-gate)) * layer.up(normed))
    logits = rms_norm(x, weights.final_norm, epsilon) @ weights.unembedding
    return Pass(logits, inputs, traces)
