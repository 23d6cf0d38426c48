"""`retrofit_attention`: causal attention with a key bias that starts past a window.

This is the training mask of Dynamic Memory Sparsification (Łańcucki et al. 2025, section 3.1;
the bias of key j is log(1 - alpha_j)), for any caller that has such a bias. It is differentiable
in q, k, v and bias, and uses memory linear in T.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, ImplementationChoice, Operation, deferred
from pallas_kernels.training import reference

FORWARD = Operation(
    "retrofit_attention",
    (
        Implementation(
            "mosaic_gpu",
            "cuda",
            deferred("pallas_kernels.training.gpu", "forward"),
            deferred("pallas_kernels.training.gpu", "why_not"),
        ),
        Implementation(
            "mosaic_tpu",
            "tpu",
            deferred("pallas_kernels.training.tpu", "forward"),
            deferred("pallas_kernels.training.tpu", "why_not"),
        ),
        Implementation("xla", None, reference.forward),
    ),
)
BACKWARD = Operation(
    "retrofit_attention (backward)",
    (
        Implementation(
            "mosaic_gpu",
            "cuda",
            deferred("pallas_kernels.training.gpu", "backward"),
            deferred("pallas_kernels.training.gpu", "why_not"),
        ),
        Implementation(
            "mosaic_tpu",
            "tpu",
            deferred("pallas_kernels.training.tpu", "backward"),
            deferred("pallas_kernels.training.tpu", "why_not"),
        ),
        Implementation("xla", None, reference.backward),
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, bias, segments, window, scale, implementation):
    output, _ = FORWARD(implementation, q, k, v, bias, segments, window=window, scale=scale)
    return output


def _attend_forward(q, k, v, bias, segments, window, scale, implementation):
    arrays = (q, k, v, bias, segments)
    output, lse2 = FORWARD(implementation, *arrays, window=window, scale=scale)
    return output, (*arrays, output, lse2)


def _attend_backward(window, scale, implementation, residuals, output_gradient):
    gradients = BACKWARD(implementation, *residuals, output_gradient, window=window, scale=scale)
    return (*gradients, None)


_attend.defvjp(_attend_forward, _attend_backward)


def check_arguments(q, k, v, bias, window, segment_ids) -> None:
    """Refuse arguments that disagree, before anything is traced."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, T, H, D] and [B, T, K, D], got {q.shape}, {k.shape}")
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != (batch, length, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [B, T, K, D] beside q {q.shape}: {k.shape}, {v.shape}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if length == 0:
        raise ValueError("the sequences are empty (T = 0)")
    if bias.shape != (batch, kv_heads, length):
        raise ValueError(f"bias must be [B, K, T] = {(batch, kv_heads, length)}, got {bias.shape}")
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k, v must share a float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window must be an integer >= 0, got {window!r}")
    if segment_ids is not None and segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids must be [B, T], got {segment_ids.shape}")


def retrofit_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    bias: Float[Array, "B K T"],
    *,
    window: int,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: ImplementationChoice = None,
) -> Float[Array, "B T H D"]:
    """Causal attention whose keys take a bias once they are more than `window` tokens behind.

    Query i sees key j iff j <= i and both have the same segment id. `bias[b, k, j]` (<= 0, -inf
    for a key that is gone) is added to the scores of key j iff i - j > window. Every query sees
    itself unbiased, so no softmax is empty.

    Args:
      q: queries, rotated.
      k: keys, rotated. Head h of q reads KV head h // (H / K).
      v: values.
      bias: natural-log bias of each key.
      window: tokens of unbiased past, static, may exceed T.
      scale: factor on the dot products.
      segment_ids: documents packed in one sequence; None means one document.
      implementation: "mosaic_gpu", "mosaic_tpu", "xla", several of them to be tried in order, or
        None for the best one on the platform that the call is lowered for. "mosaic_gpu" (Hopper)
        serves bfloat16, "mosaic_tpu" also float32; everything else runs through XLA, in full
        precision and in memory linear in T too.

    Returns:
      The attention output in q's dtype; the softmax is at least float32, and float64 throughout
      for float64 inputs.

    Raises:
      ValueError: arguments that disagree.
      NotImplementedError: a named implementation cannot serve the call, with the reason.
    """
    check_arguments(q, k, v, bias, window, segment_ids)
    if implementation is not None and not isinstance(implementation, str):
        implementation = tuple(implementation)
    return _attend(q, k, v, bias, segment_ids, window, float(scale), implementation)
