"""Per-slot state of a policy: arrays [N, P] by page, viewed as rows [B, K, S]."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from dms_jax.policies.values import NOT_STORED


def slot_values(pages: Array, page_table: Int[Array, "B K M"]) -> Array:
    """Gathers [N, P] by page into [B, K, S] by slot; values beyond a row's length are arbitrary."""
    rows = pages.at[page_table].get(mode="fill", fill_value=0)
    return rows.reshape(*page_table.shape[:2], -1)


def put_slots(
    pages: Shaped[Array, "N P"],
    page_table: Int[Array, "B K M"],
    slots: Int[Array, "B K T"],
    values: Any,
) -> Shaped[Array, "N P"]:
    """Writes numbers into slots, whole pages at a time.

    With a scatter of single numbers XLA would change the layout of the whole array.
    """
    num_pages, size = pages.shape
    if slots.shape[-1] == 1:
        page = jnp.take_along_axis(page_table, jnp.maximum(slots, 0) // size, axis=-1)[..., 0]
        row = pages.at[page].get(mode="fill", fill_value=0)
        row = jnp.where(jnp.arange(size) == slots % size, values, row)
        page = jnp.where(slots[..., 0] == NOT_STORED, num_pages, page)  # out of range: dropped
        return pages.at[page].set(row, mode="drop")
    rows = slot_values(pages, page_table)
    batch, num_kv_heads, num_slots = rows.shape
    at = jnp.arange(batch)[:, None, None], jnp.arange(num_kv_heads)[None, :, None]
    target = jnp.where(slots == NOT_STORED, num_slots, slots)
    rows = rows.at[(*at, target)].set(values, mode="drop")
    return pages.at[page_table].set(rows.reshape(*page_table.shape, size), mode="drop")
