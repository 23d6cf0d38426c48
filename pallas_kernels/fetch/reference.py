"""The gather of rows in plain XLA: on the device, or by the CPU for a store in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int, Shaped


def is_on_host(x: Array) -> bool:
    """Returns whether an array is in host memory, also while tracing."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetch_rows_xla(
    store: Shaped[Array, "S D"], index: Int[Array, " n"], *, block: int
) -> Shaped[Array, "n_block D"]:
    """Computes `fetch_rows` in XLA."""
    if block > 1:
        last = store.shape[0] // block - 1
        rows = jnp.clip(index, 0, last)[:, None] * block + jnp.arange(block, dtype=index.dtype)
        index = rows.reshape(-1)

    def gather(store, index):
        return store.at[index].get(mode="promise_in_bounds")

    if not is_on_host(store):
        return gather(store, index)
    run: Any = compute_on  # typed only as a context manager, but also a decorator
    on_host = run(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return on_host(store, jax.device_put(index, jax.memory.Space.Host))
