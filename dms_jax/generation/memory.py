"""How much a cache needs: the pool's size, and estimates before anything runs.

bytes(row of n slots) = ceil(n / P) pages of 2 P D numbers (and the policy's state)
live slots of T tokens = (w + 1) + (1 - f)(T - w - 1)     with a share f evicted past the window
time of a step >= max(bytes read / bandwidth, operations / peak)        (DMS paper, eq. 6)
"""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.model.caching import page_bytes, state_bytes, tree_bytes
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy, Vanilla


@dataclasses.dataclass(frozen=True)
class Device:
    """What an accelerator offers, from its data sheet.

    Attributes:
      memory: bytes.
      bandwidth: bytes a second.
      peak: bfloat16 operations a second.
    """

    memory: float
    bandwidth: float
    peak: float


DEVICES = {
    "h200": Device(141e9, 4.8e12, 989e12),
    "h100": Device(80e9, 3.35e12, 989e12),
    "a100": Device(80e9, 2.04e12, 312e12),
    "l4": Device(24e9, 300e9, 121e12),
    "t4": Device(16e9, 320e9, 65e12),
    "v5e": Device(16e9, 819e9, 197e12),
    "v5p": Device(95e9, 2.77e12, 459e12),
    "v6e": Device(32e9, 1.64e12, 918e12),
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What to expect of a model, a policy and a length.

    Attributes:
      weight_bytes: of the parameters.
      live_tokens: slots in use per row at the end, averaged over rows.
      sequence_bytes: cache of one sequence at the end: pages and the policy's state.
      batch: sequences that fit beside the weights.
      step_seconds: roofline time of a decode step of `batch` sequences at their end.
    """

    weight_bytes: int
    live_tokens: float
    sequence_bytes: int
    batch: int
    step_seconds: float


def estimate(
    config: ModelConfig,
    policy: Policy | None = None,
    *,
    tokens: int,
    compression_ratio: float = 1.0,
    device: str | Device = "h200",
    batch: int | None = None,
    page_size: int = 64,
    dtype: Any = jnp.bfloat16,
) -> Estimate:
    """Estimates memory, batch and step time, before any weight is loaded.

    Args:
      config: the model.
      policy: `Vanilla()` if None.
      tokens: length of each sequence at its end.
      compression_ratio: for learned eviction, 1 / (1 - share of tokens evicted past the window).
      device: one of `DEVICES`, or a `Device`.
      batch: sequences; None for as many as fit.
      page_size: slots a page.
      dtype: of parameters and cache.

    Raises:
      ConfigError: an argument does not fit.
      CapacityError: the weights, or `batch` sequences beside them, do not fit the device.
    """
    policy = Vanilla() if policy is None else policy
    if isinstance(device, str):
        if device not in DEVICES:
            raise ConfigError(f"Unknown device {device!r}; known are {', '.join(DEVICES)}.")
        device = DEVICES[device]
    if tokens < 1 or compression_ratio < 1:
        raise ConfigError(
            f"tokens and compression_ratio must be at least 1, got {tokens}, {compression_ratio}."
        )
    live = expected_live_tokens(policy, tokens, compression_ratio, page_size)
    rows = config.num_layers * config.num_kv_heads
    pages = math.ceil(live / page_size)
    sequence_bytes = rows * pages * page_bytes(config, policy, page_size, dtype)
    sequence_bytes += state_bytes(config, policy, dtype)
    shapes = jax.eval_shape(
        lambda: Transformer(config, adapter=policy.uses_adapter, dtype=dtype, rngs=nnx.Rngs(0))
    )
    weight_bytes = tree_bytes(shapes)
    fits = int((device.memory - weight_bytes) // sequence_bytes)
    if fits < (batch or 1):
        raise CapacityError(
            f"{batch or 1} sequences of {sequence_bytes / 1e9:.2f} GB do not fit beside "
            f"{weight_bytes / 1e9:.2f} GB of weights in {device.memory / 1e9:.0f} GB."
        )
    batch = fits if batch is None else batch
    read = reads_per_step(policy, live, config, page_size)
    entry_bytes = 2 * config.head_dim * jnp.dtype(dtype).itemsize
    num_bytes = weight_bytes + batch * rows * read * entry_bytes
    parameters = weight_bytes / jnp.dtype(dtype).itemsize
    operations = batch * (
        2 * parameters + 4 * config.num_layers * config.num_heads * config.head_dim * live
    )
    return Estimate(
        weight_bytes=weight_bytes,
        live_tokens=live,
        sequence_bytes=sequence_bytes,
        batch=batch,
        step_seconds=max(num_bytes / device.bandwidth, operations / device.peak),
    )


def expected_live_tokens(
    policy: Policy, tokens: int, compression_ratio: float, page_size: int
) -> float:
    """Live slots of a row after `tokens` tokens; for learned eviction at the given ratio."""
    limit = policy.slot_limit(page_size)
    if limit is not None:
        return min(limit, tokens)
    window = min(policy.visible_window + 1, tokens) if policy.learned else tokens
    return window + (tokens - window) / compression_ratio


def reads_per_step(policy: Policy, live: float, config: ModelConfig, page_size: int) -> float:
    """Entries read per row and step; selection per query head reads once per query head."""
    budget = policy.read_budget
    if budget is None or budget >= live:
        return live
    return budget * config.num_heads / config.num_kv_heads + live / page_size


def pool_pages(
    model: LanguageModel,
    policy: Policy,
    *,
    num_lanes: int,
    max_tokens: int,
    page_size: int,
    memory: int | None,
) -> int:
    """Pages of the pool: what `memory` bytes hold, or what the lanes can come to need.

    Raises:
      CapacityError: if the memory does not hold one page per row of a sequence.
    """
    config = model.config
    rows = config.num_layers * config.num_kv_heads
    with use_mesh(model.mesh):
        data, heads = sharding.row_axes(num_lanes, config.num_kv_heads)
        shards = (sharding.axis_size(data) if data else 1) * (
            sharding.axis_size(heads) if heads else 1
        )
    bytes_per_page = page_bytes(config, policy, page_size, model.dtype)
    state = num_lanes * state_bytes(config, policy, model.dtype)
    limit = policy.slot_limit(page_size)
    slots = max_tokens if limit is None else min(limit, max_tokens)
    needed = num_lanes * rows * math.ceil(slots / page_size)
    if memory is None:
        affordable = int((_free_memory() - state) // bytes_per_page)
        pages = min(needed, affordable)
    else:
        pages = int((memory - state) // bytes_per_page)
    pages -= pages % shards
    if pages < rows:
        raise CapacityError(
            f"The cache of one sequence needs at least {rows} pages ({rows * bytes_per_page:,} "
            f"bytes, beside {state:,} bytes of policy state); there is memory for "
            f"{max(pages, 0)}. Give it more memory or a smaller page size."
        )
    return pages


def _free_memory() -> float:
    """Nine tenths of the default device's free memory; half of the host's on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return 0.9 * (stats["bytes_limit"] - stats["bytes_in_use"])
    return 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
