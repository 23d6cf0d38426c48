"""Rows of a store, from device memory and from host memory; refusals."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fetch_rows
from pallas_kernels.dispatch import DEFAULT_GPU, GPU
from pallas_kernels.fetch import gpu as fetch_gpu
from pallas_kernels.fetch.gpu import why_not
from pallas_kernels.fetch.reference import is_on_host
from tests.pallas_kernels.support import interpret, lower_for_cuda

ROWS, WIDTH = 50, 8
gpu = pytest.mark.gpu


def draw(dtype, memory: str, width: int = WIDTH) -> jax.Array:
    values = np.random.default_rng(0).normal(size=(ROWS, width)).astype(dtype)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    return jax.device_put(values, place)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("count", [1, 16, 37])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_rows_arrive_in_device_memory(memory, count, dtype):
    store = draw(jnp.dtype(dtype), memory)
    index = np.random.default_rng(count).integers(0, ROWS, count).astype(np.int32)
    assert is_on_host(store) == (memory == "pinned_host")
    rows = jax.jit(fetch_rows)(store, index)
    assert rows.sharding.memory_kind != "pinned_host"
    chex.assert_trees_all_equal(rows, np.asarray(store)[index])


def test_loop_fetches_rows_chosen_by_last_step():
    """The store is read inside a compiled loop, without moving."""
    store = draw(np.float32, "pinned_host")

    @jax.jit
    def chase(store, index):
        def step(index, _):
            rows = fetch_rows(store, index)
            return (jnp.abs(rows[:, 0]) * 1e3).astype(jnp.int32) % ROWS, index

        return jax.lax.scan(step, index, length=6)[1]

    want, index = [], np.array([3, 17], np.int32)
    for _ in range(6):
        want.append(index)
        index = (np.abs(np.asarray(store)[index, 0]) * np.float32(1e3)).astype(np.int32) % ROWS
    chex.assert_trees_all_equal(chase(store, want[0]), np.stack(want))


def test_gpu_kernel_in_the_interpreter():
    """Blocks of one copy, one or several per program, and blocks of two copies."""
    interpret("fetch", "mosaic_gpu", ["1:1", "16:1", "37:1", "5:4", "4:20", "3:60"])


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("block", [2, 10, 50])
def test_blocks_are_fetched_whole(memory, block):
    store = draw(np.float32, memory)
    index = np.array([ROWS // block - 1, -1, 0], np.int32)
    rows = jax.jit(fetch_rows, static_argnames="block")(store, index, block=block)
    chex.assert_shape(rows, (3 * block, WIDTH))
    blocks = np.asarray(store).reshape(-1, block, WIDTH)
    chex.assert_trees_all_equal(rows[:block], blocks[-1])
    chex.assert_trees_all_equal(rows[2 * block :], blocks[0])


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_fetch_lowers_for_a_gpu_inside_a_loop(memory):
    """The store stays in place in the loop, in either memory."""

    def total(store, index):
        step = lambda sums, one: (sums + fetch_rows(store, one).astype(jnp.float32).sum(0), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(128), index)[0]

    index = jax.ShapeDtypeStruct((5, 60), jnp.int32)
    text = lower_for_cuda(total, store=draw(jnp.dtype("bfloat16"), memory, 128), index=index)
    on_host = memory == "pinned_host"
    assert text.count("stablehlo.custom_call @mosaic_gpu") == on_host
    assert ("stablehlo.gather" in text) != on_host


@gpu
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_the_kernel_on_a_gpu(memory):
    values = np.random.default_rng(0).normal(size=(5000, 128)).astype(jnp.bfloat16)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    store = jax.device_put(values, place)
    index = np.random.default_rng(1).integers(0, 5000, 1001).astype(np.int32)
    fetch = jax.jit(fetch_rows, static_argnames=("implementation", "block"))
    kernel = "mosaic_gpu" if memory == "pinned_host" else None
    for implementation in (kernel, "xla"):
        rows = fetch(store, index, implementation=implementation)
        chex.assert_trees_all_equal(rows, values[index])
        for block in (10, 50, 500):
            of_blocks = np.where(index % 5, index % (5000 // block), -1)[:99]
            rows = fetch(store, of_blocks, implementation=implementation, block=block)
            found = np.asarray(rows).reshape(99, block, 128)[of_blocks >= 0]
            blocks = values.reshape(-1, block, 128)
            chex.assert_trees_all_equal(found, blocks[of_blocks[of_blocks >= 0]])


@pytest.mark.parametrize(
    ("card", "dtype", "width", "reason"),
    [
        (DEFAULT_GPU, "bfloat16", 128, None),
        (DEFAULT_GPU, "float8_e4m3fn", 128, None),
        (GPU("NVIDIA B200", 148, (10, 0)), "bfloat16", 64, None),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "bfloat16", 128, "9.0 (Hopper)"),
        (DEFAULT_GPU, "float8_e4m3fn", 64, "multiples of 128 bytes"),
        (DEFAULT_GPU, "bfloat16", 512, "at most 256 numbers"),
    ],
)
def test_xla_serves_unsupported_shapes_on_gpus(card, dtype, width, reason, monkeypatch):
    monkeypatch.setattr(fetch_gpu, "target_gpu", lambda: card)
    store = draw(jnp.dtype(dtype), "pinned_host", width)
    index = jnp.zeros(5, jnp.int32)
    if reason is None:
        assert why_not(store, index, block=1) is None
        return
    assert reason in str(why_not(store, index, block=1))
    on_device = jax.device_put(store, jax.memory.Space.Device)
    assert "in device memory" in str(why_not(on_device, index, block=1))


def test_refusals_name_the_limit():
    store, index = jnp.zeros((4, 6)), jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match="this one is in device memory"):
        fetch_rows(store, index, implementation="mosaic_gpu")
    unchecked = inspect.unwrap(fetch_rows)
    for bad in ((store[0], index), (store, index[None]), (store[:0], index)):
        with pytest.raises(ValueError, match="must be"):
            unchecked(*bad)
    for block in (0, -2, 3):
        with pytest.raises(ValueError, match=f"4 rows are not blocks of {block}"):
            unchecked(store, index, block=block)
    with pytest.raises(ValueError, match="integers"):
        unchecked(store, index.astype(jnp.float32))
    chex.assert_shape(fetch_rows(store, index[:0]), (0, 6))
