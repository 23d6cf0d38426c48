"""Training attention on NVIDIA Hopper GPUs: what it serves, padding, and the three kernels.

Sequences are padded to whole tiles (no query of the sequence sees a padded key; padded queries
have zero gradients) and head dims to the next of 64, 128 and 256.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.gpu_forward import forward as forward_kernel
from pallas_kernels.training.gpu_key_gradient import key_gradients
from pallas_kernels.training.gpu_query_gradient import query_gradient

HEAD_DIMS = (64, 128, 256)


def why_not(q, k, v, bias, segments, *rest, window: int, scale: float) -> str | None:
    """Return why these kernels cannot serve the call, or None if they can."""
    del k, v, bias, segments, rest, window
    if target_gpu().capability[0] != 9:
        return f"it uses Hopper's wgmma, and the GPU is a {target_gpu().kind}"
    if q.dtype != jnp.bfloat16:
        # wgmma would round float32 to TF32; float16 would overflow in the gradients.
        return f"wgmma is served bfloat16 operands alone, got {q.dtype}"
    if q.shape[3] > HEAD_DIMS[-1]:
        return f"the head dim may be {HEAD_DIMS[-1]} at most, got {q.shape[3]}"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def _pad(x: jax.Array, axis: int, multiple: int, **mode) -> jax.Array:
    """Pad one axis up to a multiple; no operation if it is one already."""
    if x.shape[axis] % multiple == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, **mode)


def _prepare(q, k, v, bias, segments, window, scale, interpret):
    """Return the problem and its padded operands, with the bias finite and in raw score units."""
    dim = next(size for size in HEAD_DIMS if size >= q.shape[3])
    q, k, v = (_pad(_pad(x, 3, dim), 1, tiles.TILE) for x in (q, k, v))
    raw_bias = jnp.maximum(bias.astype(jnp.float32), tiles.HIDDEN) / scale
    if segments is not None:
        segments = _pad(segments.astype(jnp.int32), 1, tiles.TILE, mode="edge")
    batch, length, heads, _ = q.shape
    problem = tiles.Problem(
        batch,
        length,
        heads,
        k.shape[2],
        dim,
        min(window, length),
        scale,
        jnp.dtype(q.dtype),
        segments is not None,
        interpret,
    )
    return problem, (q, k, v, _pad(raw_bias, 2, tiles.TILE), segments)


def forward(q, k, v, bias, segments, *, window: int, scale: float, interpret: bool = False):
    """Compute the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T]."""
    problem, operands = _prepare(q, k, v, bias, segments, window, scale, interpret)
    output, lse2 = forward_kernel(problem, *operands)
    return output[:, : q.shape[1], :, : q.shape[3]], lse2[:, :, : q.shape[1]]


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
    interpret: bool = False,
):
    """Compute dq, dk, dv and dbias."""
    problem, operands = _prepare(q, k, v, bias, segments, window, scale, interpret)
    delta = jnp.einsum(
        "bthd,bthd->bht", output, output_gradient, preferred_element_type=jnp.float32
    )
    minus_lse = lse2 * (-1 / (tiles.LOG2E * scale))
    gradient = _pad(_pad(output_gradient.astype(q.dtype), 3, problem.D), 1, tiles.TILE)
    residuals = (gradient, _pad(minus_lse, 2, tiles.TILE), _pad(-delta, 2, tiles.TILE))
    dk, dv, dbias = key_gradients(problem, *operands, *residuals)
    dq = query_gradient(problem, *operands, *residuals)
    length, dim = q.shape[1], q.shape[3]
    dq, dk, dv = (x[:, :length, :, :dim] for x in (dq, dk, dv))
    return dq, dk, dv, dbias[:, :, :length].astype(bias.dtype)
