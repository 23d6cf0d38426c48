"""Rows of a store: out of device memory, out of host memory, and what is refused."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fetch_rows
from pallas_kernels.dispatch import DEFAULT_GPU, GPU
from pallas_kernels.fetch import gpu as fetch_gpu
from pallas_kernels.fetch.gpu import fetch_rows_triton, why_not
from pallas_kernels.fetch.reference import is_on_host
from tests.pallas_kernels.support import lower_for_cuda

ROWS, WIDTH = 50, 8
gpu = pytest.mark.gpu


def draw(dtype, memory: str) -> jax.Array:
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(dtype)
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


def test_a_loop_fetches_what_the_round_before_asks_for():
    """The store is read inside a compiled loop, where it stays."""
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


@pytest.mark.parametrize("count", [1, 16, 37])
def test_the_kernel_gathers_the_same(count):
    store = draw(np.float32, "device")
    index = np.random.default_rng(count).integers(0, ROWS, count).astype(np.int32)
    rows = fetch_rows_triton(store, jnp.asarray(index), interpret=True)
    chex.assert_trees_all_equal(rows, np.asarray(store)[index])


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_it_lowers_for_a_gpu_inside_a_loop(memory):
    """Where the store stays in the loop, wherever it lies."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)

    def total(store, index):
        step = lambda sums, one: (sums + fetch_rows(store, one).astype(jnp.float32).sum(0), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(128), index)[0]

    text = lower_for_cuda(
        total,
        store=jax.ShapeDtypeStruct((1000, 128), jnp.bfloat16, sharding=place),
        index=jax.ShapeDtypeStruct((5, 60), jnp.int32),
    )
    assert text.count("stablehlo.custom_call") == 1
    assert "fetch_rows_triton" in text


@gpu
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_the_kernel_on_a_gpu(memory):
    values = np.random.default_rng(0).normal(size=(5000, 128)).astype(jnp.bfloat16)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    store = jax.device_put(values, place)
    index = np.random.default_rng(1).integers(0, 5000, 1001).astype(np.int32)
    fetch = jax.jit(fetch_rows, static_argnames="implementation")
    for implementation in ("triton", "xla"):
        rows = fetch(store, index, implementation=implementation)
        chex.assert_trees_all_equal(rows, values[index])


@pytest.mark.parametrize(
    ("card", "dtype", "numbers", "kernel"),
    [
        (GPU("Tesla T4", 40, (7, 5)), "bfloat16", 1 << 12, False),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "bfloat16", 1 << 12, True),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "float8_e4m3fn", 1 << 12, False),
        (DEFAULT_GPU, "float8_e4m3fn", 1 << 31, True),
        # In arrays of 2 to 4 GiB Pallas counts numbers of a byte in 32 bits, with a sign.
        (DEFAULT_GPU, "float8_e4m3fn", (1 << 31) + 128, False),
        (DEFAULT_GPU, "float8_e4m3fn", (1 << 32) + 128, True),
        (DEFAULT_GPU, "bfloat16", (1 << 31) + 128, True),
    ],
)
def test_what_a_card_cannot_do_is_left_to_xla(card, dtype, numbers, kernel, monkeypatch):
    monkeypatch.setattr(fetch_gpu, "target_gpu", lambda: card)
    text = lower_for_cuda(
        fetch_rows,
        store=jax.ShapeDtypeStruct((numbers // 128, 128), jnp.dtype(dtype)),
        index=jax.ShapeDtypeStruct((5,), jnp.int32),
    )
    assert ("fetch_rows_triton" in text) == kernel
    assert ("stablehlo.gather" in text) != kernel


def test_float64_stays_what_it_is():
    with jax.enable_x64(True):
        store = jnp.asarray(np.random.default_rng(0).normal(size=(9, 8)))
        rows = fetch_rows(store, jnp.array([8, 0]))
        chex.assert_trees_all_equal(rows, store[np.array([8, 0])])
        with pytest.raises(NotImplementedError, match="float64"):
            fetch_rows(store, jnp.array([8, 0]), implementation="triton")


def test_what_no_kernel_serves_is_said():
    store, index = jnp.zeros((4, 6)), jnp.zeros(3, jnp.int32)
    assert "6 numbers" in why_not(store, index)
    with pytest.raises(NotImplementedError, match="6 numbers"):
        fetch_rows(store, index, implementation="triton")
    unchecked = inspect.unwrap(fetch_rows)
    for bad in ((store[0], index), (store, index[None]), (store[:0], index)):
        with pytest.raises(ValueError, match="must be"):
            unchecked(*bad)
    with pytest.raises(ValueError, match="integers"):
        unchecked(store, index.astype(jnp.float32))
    chex.assert_shape(fetch_rows(store, index[:0]), (0, 6))
