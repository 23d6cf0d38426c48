"""Training attention on TPU: what it serves, layout, and the three kernels behind one interface.

The kernels see one KV head at a time with the rows of its whole query group: queries are laid out
[B, K, G, T, D] and a block of `query` tokens is G * query rows of one matrix product.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.training.tpu_backward import key_gradients, query_gradient
from pallas_kernels.training.tpu_blocks import HIDDEN, LOG2E, Problem, pad_axis
from pallas_kernels.training.tpu_forward import forward as forward_kernel


def why_not(q, k, v, bias, segments, *rest, window: int, scale: float) -> str | None:
    """Return why these kernels cannot serve the call, or None if they can."""
    del v, bias, segments, rest, window
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"operands must be bfloat16 or float32, got {q.dtype}"
    if q.shape[3] > 256:
        return f"the head dim may be 256 at most, got {q.shape[3]}"
    if q.shape[2] // k.shape[2] > 16:
        return f"a KV head may serve 16 query heads at most, got {q.shape[2] // k.shape[2]}"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


@dataclass(frozen=True)
class _Operands:
    """The padded operands in the kernels' layouts."""

    problem: Problem
    q: jax.Array
    k: jax.Array
    v: jax.Array
    raw_bias: jax.Array
    segments: jax.Array | None

    def group(self, x: jax.Array) -> jax.Array:
        """[B, T, H, D] to [B, K, G, T, D]."""
        batch, length, heads, dim = x.shape
        x = x.reshape(batch, length, self.problem.K, heads // self.problem.K, dim)
        return pad_axis(jnp.transpose(x, (0, 2, 3, 1, 4)), 3, self.problem.T)

    def ungroup(self, x: jax.Array, length: int) -> jax.Array:
        """[B, K, G, T, D] to [B, T, H, D]."""
        x = jnp.transpose(x, (0, 3, 1, 2, 4))[:, :length]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def rows(self, x: jax.Array) -> jax.Array:
        """[B, H, T] to one row per block of queries, [B, K, blocks, 1, G * query]."""
        problem = self.problem
        x = pad_axis(x, 2, problem.T)
        x = x.reshape(problem.B, problem.K, problem.G, -1, problem.query)
        return jnp.swapaxes(x, 2, 3).reshape(problem.B, problem.K, -1, 1, problem.rows)

    def unrow(self, x: jax.Array, length: int) -> jax.Array:
        """[B, K, blocks, 1, G * query] to [B, H, T]."""
        problem = self.problem
        x = x.reshape(problem.B, problem.K, -1, problem.G, problem.query)
        return jnp.swapaxes(x, 2, 3).reshape(problem.B, -1, problem.T)[:, :, :length]


def _prepare(q, k, v, bias, segments, window, scale, interpret) -> _Operands:
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    problem = Problem.make(
        batch, length, heads, kv_heads, dim, window, scale, q.dtype, segments is not None, interpret
    )
    k, v = (pad_axis(jnp.swapaxes(x, 1, 2), 2, problem.T) for x in (k, v))
    raw_bias = jnp.maximum(bias.astype(jnp.float32), HIDDEN) / scale
    if segments is not None:
        segments = pad_axis(segments.astype(jnp.int32), 1, problem.T, mode="edge")
    operands = _Operands(problem, q, k, v, pad_axis(raw_bias, 2, problem.T), segments)
    return _Operands(problem, operands.group(q), k, v, operands.raw_bias[:, :, None], segments)


def forward(q, k, v, bias, segments, *, window: int, scale: float, interpret=False):
    """Compute the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T]."""
    x = _prepare(q, k, v, bias, segments, window, scale, interpret)
    output, lse2 = forward_kernel(x.problem, x.q, x.k, x.v, x.raw_bias, x.segments)
    return x.ungroup(output, q.shape[1]), x.unrow(lse2, q.shape[1])


def backward(
    q,
    k,
    v,
    bias,
    segments,
    output,
    lse2,
    output_gradient,
    *,
    window: int,
    scale: float,
    interpret=False,
):
    """Compute dq, dk, dv and dbias."""
    x = _prepare(q, k, v, bias, segments, window, scale, interpret)
    length = q.shape[1]
    delta = jnp.einsum(
        "bthd,bthd->bht", output, output_gradient, preferred_element_type=jnp.float32
    )
    residuals = (
        x.group(output_gradient.astype(q.dtype)),
        x.rows(lse2 * (-1 / (LOG2E * scale))),
        x.rows(-delta),
    )
    operands = (x.problem, x.q, x.k, x.v, x.raw_bias, x.segments, *residuals)
    dk, dv, dbias = key_gradients(*operands)
    dq = x.ungroup(query_gradient(*operands), length)
    dk, dv = (jnp.swapaxes(g, 1, 2)[:, :length] for g in (dk, dv))
    return dq, dk, dv, dbias[:, :, 0, :length].astype(bias.dtype)
