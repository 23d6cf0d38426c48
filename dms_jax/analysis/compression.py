"""Which tokens each head evicts, and how many it keeps."""

import functools

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine
from dms_jax.model.language_model import LanguageModel, check_tokens, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.policies.delayed_eviction import DelayedEviction


def evictions(
    model: LanguageModel,
    tokens: Int[np.ndarray, "B T"],
    *,
    policy: Policy | None = None,
) -> Bool[np.ndarray, "L B K T"]:
    """Returns which keys each head evicts when they leave the window.

    A key on which no later token has decided yet counts as kept.

    Raises:
      ConfigError: the policy decides from attention, not from the tokens.
    """
    policy = model.resolve_policy(policy)
    if not isinstance(policy, DelayedEviction):
        raise ConfigError(
            f"{policy.name} does not decide token by token what to evict. Evictions are shown for "
            "policies that do, such as DMS, StreamingLLM and RandomEviction."
        )
    check_tokens(np.asarray(tokens), model.config)
    with use_mesh(model.mesh):
        marks = np.asarray(_marks(model.transformer, tokens, policy)) > 0
    shift = policy.mark_shift
    evicted = np.zeros_like(marks)
    decided = max(marks.shape[-1] - shift, 0)
    evicted[..., :decided] = marks[..., shift:]
    return evicted


def live_after(evicted: Bool[np.ndarray, "... T"], window: int) -> Int[np.ndarray, "..."]:
    """Returns how many keys the last query sees: its own, the window, and the kept keys before.

    # window=1  In: [1, 0, 1, 1]  Out: 3 (key 1 is kept; keys 2 and 3 are in the window)
    """
    num_tokens = evicted.shape[-1]
    far = max(num_tokens - window - 1, 0)
    return num_tokens - evicted[..., :far].sum(-1)


@functools.partial(jax.jit, static_argnames="policy")
def _marks(transformer: Transformer, tokens: Array, policy: Policy) -> Array:
    return transformer(tokens, policy).decisions


def memory_trace(
    model: LanguageModel,
    tokens: Int[np.ndarray, "B T"],
    *,
    policy: Policy | None = None,
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
    runner.set_max_lengths(dict(enumerate([tokens.shape[1]] * len(tokens))))
    steps = (tokens.shape[1] - 1) // chunk
    seen, held, live = [0], [0], [0]
    for index in range(steps):
        counts = np.full(len(tokens), chunk)
        runner.reserve(counts)
        runner.teacher_forced_decode(
            np.ascontiguousarray(tokens[:, index * chunk : (index + 1) * chunk + 1].T), counts
        )
        runner.trim()
        seen.append((index + 1) * chunk)
        held.append(runner.allocator.pages_in_use * page_size * slot_bytes)
        live.append(int(runner.lengths.sum()) * slot_bytes)
    return seen, held, live
