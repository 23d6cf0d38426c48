"""Paged decode attention in plain XLA: the fallback of every platform and the kernels' oracle.

For row r with length n_r, pages page_table[r] and queries q[r, g] (the G heads that share a key):

    s[r, g, j] = scale * q[r, g] . k[r, j]                   for slots j < n_r
    o[r, g]    = sum_j exp(s[r, g, j]) v[r, j] / sum_j exp(s[r, g, j])
    lse[r, g]  = log sum_j exp(s[r, g, j])

Slot j of a row lies in page page_table[r, j // P] at offset j % P.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.plan import DecodePlan


def softmax_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the type of scores and softmax: at least float32, float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def decode_attention_xla(
    q: Float[Array, "R G D"],
    k_pages: Float[Array, "N P D"],
    v_pages: Float[Array, "NV P D"],
    page_table: Int[Array, "R M"],
    lengths: Int[Array, "R"],
    k_scales: Float[Array, "N P"] | None = None,
    v_scales: Float[Array, "N P"] | None = None,
    plan: DecodePlan | None = None,
    *,
    scale: float,
    return_lse: bool = False,
    return_scores: bool = False,
) -> tuple[Array, ...]:
    """Decode attention by one gather each of the rows' keys and values.

    Args:
      q: queries, any float dtype.
      k_pages: key pages; float8 pages need `k_scales`.
      v_pages: value pages, of the same dtype.
      page_table: page of each M-th part of a row; entries beyond a row's length are not used.
      lengths: live slots of each row; they fill the first pages of the row.
      k_scales: factor of each slot's key, for float8 pages.
      v_scales: factor of each slot's value, for float8 pages.
      plan: not needed here.
      scale: factor of the scores.
      return_lse: also return lse [R, G].
      return_scores: also return the scaled scores [R, G, M * P], -inf at unread slots.

    Returns:
      A tuple (o [R, G, D] in q's dtype, then lse, then scores, where asked).
    """
    del plan
    rows, _, head_dim = q.shape
    pages, page_size, _ = k_pages.shape
    slots = page_table.shape[1] * page_size
    wide = softmax_dtype(q.dtype)
    compute = q.dtype if k_scales is not None else k_pages.dtype

    first_slot = jnp.arange(page_table.shape[1]) * page_size
    read = first_slot < lengths[:, None]
    # A dead entry may hold anything: page 0 is gathered in its place and masked below.
    page = jnp.where(read, jnp.clip(page_table, 0, pages - 1), 0)
    valid = jnp.arange(slots) < lengths[:, None]

    def gather(values, scales):
        rows_of_pages = values.at[page].get(mode="promise_in_bounds")
        if scales is not None:
            factor = scales.at[page].get(mode="promise_in_bounds")[..., None]
            rows_of_pages = (rows_of_pages.astype(wide) * factor).astype(compute)
        return rows_of_pages.reshape(rows, slots, head_dim)

    k = gather(k_pages, k_scales)
    # Unread slots may hold NaN, and 0 * NaN is NaN: the weights' zeros do not mask them.
    v = jnp.where(valid[..., None], gather(v_pages, v_scales), 0)

    scores = jnp.einsum("rgd,rsd->rgs", q.astype(compute), k, preferred_element_type=wide)
    scores = jnp.where(valid[:, None, :], scores * scale, -jnp.inf)
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
