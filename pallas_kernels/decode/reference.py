"""Paged decode attention in plain XLA: the fallback on every platform, and the reference.

For row r with length n_r, pages page_table[r] and queries q[r, g] (the G heads that share a key):

    s[r, g, j] = scale * <q[r, g], k[r, j]>                  for slots j < n_r
    o[r, g]    = sum_j exp(s[r, g, j]) v[r, j] / sum_j exp(s[r, g, j])
    lse[r, g]  = log sum_j exp(s[r, g, j])

A soft cap c replaces s by c tanh(s / c). Slot j of a row lies in page page_table[r, j // P] at
offset j % P.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.decode.plan import DecodePlan
from pallas_kernels.decode.rows import Rows


def softmax_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of scores and softmax: float32 at least, and float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def decode_attention_xla(
    q: Float[Array, "R G D"],
    rows: Rows,
    plan: DecodePlan | None,
    *,
    scale: float,
    return_lse: bool,
    return_scores: bool,
    soft_cap: float | None = None,
) -> tuple[Array, ...]:
    """Computes `decode_attention` with one gather of the rows' keys and one of their values.

    Args:
      q: queries of any float dtype.
      rows: the rows that they attend to.
      plan: not used.
      scale: see `decode_attention`.
      return_lse: see `decode_attention`.
      return_scores: see `decode_attention`.
      soft_cap: see `decode_attention`.

    Returns:
      A tuple (o [R, G, D] in q's dtype, then, if requested, lse [R, G] and scores [R, G, M * P]).
    """
    del plan
    row_count, _, head_dim = q.shape
    lengths, slots = rows.lengths, rows.slots
    wide = softmax_dtype(q.dtype)
    compute = q.dtype if rows.scales else rows.k_pages.dtype

    first_slot = jnp.arange(rows.page_table.shape[1]) * rows.page_size
    read = first_slot < lengths[:, None]
    # A dead entry may hold anything; gather page 0 instead, which is masked below.
    page = jnp.where(read, jnp.clip(rows.page_table, 0, rows.k_pages.shape[0] - 1), 0)
    valid = jnp.arange(slots) < lengths[:, None]

    def gather(values, scales):
        rows_of_pages = values.at[page].get(mode="promise_in_bounds")
        if scales is not None:
            factor = scales.at[page].get(mode="promise_in_bounds")
            rows_of_pages = (rows_of_pages.astype(wide) * factor[..., None]).astype(compute)
        return rows_of_pages.reshape(row_count, slots, head_dim)

    k = gather(rows.k_pages, rows.k_scales)
    # Unread slots may hold NaN, and 0 * NaN is NaN: weights of zero do not mask them.
    v = jnp.where(valid[..., None], gather(rows.v_pages, rows.v_scales), 0)

    scores = jnp.einsum("rgd,rsd->rgs", q.astype(compute), k, preferred_element_type=wide)

    def capped(scores):
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

    scores = jnp.where(valid[:, None, :], capped(scores * scale), -jnp.inf)
    empty = (lengths == 0)[:, None, None]
    peak = jnp.where(empty, 0, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("rgs,rsd->rgd", weights.astype(compute), v, preferred_element_type=wide)
    out = (out / jnp.where(empty, 1, total)).astype(q.dtype)

    results = [out]
    if return_lse:
        results.append((peak + jnp.log(total))[..., 0])
    if return_scores:
        results.append(scores)
    return tuple(results)
