"""Creates empty caches, and computes their memory."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from dms_jax import sharding
from dms_jax.cache import Cache, Pool
from dms_jax.cache.quantization import stored_vector
from dms_jax.config import ModelConfig
from dms_jax.model.layer_loop import ByCache, check_layers, roles, window_policy
from dms_jax.policies.base import Policy
from dms_jax.policies.values import CacheShape, Footprint, PolicyState


def init_cache(
    config: ModelConfig,
    policy: Policy,
    *,
    num_sequences: int,
    num_pages: int,
    page_size: int = 64,
    table_width: int = 1,
    dtype: Any = jnp.bfloat16,
    kv_dtype: str | None = None,
    value_pages: int | None = None,
) -> Cache:
    """Returns an empty cache with no page reserved.

    Args:
      config: the model's configuration.
      policy: the policy, whose state is carried with the pool.
      num_sequences: number of sequences that the cache can hold at a time (B).
      num_pages: number of pages of the pool over all devices (N).
      page_size: slots per page (P).
      table_width: number of pages that a row can address (M).
      dtype: floating-point type of keys, values and the policy's state.
      kv_dtype: "float8_e4m3" for keys and values in 8 bits, with their scales.
      value_pages: number of pages, from the first, whose values are on the device; None for all.

    Raises:
      ConfigError: the policy's state does not declare its axes (`sharding.axes`), or the cache does
        not support the kv_dtype.
    """
    vector, scales = stored_vector(config.head_dim, dtype, kv_dtype)

    def zeros(of: Any, pages: int) -> Any:
        return None if of is None else jnp.zeros((pages, page_size, *of.shape), of.dtype)

    rows = (config.num_layers, num_sequences, config.num_kv_heads)
    state = init_state(
        config,
        policy,
        cache_shape(
            config, dtype, num_sequences=num_sequences, num_pages=num_pages, page_size=page_size
        ),
    )
    sharding.declared_axes(state)
    return Cache(
        pool=Pool(
            k_pages=zeros(vector, num_pages),
            v_pages=zeros(vector, num_pages if value_pages is None else value_pages),
            k_scales=zeros(scales, num_pages),
            v_scales=zeros(scales, num_pages),
        ),
        page_table=jnp.full((*rows, table_width), num_pages, jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        seen=jnp.zeros(num_sequences, jnp.int32),
        max_lengths=jnp.zeros(num_sequences, jnp.int32),
        row_state=of_layers(config, state.rows),
        page_state=state.pages,
    )


def init_state(config: ModelConfig, policy: Policy, shape: CacheShape) -> PolicyState:
    """Returns the policy's state of a layer's empty rows and of empty pages.

    With windowed layers the rows' state is a `ByCache`; the state by page belongs to the layers
    without a window.
    """
    state = policy.init_state(shape)
    if config.window is None:
        return state
    windowed = window_policy(config).init_state(shape).rows
    growing = state.rows if config.num_full_layers else None
    return dataclasses.replace(state, rows=ByCache(growing=growing, windowed=windowed))


def of_layers(config: ModelConfig, rows: Any) -> Any:
    """Returns the state of the rows of all layers, given the state of one layer of each kind."""

    def repeated(tree: Any, count: int) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)

    if not isinstance(rows, ByCache):
        return repeated(rows, config.num_layers)
    growing = config.num_full_layers
    return ByCache(
        growing=repeated(rows.growing, growing),
        windowed=repeated(rows.windowed, config.num_layers - growing),
    )


def cache_shape(
    config: ModelConfig,
    dtype: Any,
    *,
    num_sequences: int = 1,
    num_pages: int = 0,
    page_size: int = 1,
) -> CacheShape:
    """Returns the sizes from which a policy initializes its state for one layer of a model."""
    return CacheShape(
        num_sequences=num_sequences,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        group=config.group_size,
        num_pages=num_pages,
        page_size=page_size,
    )


def frozen_slots(config: ModelConfig, policy: Policy, cache: Cache) -> Array | None:
    """Returns how many of each row's first slots are never written again, Int[L, B, K].

    None if they are those in use or none; see `Policy.frozen_slots`.
    """
    if config.window is None:
        if policy.appends:
            return None
        return policy.frozen_slots(cache.row_state, cache.lengths, cache.seen)
    full = np.flatnonzero(~np.asarray(config.windowed))
    if not full.size:
        return None
    found = policy.frozen_slots(cache.row_state.growing, cache.lengths[full], cache.seen)
    return None if found is None else jnp.zeros_like(cache.lengths).at[full].set(found)


def cache_specs(cache: Cache, num_kv_heads: int) -> Any:
    """Returns the partition spec of every array of a cache under the current mesh."""
    data, model = sharding.row_axes(cache.seen.shape[0], num_kv_heads)
    state = PolicyState(rows=cache.row_state, pages=cache.page_state)
    state = sharding.partition(state, data, model)
    rest = dataclasses.replace(cache, row_state=(), page_state=())
    return dataclasses.replace(
        sharding.partition(rest, data, model),
        row_state=jax.tree.map(lambda spec: PartitionSpec(None, *spec), state.rows),
        page_state=state.pages,
    )


def layer_footprints(
    config: ModelConfig, policy: Policy, tokens: int, **options: Any
) -> list[Footprint]:
    """Returns the footprint of a row of each layer after `tokens` tokens; see `Policy.footprint`.

    Raises:
      ConfigError: see `check_layers`.
    """
    check_layers(config, policy)
    each = roles(config, policy)
    of_role = {id(role): role.policy.footprint(tokens, **options) for role in each}
    return [of_role[id(role)] for role in each]


def layer_page_bytes(
    config: ModelConfig, policy: Policy, page_size: int, dtype: Any, kv_dtype: str | None = None
) -> Int[np.ndarray, " L"]:
    """Returns the bytes of one page of each layer on the device, without values on the host."""
    whole = page_bytes(config, policy, page_size, dtype, kv_dtype)
    values = page_size * tree_bytes(stored_vector(config.head_dim, dtype, kv_dtype)[0])
    on_host = [role.group.host_values for role in roles(config, policy)]
    return whole - values * np.array(on_host)


def page_bytes(
    config: ModelConfig, policy: Policy, page_size: int, dtype: Any, kv_dtype: str | None = None
) -> int:
    """Returns the bytes of one page: keys, values, and the policy's state per page."""
    shape = cache_shape(config, dtype, num_pages=1, page_size=page_size)
    state = jax.eval_shape(lambda: policy.init_state(shape).pages)
    return page_size * entry_bytes(config, dtype, kv_dtype) + tree_bytes(state)


def entry_bytes(config: ModelConfig, dtype: Any, kv_dtype: str | None = None) -> int:
    """Returns the bytes of one token's key and value in one row, including their scales."""
    return 2 * tree_bytes(stored_vector(config.head_dim, dtype, kv_dtype))


def state_bytes(config: ModelConfig, policy: Policy, dtype: Any) -> int:
    """Returns the bytes of the policy's state for one sequence, over all its rows."""

    def rows() -> Any:
        return of_layers(config, init_state(config, policy, cache_shape(config, dtype)).rows)

    return tree_bytes(jax.eval_shape(rows))


def tree_bytes(tree: Any) -> int:
    """Returns the total bytes of the arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
