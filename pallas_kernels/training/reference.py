"""Training attention with a windowed key bias, in plain XLA: forward and backward.

Sources: DMS (Łańcucki et al. 2025), the training mask of section 3.1. With G = H / K, head h of KV
head k = h // G, and visibility V(i) = {j <= i : segment[j] = segment[i]},

    s[i, j] = scale * <q_i, k_j> + (bias[k, j] if i - j > window else 0)
    o_i     = sum_{j in V(i)} p[i, j] v_j,   p = exp(s - lse_i)
    dS      = p * (<do_i, v_j> - <do_i, o_i>)
    dq_i    = scale * sum_j dS k_j,  dk_j = scale * sum_i dS q_i,  dv_j = sum_i p do_i
    dbias_j = sum over i > j + window and over the heads of the group of dS

A soft cap c replaces s = scale * <q_i, k_j> by c tanh(s / c), and multiplies dq and dk by its
slope, 1 - tanh(s / c)^2. A sink z of a head is one more term exp(z) in its sums: with lse excluding
it,

    o_i  becomes  o_i sigmoid(lse_i - z),   lse_i  becomes  log(exp(lse_i) + exp(z))

and everything above holds with these, for any implementation (`api`); dz = -sum_i exp(z - lse_i)
<do_i, o_i>.

Queries are processed in blocks of `BLOCK`, each against the keys that it may see: the sequence is
cut into at most `SPANS` spans, and the blocks of a span, one by one, read the keys up to the span's
end. Memory is linear in T, and about half of the T x T products are never computed. If queries
start at an index known only at run time, each block reads all keys.
"""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.padding import pad_axis
from pallas_kernels.training.inputs import HIDDEN, LOG2E, Inputs

BLOCK = 128
SPANS = 8


def einsum(equation: str, a: Array, b: Array) -> Array:
    """Multiplies with a result in at least float32, without rounding float32 operands first."""
    compute = jnp.promote_types(a.dtype, jnp.float32)

    def multiply(a, b):
        precision = lax.Precision.HIGHEST
        return jnp.einsum(equation, a, b, preferred_element_type=compute, precision=precision)

    def multiply_wide(a, b):
        return multiply(a.astype(compute), b.astype(compute))

    if a.dtype == compute:
        return multiply(a, b)
    # XLA's CPU runtime multiplies 16-bit operands only in some layouts.
    return lax.platform_dependent(a, b, cpu=multiply_wide, default=multiply)


def _spans(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first block, number of blocks, number of keys) of each span.

    # In: length 300, block 128.  Out: (0, 1, 128), (1, 1, 256), (2, 1, 300)
    """
    total = -(-length // block)
    size = -(-total // SPANS)
    for first in range(0, total, size):
        count = min(size, total - first)
        yield first, count, min((first + count) * block, length)


def _scores(
    q, k, bias, query_segments, key_segments, start, *, window: int, scale: float, soft_cap
):
    """Returns masked scores [B, K, G, N, S] of queries [start, start + N), and which are far.

    The last result is the slope of the soft cap; 1 without one.
    """
    scores, slope = scale * einsum("bnkgd,bskd->bkgns", q, k), 1
    if soft_cap is not None:
        capped = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * capped, 1 - capped * capped
    distance = (start + jnp.arange(q.shape[1]))[:, None] - jnp.arange(k.shape[1])[None, :]
    far = distance > window
    scores = scores + jnp.where(far, bias[:, :, None, None, :], 0)
    visible = distance >= 0
    if key_segments is not None:
        same = query_segments[:, :, None] == key_segments[:, None, :]
        visible = (visible & same)[:, None, None]
    return jnp.where(visible, scores, HIDDEN), far, slope


class _Blocks:
    """The queries of one call in blocks, and the keys that each span of blocks reads."""

    def __init__(self, inputs: Inputs, *, window: int, scale: float, soft_cap: float | None):
        q, self.k, self.v, self.segments = inputs.q, inputs.k, inputs.v, inputs.segments
        self.length, self.keys, self.start = q.shape[1], self.k.shape[1], inputs.start
        self.block, self.kv_heads = min(BLOCK, self.length), self.k.shape[2]
        self.window, self.scale, self.soft_cap = window, scale, soft_cap
        compute = jnp.promote_types(q.dtype, jnp.float32)
        self.bias = jnp.maximum(inputs.bias.astype(compute), HIDDEN)
        self.q = self.split_heads(q)
        if self.segments is not None:
            self.padded_segments = pad_axis(inputs.own_segments, 1, self.block, mode="edge")

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(first block, number of blocks, number of keys) of each span."""
        if self.start is None:
            return list(_spans(self.length, self.block))
        return [(0, -(-self.length // self.block), self.keys)]

    def split_heads(self, x: Array) -> Array:
        """Reshapes [B, T, H, D] to [B, padded T, K, G, D]."""
        batch, length, heads, dim = x.shape
        x = x.reshape(batch, length, self.kv_heads, heads // self.kv_heads, dim)
        return pad_axis(x, 1, self.block)

    def take(self, x: Array, index, axis: int = 1) -> Array:
        """Returns block number `index` of x."""
        return lax.dynamic_slice_in_dim(x, index * self.block, self.block, axis)

    def scores(self, index, keys: int):
        """Like `_scores`, for one block and the first `keys` keys."""
        query_segments = key_segments = None
        if self.segments is not None:
            query_segments = self.take(self.padded_segments, index)
            key_segments = self.segments[:, :keys]
        return _scores(
            self.take(self.q, index),
            self.k[:, :keys],
            self.bias[:, :, :keys],
            query_segments,
            key_segments,
            index * self.block + (0 if self.start is None else self.start),
            window=self.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )

    def join(self, parts: list[Array], axis: int) -> Array:
        """Concatenates [blocks, ..., N, ...] parts along their block axis and drops padding."""
        x = jnp.moveaxis(jnp.concatenate(parts, axis=0), 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, self.length, axis=axis)


def forward(
    inputs: Inputs, *, window: int, scale: float, soft_cap: float | None = None
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Computes the output and the base-2 log-sum-exp of every query."""
    blocks = _Blocks(inputs, window=window, scale=scale, soft_cap=soft_cap)
    q, v = inputs.q, inputs.v

    def block(index, keys: int):
        scores, *_ = blocks.scores(index, keys)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True)
        output = einsum("bkgns,bskd->bnkgd", (weights / total).astype(v.dtype), v[:, :keys])
        lse2 = (maximum + jnp.log(total))[..., 0] * LOG2E
        return output.astype(q.dtype), lse2

    outputs, sums = [], []
    for first, count, keys in blocks.spans:
        steps = jnp.arange(first, first + count)
        output, lse2 = lax.map(lambda index, keys=keys: block(index, keys), steps)
        outputs.append(output)
        sums.append(lse2)
    lse2 = blocks.join(sums, 3)
    return blocks.join(outputs, 1).reshape(q.shape), lse2.reshape(q.shape[0], q.shape[2], -1)


def backward(
    inputs: Inputs,
    output: Float[Array, "B T H D"],
    lse2: Float[Array, "B H T"],
    output_gradient: Float[Array, "B T H D"],
    *,
    window: int,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[
    Float[Array, "B T H D"],
    Float[Array, "B S K D"],
    Float[Array, "B S K D"],
    Float[Array, "B K S"],
]:
    """Computes the gradients of q, k, v and bias."""
    blocks = _Blocks(inputs, window=window, scale=scale, soft_cap=soft_cap)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    compute = blocks.bias.dtype
    grouped = (q.shape[0], blocks.kv_heads, -1, q.shape[1])
    delta = jnp.einsum("bthd,bthd->bht", output, output_gradient, preferred_element_type=compute)
    delta = pad_axis(delta.reshape(grouped), 3, blocks.block)
    lse = pad_axis((lse2 / LOG2E).reshape(grouped), 3, blocks.block)
    output_gradient = blocks.split_heads(output_gradient)

    def block(sums, index, keys: int):
        dk, dv, dbias = sums
        do, queries = blocks.take(output_gradient, index), blocks.take(blocks.q, index)
        scores, far, slope = blocks.scores(index, keys)
        weights = jnp.exp(scores - blocks.take(lse, index, 3)[..., None])
        dp = einsum("bnkgd,bskd->bkgns", do, v[:, :keys])
        ds = weights * (dp - blocks.take(delta, index, 3)[..., None])
        dbias += jnp.where(far, ds, 0).sum(axis=(2, 3))
        if soft_cap is not None:
            ds = ds * slope
        ds, weights = ds.astype(q.dtype), weights.astype(q.dtype)
        dv += einsum("bkgns,bnkgd->bskd", weights, do)
        dk += scale * einsum("bkgns,bnkgd->bskd", ds, queries)
        dq = scale * einsum("bkgns,bskd->bnkgd", ds, k[:, :keys])
        return (dk, dv, dbias), dq.astype(q.dtype)

    dq_parts = []
    totals = tuple(jnp.zeros(x.shape, compute) for x in (k, v, bias))
    for first, count, keys in blocks.spans:
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
