"""Training attention with a windowed key bias, in plain XLA: forward and backward.

Sources: DMS (Łańcucki et al. 2025), the training mask of section 3.1. With G = H / K, head h of KV
head k = h // G, and visibility V(i) = {j <= i : segment[j] = segment[i]},

    s[i, j] = scale * <q_i, k_j> + (bias[k, j] if i - j > window else 0)
    o_i     = sum_{j in V(i)} p[i, j] v_j,   p = exp(s - lse_i)
    dS      = p * (<do_i, v_j> - <do_i, o_i>)
    dq_i    = scale * sum_j dS k_j,  dk_j = scale * sum_i dS q_i,  dv_j = sum_i p do_i
    dbias_j = sum over i > j + window and over the heads of the group of dS

Queries go in blocks of `BLOCK`, each against the keys that it can see at all: the sequence is cut
into at most `SPANS` spans, and the blocks of a span read the keys up to the span's end, one block
after the other. Memory is linear in T, and about half of the T x T products are never formed.
"""

import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128
SPANS = 8
LOG2E = math.log2(math.e)
# Stands for -inf: exp of it is exactly 0 in every float type used here, and sums of it stay finite.
HIDDEN = -1e30


def einsum(equation: str, a: Array, b: Array) -> Array:
    """Multiply to at least float32, without rounding float32 operands first."""
    compute = jnp.promote_types(a.dtype, jnp.float32)

    def multiply(a, b):
        precision = lax.Precision.HIGHEST
        return jnp.einsum(equation, a, b, preferred_element_type=compute, precision=precision)

    def multiply_wide(a, b):
        return multiply(a.astype(compute), b.astype(compute))

    if a.dtype == compute:
        return multiply(a, b)
    # XLA's CPU runtime has products of 16-bit operands for some layouts only.
    return lax.platform_dependent(a, b, cpu=multiply_wide, default=multiply)


def _pad(x: Array, axis: int, block: int, mode: str = "constant") -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, mode=mode) if any(map(any, widths)) else x


def _spans(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, blocks, keys) of each span.

    # In: length 300, block 128.  Out: (0, 1, 128), (1, 1, 256), (2, 1, 300)
    """
    total = -(-length // block)
    size = -(-total // SPANS)
    for first in range(0, total, size):
        count = min(size, total - first)
        yield first, count, min((first + count) * block, length)


def _scores(q, k, bias, query_segments, key_segments, start, *, window: int, scale: float):
    """Scores [B, K, G, N, S] of the queries [start, start + N) with masks, and which are far."""
    scores = scale * einsum("bnkgd,bskd->bkgns", q, k)
    distance = (start + jnp.arange(q.shape[1]))[:, None] - jnp.arange(k.shape[1])[None, :]
    far = distance > window
    scores = scores + jnp.where(far, bias[:, :, None, None, :], 0)
    visible = distance >= 0
    if key_segments is not None:
        same = query_segments[:, :, None] == key_segments[:, None, :]
        visible = (visible & same)[:, None, None]
    return jnp.where(visible, scores, HIDDEN), far


class _Blocks:
    """The queries of one call in blocks, and the keys that each span of blocks reads."""

    def __init__(self, q, k, v, bias, segments, *, window: int, scale: float):
        self.length = q.shape[1]
        self.block, self.kv_heads = min(BLOCK, self.length), k.shape[2]
        self.window, self.scale = window, scale
        self.k, self.v, self.segments = k, v, segments
        self.bias = jnp.maximum(bias.astype(jnp.promote_types(q.dtype, jnp.float32)), HIDDEN)
        self.q = self.split_heads(q)
        self.padded_segments = None if segments is None else _pad(segments, 1, self.block, "edge")

    def split_heads(self, x: Array) -> Array:
        """[B, T, H, D] to [B, padded T, K, G, D]."""
        batch, length, heads, dim = x.shape
        x = x.reshape(batch, length, self.kv_heads, heads // self.kv_heads, dim)
        return _pad(x, 1, self.block)

    def take(self, x: Array, index, axis: int = 1) -> Array:
        """Block number `index` of x."""
        return lax.dynamic_slice_in_dim(x, index * self.block, self.block, axis)

    def scores(self, index, keys: int):
        """Scores of one block over the first `keys` keys, and which of them are far."""
        query_segments = key_segments = None
        if self.segments is not None and self.padded_segments is not None:
            query_segments = self.take(self.padded_segments, index)
            key_segments = self.segments[:, :keys]
        return _scores(
            self.take(self.q, index),
            self.k[:, :keys],
            self.bias[:, :, :keys],
            query_segments,
            key_segments,
            index * self.block,
            window=self.window,
            scale=self.scale,
        )

    def join(self, parts: list[Array], axis: int) -> Array:
        """Concatenate [blocks, ..., N, ...] parts along their block axis and drop the padding."""
        x = jnp.moveaxis(jnp.concatenate(parts, axis=0), 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, self.length, axis=axis)


def forward(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    bias: Float[Array, "B K T"],
    segments: Int[Array, "B T"] | None,
    *,
    window: int,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Compute the output and the base-2 log-sum-exp of every query."""
    blocks = _Blocks(q, k, v, bias, segments, window=window, scale=scale)

    def block(index, keys: int):
        scores, _ = blocks.scores(index, keys)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True)
        output = einsum("bkgns,bskd->bnkgd", (weights / total).astype(v.dtype), v[:, :keys])
        lse2 = (maximum + jnp.log(total))[..., 0] * LOG2E
        return output.astype(q.dtype), lse2

    outputs, sums = [], []
    for first, count, keys in _spans(blocks.length, blocks.block):
        steps = jnp.arange(first, first + count)
        output, lse2 = lax.map(lambda index, keys=keys: block(index, keys), steps)
        outputs.append(output)
        sums.append(lse2)
    lse2 = blocks.join(sums, 3)
    return blocks.join(outputs, 1).reshape(q.shape), lse2.reshape(q.shape[0], q.shape[2], -1)


def backward(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    bias: Float[Array, "B K T"],
    segments: Int[Array, "B T"] | None,
    output: Float[Array, "B T H D"],
    lse2: Float[Array, "B H T"],
    output_gradient: Float[Array, "B T H D"],
    *,
    window: int,
    scale: float,
) -> tuple[
    Float[Array, "B T H D"],
    Float[Array, "B T K D"],
    Float[Array, "B T K D"],
    Float[Array, "B K T"],
]:
    """Compute the gradients of q, k, v and bias."""
    blocks = _Blocks(q, k, v, bias, segments, window=window, scale=scale)
    compute = blocks.bias.dtype
    grouped = (q.shape[0], blocks.kv_heads, -1, q.shape[1])
    delta = jnp.einsum("bthd,bthd->bht", output, output_gradient, preferred_element_type=compute)
    delta = _pad(delta.reshape(grouped), 3, blocks.block)
    lse = _pad((lse2 / LOG2E).reshape(grouped), 3, blocks.block)
    output_gradient = blocks.split_heads(output_gradient)

    def block(sums, index, keys: int):
        dk, dv, dbias = sums
        do, queries = blocks.take(output_gradient, index), blocks.take(blocks.q, index)
        scores, far = blocks.scores(index, keys)
        weights = jnp.exp(scores - blocks.take(lse, index, 3)[..., None])
        dp = einsum("bnkgd,bskd->bkgns", do, v[:, :keys])
        ds = weights * (dp - blocks.take(delta, index, 3)[..., None])
        dbias += jnp.where(far, ds, 0).sum(axis=(2, 3))
        ds, weights = ds.astype(q.dtype), weights.astype(q.dtype)
        dv += einsum("bkgns,bnkgd->bskd", weights, do)
        dk += scale * einsum("bkgns,bnkgd->bskd", ds, queries)
        dq = scale * einsum("bkgns,bskd->bnkgd", ds, k[:, :keys])
        return (dk, dv, dbias), dq.astype(q.dtype)

    dq_parts = []
    totals = tuple(jnp.zeros(x.shape, compute) for x in (k, v, bias))
    for first, count, keys in _spans(blocks.length, blocks.block):
        axes = (1, 1, 2)
        dk, dv, dbias = (
            lax.slice_in_dim(x, 0, keys, axis=a) for x, a in zip(totals, axes, strict=True)
        )
        sums, dq = lax.scan(
            lambda sums, index, keys=keys: block(sums, index, keys),
            (dk, dv, dbias),
            jnp.arange(first, first + count),
        )
        totals = tuple(
            lax.dynamic_update_slice_in_dim(x, part, 0, axis)
            for x, part, axis in zip(totals, sums, axes, strict=True)
        )
        dq_parts.append(dq)
    dk, dv, dbias = totals
    dq = blocks.join(dq_parts, 1).reshape(q.shape)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), dbias.astype(bias.dtype)
