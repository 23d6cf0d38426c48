"""`retrofit_attention`: causal attention with a key bias that starts past a window.

This is the training mask of Dynamic Memory Sparsification (Łańcucki et al. 2025, section 3.1),
where the bias of key j is log(1 - alpha_j), for any key bias. It is differentiable in q, k, v and
bias, and uses memory linear in T.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.training import reference
from pallas_kernels.training.inputs import LOG2E, Inputs

GPU, MMA, TPU = (f"pallas_kernels.training.{module}" for module in ("gpu", "mma", "tpu"))

# Name of the outputs and log-sum-exps, for policies of `jax.checkpoint` that keep them.
KEPT = "retrofit_attention"

FORWARD = Operation(
    "retrofit_attention",
    (
        deferred("mosaic_gpu", "cuda", GPU, "forward"),
        deferred("mosaic_mma", "cuda", MMA, "forward"),
        deferred("mosaic_tpu", "tpu", TPU, "forward"),
        Implementation("xla", None, reference.forward),
    ),
)
BACKWARD = Operation(
    "retrofit_attention (backward)",
    (
        deferred("mosaic_gpu", "cuda", GPU, "backward"),
        deferred("mosaic_mma", "cuda", MMA, "backward"),
        deferred("mosaic_tpu", "tpu", TPU, "backward"),
        Implementation("xla", None, reference.backward),
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attend(inputs, sinks, options, implementation):
    return _attend_forward(inputs, sinks, options, implementation)[0]


def _attend_forward(inputs, sinks, options, implementation):
    output, lse2 = FORWARD(implementation, inputs, **dict(options))
    if sinks is not None:
        output, lse2 = _with_sinks(output, lse2, sinks)
    output, lse2 = checkpoint_name(output, KEPT), checkpoint_name(lse2, KEPT)
    return output, (inputs, sinks, output, lse2)


def _with_sinks(output, lse2, sinks):
    """Adds the sinks to every softmax; see `reference`."""
    sink2 = sinks.astype(lse2.dtype)[:, None] * LOG2E
    share = jax.nn.sigmoid((lse2 - sink2) / LOG2E)
    output = (output * jnp.swapaxes(share, 1, 2)[..., None]).astype(output.dtype)
    return output, jnp.logaddexp2(lse2, sink2)


def _attend_backward(options, implementation, residuals, output_gradient):
    inputs, sinks, output, lse2 = residuals
    gradients = BACKWARD(implementation, inputs, output, lse2, output_gradient, **dict(options))
    of_sinks = None
    if sinks is not None:
        # The sink's share, times minus the mean output, as its value is 0.
        share = jnp.exp2(sinks.astype(lse2.dtype)[:, None] * LOG2E - lse2)
        mean = jnp.einsum(
            "bthd,bthd->bht", output, output_gradient, preferred_element_type=lse2.dtype
        )
        of_sinks = -jnp.sum(share * mean, axis=(0, 2)).astype(sinks.dtype)
    return Inputs(*gradients), of_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def check_arguments(inputs: Inputs, window, sinks=None) -> None:
    """Refuses arguments that disagree, before anything is traced."""
    q, k, v, bias, segment_ids = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.segments
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, T, H, D] and [B, T, K, D], got {q.shape}, {k.shape}")
    batch, queries, heads, dim = q.shape
    length, kv_heads = (queries if inputs.start is None else k.shape[1]), k.shape[2]
    if k.shape != (batch, length, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [B, S, K, D] beside q {q.shape}: {k.shape}, {v.shape}")
    if queries > length:
        raise ValueError(f"{queries} queries have no place among {length} keys")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if queries == 0:
        raise ValueError("the sequences are empty (T = 0)")
    if bias.shape != (batch, kv_heads, length):
        raise ValueError(f"bias must be [B, K, S] = {(batch, kv_heads, length)}, got {bias.shape}")
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k, v must share a float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window must be an integer >= 0, got {window!r}")
    if segment_ids is not None and segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids must be [B, S], got {segment_ids.shape}")
    if sinks is not None and jnp.shape(sinks) != (heads,):
        raise ValueError(f"sinks must be [H] = {(heads,)}, got {jnp.shape(sinks)}")
    if inputs.start is not None and jnp.shape(inputs.start) != ():
        raise ValueError(f"start must be one number, got an array of {jnp.shape(inputs.start)}")


def retrofit_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    bias: Float[Array, "B K S"],
    *,
    window: int,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    start: Int[Array, ""] | int | None = None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Computes causal attention with a bias on keys more than `window` tokens before the query.

    Query i sees key j iff j <= i and both have the same segment id. `bias[b, k, j]` (<= 0, -inf
    for an evicted key) is added to the scores of key j iff i - j > window. Every query sees its own
    key without a bias, so no softmax is empty. If a row is split over devices, T of its S queries
    (from `start` on) attend to all keys.

    Args:
      q: rotated queries.
      k: rotated keys. Head h of q reads KV head h // (H / K).
      v: values.
      bias: bias of each key, a natural logarithm.
      window: number of past tokens without a bias; static, may exceed T.
      scale: factor on the dot products.
      segment_ids: number of the document of each token, for documents packed into one sequence;
        None means one document.
      start: the index in the row of the first query, at most S - T; None if T = S.
      sinks: a sink logit of each query head, which takes part in its softmax like a key with value
        0 that every query sees; differentiable. None for none.
      soft_cap: c, if scores s become c tanh(s / c), before the bias; None without a cap. Only "xla"
        supports it, and `implementation=None` then chooses it.
      implementation: "mosaic_gpu" (Hopper) serves bfloat16, "mosaic_mma" (Ampere and later) also
        float16, "mosaic_tpu" bfloat16 and float32, "xla" everything, in full precision and also
        with memory linear in T; None chooses the best one for the platform of the lowering.

    Returns:
      The attention output in q's dtype. The softmax is computed in at least float32, and in float64
      for float64 inputs.

    Raises:
      ValueError: arguments disagree.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    start = None if start is None else jnp.asarray(start, jnp.int32)
    inputs = Inputs(q, k, v, bias, segment_ids, start)
    check_arguments(inputs, window, sinks)
    options = {"window": window, "scale": float(scale)}
    if soft_cap is not None:
        options["soft_cap"] = float(soft_cap)
        implementation = FORWARD.xla_alone(implementation, "a soft cap")
    if segment_ids is not None and start is not None:
        own = jax.lax.dynamic_slice_in_dim(segment_ids, start, q.shape[1], 1)
        inputs = dataclasses.replace(inputs, query_segments=own)
    return _attend(inputs, sinks, tuple(options.items()), implementation)
