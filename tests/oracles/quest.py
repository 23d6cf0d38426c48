"""Quest (Tang et al. 2024): keep everything, read only the pages that may matter to a query.

A page is `page_size` consecutive tokens, with the elementwise maximum M and minimum m of its
rotated keys. An upper bound of the score of query q on any key of page p:

    bound_p = sum_d max(q_d M_pd, q_d m_pd)          (no 1/sqrt(D))

Each query head reads the pages of its own largest bounds. Prompt queries read everything; so do the
first `dense_layers` layers of a model. With `budget` tokens to read:
- force_last_page=True (the published kernels): budget // page_size pages, the last one (the
  current, perhaps partial, page) always among them;
- force_last_page=False (the published evaluation): max(3, min(budget, length) // page_size) pages,
  the last one only if its bound is large enough, so a token may not read itself.
In both, all pages if there are no more than that. Equal bounds: the earlier page is read.

per="kv_head" is not in the paper: the query heads of a group rank pages by the sum of their bounds,
and read the same ones.
"""

import dataclasses

import numpy as np

from tests.oracles.trace import Recorder, Trace, as_float64, attend, default_scale


def page_bounds(query: np.ndarray, keys: np.ndarray, page_size: int) -> np.ndarray:
    """Returns the bounds [N] of query [D] on the pages of keys [S, D]; the last may be partial."""
    bounds = []
    for start in range(0, len(keys), page_size):
        page = keys[start : start + page_size]
        highest, lowest = page.max(axis=0), page.min(axis=0)
        bounds.append(np.maximum(query * highest, query * lowest).sum())
    return np.array(bounds)


def selected_pages(bounds: np.ndarray, pages: int, force_last_page: bool) -> list[int]:
    """Returns the pages that are read, in ascending order."""
    return pages_beside(bounds, pages, len(bounds) - 1 if force_last_page else None)


def pages_beside(bounds: np.ndarray, pages: int, always: int | None) -> list[int]:
    """Returns the pages that are read, in ascending order, with `always` among them."""
    if len(bounds) <= pages:
        return list(range(len(bounds)))
    forced = [] if always is None else [always]
    candidates = [page for page in range(len(bounds)) if page not in forced]
    best = sorted(candidates, key=lambda page: (-bounds[page], page))
    return sorted(best[: pages - len(forced)] + forced)


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    budget: int,
    page_size: int = 16,
    force_last_page: bool = True,
    per: str = "query_head",
    layer: int = 2,
    dense_layers: int = 2,
    scale: float | None = None,
) -> Trace:
    """Simulate layer number `layer` over q [T, H, D] and k, v [T, K, D], all rotated already."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    recorder = Recorder(query_heads)
    for t in range(len(q)):
        length = t + 1
        if force_last_page:
            pages = max(1, budget // page_size)
        else:
            pages = max(3, min(budget, length) // page_size)
        outputs, attended = [], []
        for head in range(query_heads):
            keys, values = k[:length, head // group], v[:length, head // group]
            if t < prompt_length or layer < dense_layers:
                ids = list(range(length))
            else:
                first = head // group * group
                choosing = [head] if per == "query_head" else range(first, first + group)
                bounds = sum(page_bounds(q[t, one], keys, page_size) for one in choosing)
                chosen = selected_pages(bounds, pages, force_last_page)
                ids = [j for j in range(length) if j // page_size in chosen]
            outputs.append(attend(q[t, head], keys[ids], values[ids], scale))
            attended.append(ids)
        recorder.step(outputs, [list(range(length))] * kv_heads, attended=attended)
    return dataclasses.replace(recorder.trace(), shared=per == "kv_head")


def select_over(
    kept: Trace,
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    budget: int,
    page_size: int,
    force_last_page: bool,
    layer: int,
    dense_layers: int,
) -> Trace:
    """Simulates Quest over an evicting policy, whose slots `kept` gives in order.

    Pages are consecutive slots; the page of the current token is the one that can be forced.
    """
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, None)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    recorder = Recorder(query_heads)
    for t, live in enumerate(kept.live):
        pages = budget // page_size
        outputs, attended = [], []
        for head in range(query_heads):
            kv_head = head // (query_heads // kv_heads)
            slots = live[kv_head]
            if t >= prompt_length and layer >= dense_layers:
                bounds = page_bounds(q[t, head], k[slots, kv_head], page_size)
                current = slots.index(t) // page_size if force_last_page else None
                most = max(pages, 1 if force_last_page else 3)
                chosen = pages_beside(bounds, most, current)
                slots = [slot for i, slot in enumerate(slots) if i // page_size in chosen]
            outputs.append(attend(q[t, head], k[slots, kv_head], v[slots, kv_head], scale))
            attended.append(slots)
        recorder.step(outputs, live, attended=attended)
    return recorder.trace()
