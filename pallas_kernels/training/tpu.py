"""Training attention on TPU: supported calls, layout, and the three kernels.

A program takes one KV head with the rows of its whole query group: queries have the layout [B, K,
G, T, D], and a block of `query` tokens is G * query rows of one matrix product.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.padding import pad_axis
from pallas_kernels.training.inputs import LOG2E, Inputs, Residuals
from pallas_kernels.training.tpu_backward import key_gradients, query_gradient
from pallas_kernels.training.tpu_blocks import LANES, Problem, why_too_wide
from pallas_kernels.training.tpu_forward import forward as forward_kernel


def why_not(inputs: Inputs, *rest, window: int, scale: float) -> str | None:
    """Returns why these kernels cannot serve the call, or None if they can."""
    del rest, window
    q, group = inputs.q, inputs.q.shape[2] // inputs.k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"operands must be bfloat16 or float32, got {q.dtype}"
    if reason := why_too_wide(group, q.shape[3], q.dtype):
        return reason
    if inputs.bias.dtype == jnp.float64:
        return "computes the bias and its gradient in float32, not in float64"
    if scale <= 0:
        return f"scale must be positive, got {scale}"
    return None


def _prepare(inputs: Inputs, window, scale, interpret) -> tuple[Problem, Inputs]:
    """Returns the problem and the kernels' inputs."""
    problem = Problem.make(inputs, window, scale, interpret)
    k, v = (pad_axis(jnp.swapaxes(x, 1, 2), 2, LANES) for x in (inputs.k, inputs.v))
    laid_out = inputs.for_kernels(problem.group(inputs.q), k, v, LANES, scale)
    return problem, dataclasses.replace(laid_out, bias=laid_out.bias[:, :, None])


def forward(inputs: Inputs, *, window: int, scale: float, interpret=False):
    """Computes the output [B, T, H, D] and the base-2 log-sum-exp [B, H, T]."""
    problem, laid_out = _prepare(inputs, window, scale, interpret)
    output, lse2 = forward_kernel(problem, laid_out)
    length = inputs.q.shape[1]
    return problem.ungroup(output, length), problem.from_blocks(lse2, length)


def backward(
    inputs: Inputs, output, lse2, output_gradient, *, window: int, scale: float, interpret=False
):
    """Computes dq, dk, dv and dbias."""
    problem, laid_out = _prepare(inputs, window, scale, interpret)
    length = inputs.q.shape[1]
    delta = jnp.einsum(
        "bthd,bthd->bht", output, output_gradient, preferred_element_type=jnp.float32
    )
    residuals = Residuals(
        problem.group(output_gradient.astype(inputs.q.dtype)),
        problem.to_blocks(lse2 * (-1 / (LOG2E * scale))),
        problem.to_blocks(-delta),
    )
    dk, dv, dbias = key_gradients(problem, laid_out, residuals)
    dq = problem.ungroup(query_gradient(problem, laid_out, residuals), length)
    keys = inputs.k.shape[1]
    dk, dv = (jnp.swapaxes(g, 1, 2)[:, :keys] for g in (dk, dv))
    return dq, dk, dv, dbias[:, :, 0, :keys].astype(inputs.bias.dtype)
