"""Training attention on NVIDIA GPUs: supported calls, padding, and the calls of the kernels.

There are kernels for Hopper, and others with the products of Ampere (`mma`). Sequences are padded
to whole tiles (no query of the sequence sees a padded key, and padded queries have zero gradients),
and head dims to the next of 64, 128 and 256.
"""

import jax.numpy as jnp

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.padding import pad_axis
from pallas_kernels.training import gpu_forward, gpu_key_gradient, gpu_query_gradient
from pallas_kernels.training import gpu_tiles as tiles
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals

HEAD_DIMS = (64, 128, 256)


def why_not(inputs: Inputs, *rest, window: int, scale: float) -> str | None:
    """Returns why these kernels cannot serve the call, or None if they can."""
    del rest, window
    if target_gpu().capability[0] != 9:
        return f"needs Hopper's wgmma, and the GPU is a {target_gpu().kind}"
    if inputs.q.dtype != jnp.bfloat16:
        # wgmma would round float32 to TF32; the kernels of `mma` serve float16.
        return f"serves bfloat16 operands alone, got {inputs.q.dtype}"
    return why_no_kernel(inputs, scale)


def why_no_kernel(inputs: Inputs, scale: float) -> str | None:
    """Returns why no kernel for NVIDIA GPUs can serve the call, or None."""
    q = inputs.q
    if q.shape[3] > HEAD_DIMS[-1]:
        return f"the head dim may be {HEAD_DIMS[-1]} at most, got {q.shape[3]}"
    if inputs.bias.dtype == jnp.float64:
        return "computes the bias and its gradient in float32, not in float64"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def prepare(inputs: Inputs, window, scale, interpret) -> tuple[tiles.Problem, Inputs]:
    """Returns the problem and its padded inputs, with the bias finite and divided by the scale."""
    dim = next(size for size in HEAD_DIMS if size >= inputs.q.shape[3])
    arrays = (inputs.q, inputs.k, inputs.v)
    q, k, v = (pad_axis(pad_axis(x, 3, dim), 1, tiles.TILE) for x in arrays)
    batch, length, heads, _ = q.shape
    keys = k.shape[1]
    problem = tiles.Problem(
        batch,
        length,
        keys,
        heads,
        k.shape[2],
        dim,
        min(window, keys),
        scale,
        jnp.dtype(q.dtype),
        inputs.packed,
        inputs.start is not None,
        interpret,
    )
    return problem, inputs.for_kernels(q, k, v, tiles.TILE, scale)


def passes(forward_kernel, query_gradient, key_gradients):
    """Returns the forward and the backward pass that run these kernels."""

    def forward(inputs: Inputs, *, window: int, scale: float, interpret: bool = False):
        """Computes the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T]."""
        problem, padded = prepare(inputs, window, scale, interpret)
        output, lse2 = forward_kernel(problem, padded)
        _, length, _, dim = inputs.q.shape
        return output[:, :length, :, :dim], lse2[:, :, :length]

    def backward(
        inputs: Inputs,
        output,
        lse2,
        output_gradient,
        *,
        window: int,
        scale: float,
        interpret: bool = False,
    ):
        """Computes dq, dk, dv and dbias."""
        problem, padded = prepare(inputs, window, scale, interpret)
        _, length, _, dim = inputs.q.shape
        delta = jnp.einsum(
            "bthd,bthd->bht", output, output_gradient, preferred_element_type=jnp.float32
        )
        minus_lse = lse2 * (-1 / (LOG2E * scale))
        gradient = pad_axis(
            pad_axis(output_gradient.astype(inputs.q.dtype), 3, problem.D), 1, tiles.TILE
        )
        residuals = Residuals(
            gradient, pad_axis(minus_lse, 2, tiles.TILE), pad_axis(-delta, 2, tiles.TILE)
        )
        dk, dv, dbias = key_gradients(problem, padded, residuals)
        dq = query_gradient(problem, padded, residuals)
        keys = inputs.k.shape[1]
        dk, dv = (x[:, :keys, :, :dim] for x in (dk, dv))
        return dq[:, :length, :, :dim], dk, dv, dbias[:, :, :keys].astype(inputs.bias.dtype)

    return forward, backward


forward, backward = passes(
    gpu_forward.forward, gpu_query_gradient.query_gradient, gpu_key_gradient.key_gradients
)
