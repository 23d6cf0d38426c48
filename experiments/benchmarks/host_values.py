"""How fast a compiled decode loop can fetch rows of values that live in host memory (KCache).

Each way runs in a process of its own, because some may not be supported and take the process down.
The shapes are those of Llama-3.1-8B: 32 query heads each fetch N rows of 128 bfloat16 numbers a
layer, out of a context of 32768 tokens of 8 KV heads. What is timed is one layer's fetch inside
one compiled loop; indices depend on what was fetched before, so nothing overlaps by itself.

    device      rows gathered from device memory: what the fetch would cost without the host
    compute_on  gathered by the host's processor, in `compute_on("device_host")`
    in_place    the ordinary gather of the GPU over host memory that it can address (mapped)
    kernel      `fetch_rows`, a Pallas kernel over an operand in `pinned_host`
    callback    `pure_callback` to NumPy
    reload      the whole layer's values copied to the device, then gathered there

Besides: bandwidths of the link, top-N of a layer's scores in several ways, and whether copies of a
prompt's values to the host hide behind its computation.

    python -m experiments.benchmarks.host_values --out experiments/results/kernels
"""

import ctypes
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks.host_value_parts import (
    CONTEXT,
    DEVICE,
    HEAD_DIM,
    HEADS,
    HOST,
    KV_HEADS,
    LAYERS,
    measure_overlap,
    measure_scores,
    measure_top,
    seconds,
)
from experiments.benchmarks.kernel_timing import require_gpu
from experiments.benchmarks.settings import check_numbers
from pallas_kernels import fetch_rows


def pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def pattern(num_rows: int) -> np.ndarray:
    """Values that tell their own row: row i holds i mod 251 in every place."""
    column = (np.arange(num_rows) % 251).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(np.broadcast_to(column[:, None], (num_rows, HEAD_DIM)))


def indices(random, rounds: int, batch: int, top: int) -> np.ndarray:
    """[rounds, B * H * N]: rows of the flat store that each layer's heads fetch."""
    layer = random.integers(0, LAYERS, (rounds, 1, 1, 1))
    row = np.arange(batch * HEADS)[:, None] // (HEADS // KV_HEADS)
    token = random.integers(0, CONTEXT, (rounds, 1, batch * HEADS, top))
    index = (layer * batch * KV_HEADS + row) * CONTEXT + token
    return index.reshape(rounds, -1).astype(np.int32)


def chain(gather):
    """A loop of fetches, each of whose indices wait for the fetch before."""

    def run(values, index):
        def body(total, one):
            one = one + (total[0] * 0).astype(jnp.int32)
            rows = gather(values, one)
            return total + rows.astype(jnp.float32).sum(0), None

        return jax.lax.scan(body, jnp.zeros(HEAD_DIM, jnp.float32), index)[0]

    return jax.jit(run)


def on_device(values, index):
    return values.at[index].get(mode="promise_in_bounds")


def on_host(values, index):
    from jax.experimental.compute_on import compute_on

    on: Any = compute_on
    gather = on(on_device, compute_type="device_host", out_memory_spaces=DEVICE)
    return gather(values, jax.device_put(index, HOST))


def written_on_host(values, index, rows):
    from jax.experimental.compute_on import compute_on

    def write(values, index, rows):
        return values.at[index].set(rows, mode="promise_in_bounds")

    on: Any = compute_on
    there = on(write, compute_type="device_host", out_memory_spaces=HOST)
    return there(values, jax.device_put(index, HOST), jax.device_put(rows, HOST))


def measure_carried() -> dict:
    """The store rides in the loop: every round fetches, and writes a row for each KV head."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(values, index):
        def body(carry, one):
            values, total = carry
            one = one + (total[0] * 0).astype(jnp.int32)
            total = total + on_host(values, one).astype(jnp.float32).sum(0)
            new = one[: batch * KV_HEADS]
            rows = on_host(values, new)  # what is there: the sums stay the same
            return (written_on_host(values, new, rows), total), None

        return jax.lax.scan(body, (values, jnp.zeros(HEAD_DIM, jnp.float32)), index)[0]

    report = {}
    for batch in (1, 8):
        values = jax.device_put(pattern(LAYERS * batch * KV_HEADS * CONTEXT), pinned())
        index = indices(np.random.default_rng(0), 16, batch, 128)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            values, total = jax.block_until_ready(run(values, index))
            times.append(time.perf_counter() - start)
        want = (index % 251).sum(dtype=np.float64)
        report[f"batch {batch}, N 128"] = {
            "microseconds": min(times) / len(index) * 1e6,
            "memory": values.sharding.memory_kind,
            "right": bool(np.allclose(total, want, rtol=1e-3)),
        }
    return report


def in_kernel(values, index):
    return fetch_rows(values, index, implementation="mosaic_gpu")


def through_callback(host_values):
    def gather(values, index):
        del values
        shape = jax.ShapeDtypeStruct((index.size, HEAD_DIM), jnp.bfloat16)
        return jax.pure_callback(lambda i: host_values[np.asarray(i)], shape, index)

    return gather


class Mapped:
    """Host memory that the GPU addresses as its own, shown to JAX as an array on the GPU."""

    def __init__(self, shape: tuple[int, ...]):
        cuda = ctypes.CDLL("libcuda.so.1")
        context, pointer = ctypes.c_void_p(), ctypes.c_void_p()
        size = int(np.prod(shape)) * 2
        for status in (
            cuda.cuInit(0),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            cuda.cuCtxSetCurrent(context),
            cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), 1 | 2),
        ):
            if status:
                raise RuntimeError(f"the driver says {status}")
        self.pointer, self.shape = pointer.value, shape
        raw = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint16)), shape)
        self.numpy = raw.view(ml_dtypes.bfloat16)

    def __dlpack_device__(self):
        return 2, 0  # CUDA, device 0

    def __dlpack__(self, **_):
        class Tensor(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p),
                ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p),
            )

        ndim = len(self.shape)
        sizes = (ctypes.c_int64 * ndim)(*self.shape)
        strides = (ctypes.c_int64 * ndim)(*np.cumprod([1, *self.shape[:0:-1]])[::-1].tolist())
        tensor = Tensor(self.pointer, 2, 0, ndim, 4, 16, 1, sizes, strides, 0, None, None)
        self.keep = (tensor, sizes, strides)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(tensor), b"dltensor", None)


def measure_fetch(way: str) -> dict:
    """Microseconds of a layer's fetch, for batches and N."""
    report = {}
    for batch in (1, 8):
        num_rows = LAYERS * batch * KV_HEADS * CONTEXT
        if way in ("in_place", "callback"):
            host = Mapped((num_rows, HEAD_DIM)) if way == "in_place" else None
            store = pattern(num_rows)
            if host is not None:
                host.numpy[:] = store
                values = jax.dlpack.from_dlpack(host)
                gather = on_device
            else:
                values, gather = jnp.zeros(()), through_callback(store)
        elif way == "device":
            values, gather = jnp.asarray(pattern(num_rows)), on_device
        else:
            values = jax.device_put(pattern(num_rows), pinned())
            gather = {"compute_on": on_host, "kernel": in_kernel}[way]
        run = chain(gather)
        for top in (32, 128):
            index = indices(np.random.default_rng(0), 16, batch, top)
            want = (index % 251).sum(dtype=np.float64)
            got = np.asarray(run(values, index))
            taken = seconds(run, values, index) / len(index)
            size = index[0].size * HEAD_DIM * 2
            report[f"batch {batch}, N {top}"] = {
                "microseconds": taken * 1e6,
                "bytes": size,
                "gigabytes a second": size / taken / 1e9,
                "right": bool(np.allclose(got, want, rtol=1e-3)),
            }
            if host is not None and batch == 1 and top == 32:
                row = int(index[0, 0])
                host.numpy[row] = 1000  # between programs: must be seen by the next
                changed = np.asarray(run(values, index))
                host.numpy[row] = row % 251
                report["a write by the host is seen"] = bool((changed > got).all())
                memory = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
                report["peak device bytes"] = memory
                report["store bytes"] = num_rows * HEAD_DIM * 2
    return report


def measure_reload() -> dict:
    num_rows = KV_HEADS * CONTEXT
    values = jax.device_put(pattern(num_rows * LAYERS).reshape(LAYERS, num_rows, -1), pinned())

    @jax.jit
    def run(values):
        def body(total, layer):
            rows = jax.device_put(
                jax.lax.dynamic_index_in_dim(values, layer, keepdims=False), DEVICE
            )
            return total + rows[:: num_rows // 64].astype(jnp.float32).sum(0), None

        return jax.lax.scan(body, jnp.zeros(HEAD_DIM), jnp.arange(LAYERS))[0]

    taken = seconds(run, values) / LAYERS
    size = num_rows * HEAD_DIM * 2
    return {"microseconds": taken * 1e6, "gigabytes a second": size / taken / 1e9}


def measure_link() -> dict:
    """Bandwidths in GB/s of contiguous copies, and of the device's own memory."""
    size = 1 << 30
    host = jax.device_put(np.zeros((size // 2 // 1024, 1024), ml_dtypes.bfloat16), pinned())
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    device = jax.device_put(host, there)
    read = jax.jit(lambda x: x.astype(jnp.float32).sum())
    return {
        "host to device": size / seconds(jax.device_put, host, there) / 1e9,
        "device to host": size / seconds(jax.device_put, device, pinned()) / 1e9,
        "device read": size / seconds(read, device) / 1e9,
    }


WAYS = {
    "link": measure_link,
    "device": lambda: measure_fetch("device"),
    "compute_on": lambda: measure_fetch("compute_on"),
    "compute_on_carried": measure_carried,
    "in_place": lambda: measure_fetch("in_place"),
    "kernel": lambda: measure_fetch("kernel"),
    "callback": lambda: measure_fetch("callback"),
    "reload": measure_reload,
    "top": measure_top,
    "scores": measure_scores,
    "overlap": measure_overlap,
}


def break_evens(report: dict) -> dict:
    """S / N beyond which fetching is faster than reading all values, by the measured rates.

    Of device memory the rate of decode attention over keys and values counts, of the link that of
    the kernel's fetches at batch 8, and of contiguous copies for comparison.
    """
    from dms_jax.config import ModelConfig
    from experiments.benchmarks.host_value_bounds import break_even

    def model(kv_heads: int) -> ModelConfig:
        return ModelConfig(128256, 4096, 14336, 32, HEADS, kv_heads, HEAD_DIM, 131072)

    read = 2 * 8 * KV_HEADS * CONTEXT * HEAD_DIM * 2
    device = read / report["scores"]["keys and values, batch 8"] * 1e6
    rates = {
        "fetches": report["kernel"]["batch 8, N 128"]["gigabytes a second"] * 1e9,
        "contiguous copies": report["link"]["host to device"] * 1e9,
    }
    return {"device GB/s": device / 1e9} | {
        f"{name}, {heads} query heads a KV head": break_even(
            model(HEADS // heads), device_bandwidth=device, link_bandwidth=rate
        )
        for name, rate in rates.items()
        for heads in (1, HEADS // KV_HEADS)
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """Time fetches of values from host memory."""

    out: pathlib.Path = pathlib.Path("runs/kcache")
    """Folder for the figures, host_values.json."""
    way: str | None = None
    """One way in this process, printed as JSON."""
    limit: float = 45.0
    """Seconds that a way may take."""

    def __post_init__(self):
        check_numbers(self)


def main(config: Config) -> None:
    """Times every way in a process of its own; writes the figures as they come."""
    if config.way is not None:
        check_names("--way", [config.way], WAYS)
        require_gpu()
        print(json.dumps(WAYS[config.way]()))
        return
    make_folder("--out", config.out)
    report = {
        "shapes": dict(
            heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, context=CONTEXT, layers=LAYERS
        ),
        "date": time.strftime("%Y-%m-%d"),
        "jax": jax.__version__,
    }
    for way in WAYS:
        started = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "experiments.benchmarks.host_values", "--way", way],
                capture_output=True,
                text=True,
                timeout=config.limit,
            )
            lines = done.stdout.strip().splitlines()
            report[way] = (
                json.loads(lines[-1])
                if done.returncode == 0 and lines
                else {"failed": done.returncode, "says": done.stderr.strip()[-1200:]}
            )
        except subprocess.TimeoutExpired:
            report[way] = {"failed": f"took more than {config.limit} s"}
        print(
            f"{way} ({time.perf_counter() - started:.0f} s): {json.dumps(report[way])}", flush=True
        )
        (config.out / "host_values.json").write_text(json_text(report, indent=1) + "\n")
    report["break-even S / N"] = break_evens(report)
    (config.out / "host_values.json").write_text(json_text(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
