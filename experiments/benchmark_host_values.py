"""How fast a compiled decode loop can fetch rows of values that live in host memory (KCache).

Each way runs in a process of its own, because some may not be supported and take the process down.
The shapes are those of Llama-3.1-8B: 32 query heads each fetch N rows of 128 bfloat16 numbers a
layer, out of a context of 32768 tokens of 8 KV heads. What is timed is one layer's fetch inside
one compiled loop; indices depend on what was fetched before, so nothing overlaps by itself.

    device      rows gathered from device memory: what the fetch would cost without the host
    compute_on  gathered by the host's processor, in `compute_on("device_host")`
    in_place    the ordinary gather of the GPU over host memory that it can address (mapped)
    triton      a Pallas kernel over an operand in `pinned_host`
    callback    `pure_callback` to NumPy
    reload      the whole layer's values copied to the device, then gathered there

Besides: bandwidths of the link, top-N of a layer's scores in several ways, and whether copies of a
prompt's values to the host hide behind its computation.

    python experiments/benchmark_host_values.py --out experiments/results/kcache
"""

import argparse
import ctypes
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, CONTEXT, LAYERS = 32, 8, 128, 32768, 4
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def seconds(call, *arguments) -> float:
    """Median time of a call, compiled and warm."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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

    gather = compute_on(on_device, compute_type="device_host", out_memory_spaces=DEVICE)
    return gather(values, jax.device_put(index, HOST))


def written_on_host(values, index, rows):
    from jax.experimental.compute_on import compute_on

    def write(values, index, rows):
        return values.at[index].set(rows, mode="promise_in_bounds")

    write = compute_on(write, compute_type="device_host", out_memory_spaces=HOST)
    return write(values, jax.device_put(index, HOST), jax.device_put(rows, HOST))


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


def in_triton(values, index):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    block = 16

    def kernel(index_ref, values_ref, out_ref):
        where = pl.ds(pl.program_id(0) * block, block)
        rows = index_ref[where]
        out_ref[where, :] = values_ref[rows, :]

    return pl.pallas_call(
        kernel,
        grid=(index.size // block,),
        out_shape=jax.ShapeDtypeStruct((index.size, HEAD_DIM), values.dtype),
        compiler_params=plt.CompilerParams(num_warps=4),
        name="fetch_rows",
    )(index, values)


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
            gather = {"compute_on": on_host, "triton": in_triton}[way]
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
            if way == "in_place" and batch == 1 and top == 32:
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


def two_stage(scores, top):
    """The N largest lie on the N pages with the largest maxima."""
    rows = len(scores)
    pages = scores.reshape(rows, -1, 64)
    _, best = jax.lax.top_k(pages.max(-1), min(top, pages.shape[1]))
    chosen = jnp.take_along_axis(pages, best[..., None], axis=1)
    values, at = jax.lax.top_k(chosen.reshape(rows, -1), top)
    return values, jnp.take_along_axis(best, at // 64, axis=1) * 64 + at % 64


def by_threshold(scores, top):
    """The N-th largest by bisection over the bits of a float, then their places by a scan."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ascending as integers

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        enough = (order >= middle[:, None]).sum(-1) >= top
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rows = scores.shape[0]
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    ends = (jnp.full(rows, least, jnp.int32), jnp.full(rows, most, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 32, halve, ends)
    above = order > low[:, None]
    equal = order == low[:, None]
    room = top - above.sum(-1, keepdims=True)
    chosen = above | (equal & (jnp.cumsum(equal, -1) <= room))
    place = jnp.where(chosen, jnp.cumsum(chosen, -1) - 1, top)
    index = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32), scores.shape)
    out = jnp.zeros((rows, top), jnp.int32)
    out = out.at[jnp.arange(rows)[:, None], place].set(index, mode="drop")
    return jnp.take_along_axis(scores, out, axis=1), out


def measure_top() -> dict:
    """Microseconds of the top 128 of a layer's scores, and of the scores themselves."""
    report = {}
    for batch in (1, 8):
        scores = jax.random.normal(jax.random.key(0), (batch * HEADS, CONTEXT), jnp.float32)
        want = np.sort(np.asarray(jax.lax.top_k(scores, 128)[0]))
        ways = {
            "top_k": lambda s: jax.lax.top_k(s, 128),
            "two stages": lambda s: two_stage(s, 128),
            "threshold": lambda s: by_threshold(s, 128),
        }
        for name, way in ways.items():

            @jax.jit
            def run(scores, way=way):
                def body(carry, _):
                    values, index = way(scores + carry)
                    return values.sum() * 0, (values[0], index[0, 0])

                return jax.lax.scan(body, jnp.zeros(()), length=8)[1]

            once = np.sort(np.asarray(jax.jit(way)(scores)[0]))
            report[f"{name}, batch {batch}"] = {
                "microseconds": seconds(run, scores) / 8 * 1e6,
                "right": bool(np.array_equal(once, want)),
            }
    return report


def measure_scores() -> dict:
    """Microseconds of decode attention over keys and values, and over keys alone for scores."""
    from pallas_kernels import decode_attention

    report = {}
    for batch in (1, 8):
        pages = CONTEXT // 64
        rows = batch * KV_HEADS
        pool = jax.random.normal(jax.random.key(0), (2, rows * pages, 64, HEAD_DIM), jnp.bfloat16)
        table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
        lengths = jnp.full(rows, CONTEXT, jnp.int32)
        q = jax.random.normal(jax.random.key(1), (rows, HEADS // KV_HEADS, HEAD_DIM), jnp.bfloat16)

        @functools.partial(jax.jit, static_argnames="scored")
        def loop(q, k, v, table, lengths, scored):
            def body(q, _):
                out = decode_attention(
                    q, k, v, table, lengths, scale=0.1, return_lse=scored, return_scores=scored
                )
                out = out[0] + out[1][..., None].astype(q.dtype) if scored else out
                return (q + 1e-3 * out).astype(q.dtype), None

            return jax.lax.scan(body, q, length=16)[0]

        k, v = pool[0], pool[1]
        for name, values, scored in (
            ("keys and values", v, False),
            ("keys and values, with scores", v, True),
            ("keys alone, with scores", k, True),
        ):
            taken = seconds(loop, q, k, values, table, lengths, scored) / 16
            report[f"{name}, batch {batch}"] = taken * 1e6
    return report


def measure_overlap() -> dict:
    """Seconds of 16 layers of a prompt of 8192 tokens that hand their values over, or do not."""
    tokens, embed, feed = 8192, 4096, 14336
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, embed), jnp.bfloat16)
    up = jax.random.normal(keys[1], (embed, feed), jnp.bfloat16) * 0.01
    down = jax.random.normal(keys[2], (feed, embed), jnp.bfloat16) * 0.01

    def prompt(x, place):
        def body(x, _):
            values = x[:, : KV_HEADS * HEAD_DIM]
            if place is not None:
                values = jax.device_put(values, place)
            return x + jnp.tanh(x @ up) @ down, values

        return jax.lax.scan(body, x, length=16)

    report = {}
    for name, place in (("values stay", None), ("values leave inside the program", HOST)):
        try:
            run = jax.jit(functools.partial(prompt, place=place))
            _, values = run(x)
            report[name] = seconds(run, x)
            report[f"{name}: memory"] = values.sharding.memory_kind
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"[:300]
    run = jax.jit(functools.partial(prompt, place=None))

    def two_chunks(copy):
        y, values = run(x)
        if copy:
            values.copy_to_host_async()
        return jax.block_until_ready(run(y)[0]) if copy else run(y)[0]

    report["two chunks"] = seconds(two_chunks, False)
    report["two chunks, the first one's values copied meanwhile"] = seconds(two_chunks, True)
    size = 16 * tokens * KV_HEADS * HEAD_DIM * 2
    report["bytes of values"] = size
    return report


WAYS = {
    "link": measure_link,
    "device": lambda: measure_fetch("device"),
    "compute_on": lambda: measure_fetch("compute_on"),
    "compute_on_carried": measure_carried,
    "in_place": lambda: measure_fetch("in_place"),
    "triton": lambda: measure_fetch("triton"),
    "callback": lambda: measure_fetch("callback"),
    "reload": measure_reload,
    "top": measure_top,
    "scores": measure_scores,
    "overlap": measure_overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, help="one way, printed as JSON")
    parser.add_argument("--out", default="experiments/results/kcache")
    parser.add_argument("--limit", type=float, default=45, help="seconds a way may take")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way]()))
        return
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
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
                [sys.executable, __file__, "--way", way],
                capture_output=True,
                text=True,
                timeout=options.limit,
            )
            lines = done.stdout.strip().splitlines()
            report[way] = (
                json.loads(lines[-1])
                if done.returncode == 0 and lines
                else {"failed": done.returncode, "says": done.stderr.strip()[-1200:]}
            )
        except subprocess.TimeoutExpired:
            report[way] = {"failed": f"took more than {options.limit} s"}
        print(
            f"{way} ({time.perf_counter() - started:.0f} s): {json.dumps(report[way])}", flush=True
        )
        (folder / "host_values.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
