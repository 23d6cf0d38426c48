"""The memory of the pool while sequences grow."""

import numpy as np
from jaxtyping import Int

from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import SCORED, scored_request
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy


def memory_trace(
    model: LanguageModel,
    tokens: Int[np.ndarray, "B T"],
    *,
    policy: Policy | str | None = None,
    chunk: int = 32,
    page_size: int = 16,
) -> tuple[list[int], list[int], list[int]]:
    """Feeds sequences token by token through the cache and records the size of the pool.

    Returns:
      After each chunk: tokens per sequence, bytes of the pages held after unused pages of the chunk
      are returned, and bytes of the live slots alone.
    """
    engine = Engine(
        model,
        policy,
        num_lanes=len(tokens),
        max_tokens=tokens.shape[1] + chunk,
        page_size=page_size,
        chunk=chunk,
    )
    runner, config = engine.runner, model.config
    slot_bytes = 2 * config.head_dim * np.dtype(model.dtype).itemsize
    requests = [
        scored_request(config, index, [], each, len(each))
        for index, each in enumerate(tokens.tolist())
    ]
    seen, held, live = [0], [0], [0]
    # Somebody listens, so that no chunk is launched before the last one was collected.
    source = Source(requests, SCORED, on_tokens=lambda update: None, keep=True)
    with engine.open(source) as call:
        while call.step():
            seen.append(int(runner.seen[0]))
            held.append(runner.reservation.allocator.pages_in_use * page_size * slot_bytes)
            live.append(int(runner.reservation.lengths.sum()) * slot_bytes)
    return seen, held, live
