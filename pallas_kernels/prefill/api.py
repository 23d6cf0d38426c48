"""`prefill_attention`: a chunk of a prompt against the surviving past and against itself.

The binary form of the DMS mask (Łańcucki et al. 2025, section 3.2) for prompts that enter a paged
cache chunk by chunk. Which past slot a query still sees is data (`past_until`), so any policy that
evicts at a known distance fits.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.debug import check_pages
from pallas_kernels.dispatch import Implementation, ImplementationChoice, Operation, deferred
from pallas_kernels.prefill.reference import prefill_attention_reference

PREFILL = Operation(
    "prefill_attention",
    (
        Implementation(
            "mosaic_gpu",
            "cuda",
            deferred("pallas_kernels.prefill.gpu", "prefill"),
            deferred("pallas_kernels.prefill.gpu", "why_not"),
        ),
        Implementation(
            "mosaic_tpu",
            "tpu",
            deferred("pallas_kernels.prefill.tpu", "prefill"),
            deferred("pallas_kernels.prefill.tpu", "why_not"),
        ),
        Implementation("xla", None, prefill_attention_reference),
    ),
)


def check_arguments(
    q, k, v, evicted, counts, k_pages, v_pages, page_table, lengths, until, window
) -> None:
    """Refuse arguments that disagree, before anything is traced."""
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
    counts: Int[Array, "B"],
    k_pages: Float[Array, "N P D"],
    v_pages: Float[Array, "NV P D"],
    page_table: Int[Array, "B K M"],
    past_lengths: Int[Array, "B K"],
    past_until: Int[Array, "B K S"],
    *,
    window: int,
    scale: float,
    debug: bool = False,
    implementation: ImplementationChoice = None,
) -> Float[Array, "B T H D"]:
    """Attention of one chunk of prompt queries, over the pool's pages and over the chunk.

    Chunk query i sees chunk key j <= i iff i - j <= window or not `evicted[b, k, j]`, and past
    slot s iff s < `past_lengths[b, k]` and i <= `past_until[b, k, s]`. Slot s of row (b, k) lives
    in page `page_table[b, k, s // P]` at offset s % P; entries past the length may be anything.

    Args:
      q: rotated queries of the chunk; the first `counts[b]` of each sequence are real.
      k: rotated keys of the chunk. Head h of q reads KV head h // (H / K).
      v: values of the chunk.
      evicted: chunk keys that are seen only within the window.
      counts: real queries of each sequence, 0 to T.
      k_pages: the pool's keys, without the chunk.
      v_pages: the pool's values, without the chunk.
      page_table: pages of each row.
      past_lengths: used slots of each row.
      past_until: for each slot (S = M * P) the last chunk query that still sees it: a large number
        keeps it for ever, a negative one hides it.
      window: static, >= 0.
      scale: factor on the dot products.
      debug: check that every live table entry is a page of the pool and that lengths fit the
        table; messages count rows as b * K + k. On concrete arrays this raises before anything is
        launched; under `jax.jit` it is a `checkify.check`, so wrap the function in
        `checkify.checkify`.
      implementation: "mosaic_gpu", "mosaic_tpu", "xla", several of them to be tried in order, or
        None for the best one on the platform that the call is lowered for. "mosaic_gpu" (Hopper)
        serves bfloat16, "mosaic_tpu" also float32; everything else runs through XLA.

    Returns:
      The attention output in q's dtype, zero for padded queries; the softmax is at least float32,
      and float64 throughout for float64 inputs. Unread slots never leak, even if they hold NaN.

    Raises:
      ValueError: arguments that disagree; in debug mode a page index or a length out of range.
      NotImplementedError: a named implementation cannot serve the call, with the reason.
    """
    arrays = (q, k, v, evicted, counts, k_pages, v_pages, page_table, past_lengths, past_until)
    check_arguments(*arrays, window)
    if debug:
        pages = min(k_pages.shape[0], v_pages.shape[0])
        table = page_table.reshape(past_lengths.size, page_table.shape[2])
        rows = past_lengths.reshape(-1)
        check_pages("prefill_attention", table, rows, pages, k_pages.shape[1])
    return PREFILL(implementation, *arrays, window=window, scale=float(scale))
