"""`prefill_attention`: a chunk of a prompt against the retained past and against itself.

The binary form of the DMS mask (Łańcucki et al. 2025, section 3.2) for prompts that enter a paged
cache chunk by chunk. The visibility of past slots is data (`past_until`), so the kernel serves any
policy that evicts tokens at a known distance.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.prefill.reference import prefill_attention_reference

PREFILL = Operation(
    "prefill_attention",
    (
        deferred("mosaic_gpu", "cuda", "pallas_kernels.prefill.gpu", "prefill"),
        deferred("mosaic_mma", "cuda", "pallas_kernels.prefill.mma", "prefill"),
        deferred("mosaic_tpu", "tpu", "pallas_kernels.prefill.tpu", "prefill"),
        Implementation("xla", None, prefill_attention_reference),
    ),
)


def check_arguments(q, chunk: Chunk, past: Past, window) -> None:
    """Refuses arguments that disagree, before anything is traced."""
    k, v, evicted, counts = chunk.k, chunk.v, chunk.evicted, chunk.counts
    k_pages, v_pages, page_table = past.k_pages, past.v_pages, past.page_table
    lengths, until = past.lengths, past.until
    if q.ndim != 4 or k.ndim != 4 or k_pages.ndim != 3 or page_table.ndim != 3:
        raise ValueError(
            "q, k must be [B, T, H, D], [B, T, K, D], k_pages [N, P, D], page_table [B, K, M]; got "
            f"{q.shape}, {k.shape}, {k_pages.shape}, {page_table.shape}"
        )
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != (batch, length, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(f"k and v must be [B, T, K, D] beside q {q.shape}: {k.shape}, {v.shape}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if evicted.shape != (batch, kv_heads, length) or evicted.dtype != jnp.bool_:
        raise ValueError(f"evicted must be Bool[B, K, T], got {evicted.dtype}{evicted.shape}")
    if counts.shape != (batch,):
        raise ValueError(f"counts must be [B], got {counts.shape}")
    numbers = {"counts": counts, "page_table": page_table, "past_lengths": lengths}
    for name, array in (numbers | {"past_until": until}).items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must hold integers, has dtype {array.dtype}")
    if k_pages.shape[1:] != v_pages.shape[1:] or k_pages.shape[2] != dim:
        raise ValueError(f"pages must be [N, P, {dim}], got {k_pages.shape}, {v_pages.shape}")
    if page_table.shape[:2] != (batch, kv_heads) or lengths.shape != (batch, kv_heads):
        raise ValueError(
            f"page_table must be [B, K, M] and past_lengths [B, K] with B, K = {batch}, {kv_heads};"
            f" got {page_table.shape}, {lengths.shape}"
        )
    if until.shape != (batch, kv_heads, page_table.shape[2] * k_pages.shape[1]):
        raise ValueError(f"past_until must be [B, K, M * P], got {until.shape}")
    dtypes = {array.dtype for array in (q, k, v, k_pages, v_pages)}
    if len(dtypes) != 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k, v and the pages must share a float dtype, got {dtypes}")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window must be an integer >= 0, got {window!r}")


def prefill_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    evicted: Bool[Array, "B K T"],
    counts: Int[Array, " B"],
    k_pages: Float[Array, "N P D"],
    v_pages: Float[Array, "NV P D"],
    page_table: Int[Array, "B K M"],
    past_lengths: Int[Array, "B K"],
    past_until: Int[Array, "B K S"],
    *,
    window: int,
    scale: float,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Computes the attention of a chunk of prompt queries, over the pool's pages and the chunk.

    Chunk query i sees chunk key j <= i iff i - j <= window or not `evicted[b, k, j]`, and past
    slot s iff s < `past_lengths[b, k]` and i <= `past_until[b, k, s]`. Slot s of row (b, k) lives
    in page `page_table[b, k, s // P]` at offset s % P; entries past the length may be anything.

    Args:
      q: rotated queries of the chunk; the first `counts[b]` of each sequence are real.
      k: rotated keys of the chunk. Head h of q reads KV head h // (H / K).
      v: values of the chunk.
      evicted: chunk keys that are visible only within the window.
      counts: number of real queries of each sequence, 0 to T.
      k_pages: key pages of the pool, without the chunk.
      v_pages: value pages of the pool, without the chunk.
      page_table: page numbers of each row.
      past_lengths: number of used slots of each row.
      past_until: for each slot (S = M * P) the last chunk query that sees it: a large number keeps
        it for the whole chunk, a negative one hides it.
      window: distance up to which a query sees evicted keys; static, 0 or more.
      scale: factor on the dot products.
      sinks: a sink logit of each query head, which takes part in its softmax like one more key with
        value 0. None for none. Only "xla" supports it, and `implementation=None` then chooses it.
      soft_cap: c, if scores s become c tanh(s / c); None without a cap. Only "xla" supports it.
      implementation: "mosaic_gpu" (Hopper) serves bfloat16, "mosaic_mma" (Ampere and later) also
        float16, "mosaic_tpu" bfloat16 and float32, "xla" everything; None chooses the best one for
        the platform that the call is lowered for.

    Returns:
      The attention output in q's dtype, zero for padded queries. The softmax is computed in at
      least float32, and in float64 for float64 inputs. Unread slots have no effect, even if they
      hold NaN.

    Raises:
      ValueError: arguments disagree, or an implementation is unknown.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    chunk = Chunk(k, v, evicted, counts)
    past = Past(k_pages, v_pages, page_table, past_lengths, past_until)
    check_arguments(q, chunk, past, window)
    options = {"window": window, "scale": float(scale)}
    if soft_cap is not None:
        options["soft_cap"] = float(soft_cap)
    if sinks is None and soft_cap is None:
        return PREFILL(implementation, q, chunk, past, **options)
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must be [H] = {q.shape[2:3]}, got {sinks.shape}")
    implementation = PREFILL.xla_alone(implementation, "a sink or a soft cap")
    return PREFILL(implementation, q, chunk, past, sinks, **options)
