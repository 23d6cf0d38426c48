"""Memory of the cache: the size of the pool, and estimates before a model is loaded.

bytes(row of n slots) = ceil(n / P) pages of 2 P D numbers (and the policy's state)
live slots of T tokens = (w + 1) + (1 - f)(T - w - 1)     with a fraction f evicted past the window
time of a step >= max(bytes read / bandwidth, operations / peak)        (DMS paper, eq. 6)
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dms_jax import sharding
from dms_jax.cache.pages import few_sizes
from dms_jax.checks import Count, CountOnDevice, Positive, Ratio, check, require, show
from dms_jax.config import ModelConfig
from dms_jax.devices import DEVICES, Device
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.model.caching import (
    entry_bytes,
    layer_footprints,
    layer_page_bytes,
    state_bytes,
    tree_bytes,
)
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy, Vanilla, as_policy
from dms_jax.policies.values import Footprint


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated memory and speed of a model with a policy at a given length.

    Attributes:
      weight_bytes: memory of the parameters.
      live_tokens: slots in use per row at the end, averaged over rows.
      sequence_bytes: cache of one sequence at the end: pages and the policy's state.
      batch: number of sequences that fit in memory with the weights.
      step_seconds: roofline time of a decode step of `batch` sequences at their end.
    """

    weight_bytes: int
    live_tokens: float
    sequence_bytes: int
    batch: int
    step_seconds: float


def estimate(
    config: ModelConfig,
    policy: Policy | str | None = None,
    *,
    tokens: int,
    compression_ratio: float | int = 1.0,
    device: str | Device = "h200",
    batch: int | None = None,
    page_size: int = 64,
    dtype: Any = jnp.bfloat16,
    kv_dtype: str | None = None,
) -> Estimate:
    """Estimates memory, batch size and step time, without loading any weights.

    Args:
      config: the model's configuration.
      policy: the cache policy; `Vanilla()` if None.
      tokens: length of each sequence at its end.
      compression_ratio: 1 / (1 - fraction evicted past the window), for learned eviction.
      device: one of `DEVICES`, or a `Device`.
      batch: number of sequences; None for as many as fit.
      page_size: slots per page.
      dtype: floating-point type of parameters and cache.
      kv_dtype: "float8_e4m3" for a cache of keys and values in 8 bits.

    Raises:
      ConfigError: if an argument is not valid.
      CapacityError: if the weights, or the weights and `batch` sequences, do not fit the device.
    """
    policy = Vanilla() if policy is None else as_policy(policy)
    tokens = check("estimate: tokens", tokens, Count)
    page_size = check("estimate: page_size", page_size, CountOnDevice)
    batch = check("estimate: batch", batch, Count | None)
    compression_ratio = check("estimate: compression_ratio", compression_ratio, Ratio)
    device = _check_estimate(config, policy, compression_ratio, device)
    try:
        dtype = jnp.dtype(dtype)
    except Exception as error:  # numpy raises many different classes
        raise ConfigError(f"estimate: {show(dtype)} is not a dtype, such as 'bfloat16'.") from error
    require(
        bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 1,
        f"estimate: weights cannot have dtype {dtype}; give e.g. 'bfloat16', and kv_dtype for a "
        "cache of fewer bits.",
    )
    ratio: dict[str, Any] = dict(page_size=page_size, compression_ratio=compression_ratio)
    footprints = layer_footprints(config, policy, tokens, group=config.group_size, **ratio)
    cache_bytes = sequence_bytes(config, policy, tokens, dtype=dtype, kv_dtype=kv_dtype, **ratio)

    def mean(number: Callable[[Footprint], float]) -> float:
        """Averages a property of the footprint over the layers."""
        return sum(map(number, footprints)) / config.num_layers

    live = mean(lambda found: found.expected)
    rows = config.num_layers * config.num_kv_heads
    shapes = jax.eval_shape(
        lambda: Transformer(config, adapter=policy.retrofit.adapter, dtype=dtype, rngs=nnx.Rngs(0))
    )
    weight_bytes = tree_bytes(shapes)
    free = device.memory - weight_bytes
    fits = int(free // cache_bytes)
    if fits < (batch or 1):
        weights, room = _gigabytes(weight_bytes), _gigabytes(device.memory)
        if free <= 0:
            raise CapacityError(f"{weights} of weights do not fit {room}.")
        wanted = "1 sequence" if (batch or 1) == 1 else f"{batch} sequences"
        raise CapacityError(
            f"{wanted} of {_gigabytes(cache_bytes)} do not fit beside {weights} of weights in "
            f"{room}; {fits} would."
        )
    batch = fits if batch is None else batch
    read, attended = mean(lambda found: found.reads), mean(lambda found: found.attended)
    # A step looks up one row of the embedding; it reads all of it only if it is tied.
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    parameters = weight_bytes // dtype.itemsize - embedding
    met, reached = float(parameters), float(parameters)  # used by a token; read by a step
    if config.experts is not None:
        of_experts = (
            tree_bytes([shapes.layers.mlp.gate_up_proj, shapes.layers.mlp.down_proj])
            // dtype.itemsize
        )
        met -= of_experts * (1 - config.experts.read_by(1))
        reached -= of_experts * (1 - config.experts.read_by(batch))
    entry = entry_bytes(config, dtype, kv_dtype)
    num_bytes = reached * dtype.itemsize + batch * rows * read * entry
    operations = batch * (
        2 * met + 4 * config.num_layers * config.num_heads * config.head_dim * attended
    )
    return Estimate(
        weight_bytes=weight_bytes,
        live_tokens=live,
        sequence_bytes=cache_bytes,
        batch=batch,
        step_seconds=max(num_bytes / device.bandwidth, operations / device.peak),
    )


def sequence_bytes(
    config: ModelConfig,
    policy: Policy,
    tokens: int,
    *,
    compression_ratio: float | int = 1,
    page_size: int = 64,
    dtype: Any = jnp.bfloat16,
    kv_dtype: str | None = None,
) -> int:
    """Returns the cache bytes of a sequence after `tokens` tokens, policy state included.

    Args:
      config, policy, tokens, compression_ratio, page_size, dtype, kv_dtype: see `estimate`.
    """
    footprints = layer_footprints(
        config,
        policy,
        tokens,
        page_size=page_size,
        group=config.group_size,
        compression_ratio=compression_ratio,
    )
    pages = np.array([math.ceil(found.expected / page_size) for found in footprints])
    layer_bytes = layer_page_bytes(config, policy, page_size, dtype, kv_dtype)
    of_pages = config.num_kv_heads * int(pages @ layer_bytes)
    return of_pages + state_bytes(config, policy, dtype)


def _check_estimate(
    config: Any, policy: Any, compression_ratio: float | int, device: Any
) -> Device:
    """Returns the device; raises ConfigError for an argument that is not valid."""
    check("estimate: config", config, ModelConfig)
    if compression_ratio > 1 and not policy.retrofit.needed:
        raise ConfigError(
            f"{policy.name} compresses by its own options, not by a ratio: leave "
            "compression_ratio out, or give a policy that learns what to evict (DMS, DMC)."
        )
    if isinstance(device, str):
        if device not in DEVICES:
            raise ConfigError(
                f"Unknown device {show(device)}; known are {', '.join(DEVICES)}. Describe another "
                "with dms_jax.generation.Device."
            )
        device = DEVICES[device]
    return check("estimate: device", device, Device)


def pool_pages(
    model: LanguageModel,
    policy: Policy,
    *,
    num_lanes: int,
    max_tokens: int,
    page_size: int,
    memory: float | int | None,
    kv_dtype: str | None = None,
) -> int:
    """Returns the number of pages of the pool: those that lanes may need, limited by `memory`.

    Raises:
      ConfigError: if `memory` is not a number of bytes.
      CapacityError: if the device has less memory, or it cannot hold one page for each row of a
        sequence.
    """
    config = model.config
    rows = config.num_layers * config.num_kv_heads
    with use_mesh(model.mesh):
        axes = sharding.row_axes(num_lanes, config.num_kv_heads)
        shards = math.prod(map(sharding.axis_size, axes))
    layer_bytes = layer_page_bytes(config, policy, page_size, model.dtype, kv_dtype)
    bytes_per_page = math.ceil(layer_bytes.mean())  # every layer has its share of the pages
    state = num_lanes * state_bytes(config, policy, model.dtype)
    # Prompts that are cut at their end fill the pool in full until then.
    needed = 0
    footprints = layer_footprints(config, policy, max_tokens, page_size=page_size)
    for found, windowed in zip(footprints, config.windowed, strict=True):
        limit = max_tokens if found.at_most is None else found.at_most
        slots = max_tokens if policy.shrinks and not windowed else min(limit, max_tokens)
        needed += num_lanes * config.num_kv_heads * few_sizes(math.ceil(slots / page_size))
    free, total = (shards * size for size in _device_memory(model))
    beside = num_lanes * lane_bytes(config, max_tokens, page_size)
    if beside > free:
        raise CapacityError(
            f"{num_lanes:,} sequences at a time take {beside:,} bytes beside their pages (logits, "
            f"lengths, page tables), and the device has {free:,.0f} to spare. Use fewer lanes: the "
            "requests beyond them wait."
        )
    if memory is not None:
        memory = float(check("memory", memory, Annotated[Positive, "give bytes"]))
        if memory > total:
            raise CapacityError(
                f"memory={memory:,.0f} bytes were requested for the cache, and the device has "
                f"{total:,.0f}. Ask for less, or leave `memory` out to take all that is free."
            )
    # A program allocates the next state of a policy beside the last one.
    room = free - beside - state if memory is None else memory
    affordable = int((room - state) // bytes_per_page)
    pages = min(needed, affordable)
    if memory is None and rows < pages < needed:
        # Programs are compiled for the number of pages, and two processes seldom find the same free
        # memory. Rounding to seven bits makes the number equal for both and leaves at most 1.6%
        # unused.
        pages = max(rows, pages - pages % (1 << max(pages.bit_length() - 7, 0)))
    pages -= pages % shards
    if pages < rows:
        raise CapacityError(
            f"The cache of a sequence takes at least {rows * bytes_per_page + state:,} bytes: "
            f"{rows} rows (layers x KV heads) of one page of {page_size} tokens"
            + (f", and {state:,} bytes of state for {num_lanes} sequences" if state else "")
            + f". There are {room:,.0f} bytes. Give it more memory (`memory`), "
            "a smaller `page_size` or fewer sequences at a time"
            + (", or the policy a smaller window." if state > rows * bytes_per_page else ".")
        )
    return pages


def lane_bytes(config: ModelConfig, max_tokens: int, page_size: int) -> int:
    """Returns a lower bound on the bytes of a lane besides its pages and the policy's state.

    These are three copies of the logits for sampling (computed, scaled, filtered) in float32, and
    for each row its length, its reserved pages and its part of the page table on the host.
    """
    rows = config.num_layers * config.num_kv_heads
    return 3 * 4 * config.vocab_size + rows * (8 + 4 + 4 * math.ceil(max_tokens / page_size))


def _gigabytes(size: float | int) -> str:
    return f"{size / 1e9:.4g} GB"


def spare_bytes(model: LanguageModel) -> float:
    """Returns the bytes for activations that `pool_pages` leaves free by default.

    That is a tenth of an accelerator's free memory before the pool is allocated.
    """
    return 0.1 * _device_memory(model)[1]


def _device_memory(model: LanguageModel) -> tuple[float, float]:
    """Returns the bytes that a cache may take on the model's device by default, and at most.

    The default is nine tenths of an accelerator's free memory, in one piece, or half of the host's
    memory on a CPU, where the maximum is all memory of the machine.
    """
    device = next(iter(model.transformer.embedding[...].devices()))
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return free_memory(stats)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = pathlib.Path("/proc/meminfo").read_text().split()
        free = 1024 * int(fields[fields.index("MemAvailable:") + 1])
    except (OSError, ValueError):  # not Linux
        free = total
    return 0.5 * free, float(total)


def free_memory(stats: dict[str, int]) -> tuple[float, float]:
    """Returns (nine tenths of the free bytes, at most the largest block; all bytes) of a device.

    Arrays loaded after an earlier cache may fragment the free memory, so that a new cache, with one
    array of keys and one of values, finds no room although enough is free.

    Args:
      stats: statistics of its allocator (`jax.Device.memory_stats`).
    """
    free = float(stats["bytes_limit"] - stats["bytes_in_use"])
    piece, taken = (stats.get(name, 0) for name in ("largest_free_block_bytes", "pool_bytes"))
    if not (piece and taken):  # the allocator does not report them
        return 0.9 * free, free
    piece = max(piece, stats["bytes_limit"] - taken)  # it may take more from the device
    return min(0.9 * free, float(piece)), free
