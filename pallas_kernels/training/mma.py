"""Training attention with the products of Ampere, for NVIDIA GPUs of other generations than Hopper.

They run on Hopper too, where the Hopper kernels are faster.
"""

import jax.numpy as jnp

from pallas_kernels.dispatch import mosaic_lacks, target_gpu
from pallas_kernels.training import mma_forward, mma_key_gradient, mma_query_gradient
from pallas_kernels.training.gpu import passes, why_no_kernel
from pallas_kernels.training.inputs import Inputs
from pallas_kernels.training.mma_tiles import on_blackwell


def why_not(inputs: Inputs, *rest, window: int, scale: float) -> str | None:
    """Returns why these kernels cannot serve the call, or None if they can."""
    del rest, window
    if reason := mosaic_lacks(target_gpu()):
        return reason
    if inputs.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies 16-bit numbers, not {inputs.q.dtype}"
    if inputs.q.shape[3] > 128 and on_blackwell():
        return f"gradients of head dims beyond 128 spill registers on a {target_gpu().kind}"
    return why_no_kernel(inputs, scale)


forward, backward = passes(
    mma_forward.forward, mma_query_gradient.query_gradient, mma_key_gradient.key_gradients
)
