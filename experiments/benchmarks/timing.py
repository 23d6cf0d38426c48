"""Times kernels on a GPU with the profiler: durations, and distances between starts of calls.

A call is repeated in one compiled chain, each call feeding the next, so that the device is timed
and not the host. Inputs that would fit the second-level cache are rotated.
"""

import dataclasses
import datetime
import functools
import glob
import importlib.metadata
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.running import command
from pallas_kernels.decode.cases import DecodeCase

# Calls in a chain, and chains in a measurement.
CALLS, CHAINS = 8, 4
# Total size of the drawn pools: several times the second-level cache.
ROTATED_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call, in microseconds.

    Attributes:
      period: from one call's main kernel to the next one's: everything, gaps included.
      main: the longest kernel of a call.
      kernels: median time of every kernel, by name.
    """

    period: float
    main: float
    kernels: dict[str, float]


Event = tuple[float, float, str]  # start and duration in microseconds, name


def events_by_device(run: Callable[[], None]) -> list[list[Event]]:
    """Runs under the profiler; returns the events of each GPU that has any, in order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        devices = [
            sorted(
                (event.start_ns / 1e3, event.duration_ns / 1e3, event.name)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            )
            for plane in data.planes
            if "GPU" in plane.name
        ]
        return [events for events in devices if events]


def require_gpu() -> None:
    """Refuses to run without a GPU.

    Raises:
      ConfigError: jax sees no GPU.
    """
    if jax.default_backend() != "gpu":
        raise dms_jax.ConfigError(
            "The times are read off a GPU's own record of what it ran, and jax sees no GPU here "
            f"(it runs on {jax.default_backend()})."
        )


def time_chain(chain: Callable[[], jax.Array]) -> Timing:
    """Times a compiled chain of CALLS calls.

    Args:
      chain: runs the chain and returns its result.
    """
    for _ in range(2):
        chain().block_until_ready()

    def run():
        for _ in range(CHAINS):
            chain().block_until_ready()

    events = sorted(itertools.chain(*events_by_device(run)))
    durations: dict[str, list[float]] = {}
    for _, duration, name in events:
        durations.setdefault(name, []).append(duration)
    main = max(durations, key=lambda name: sum(durations[name]))
    starts = [start for start, _, name in events if name == main]
    # The step from the last call of one chain to the first of the next waits for the host.
    steps = [b - a for i, (a, b) in enumerate(itertools.pairwise(starts)) if (i + 1) % CALLS]
    kernels = {name: statistics.median(times) for name, times in durations.items()}
    return Timing(statistics.median(steps), kernels[main], kernels)


def read_rate() -> float:
    """Bytes a second of a large read: sums over 4 GB, 16 in one program, median of 5."""
    size = 2**31 if jax.default_backend() != "cpu" else 2**20
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)

    @jax.jit
    def read(x):
        # Each sum depends on the previous one, so that none can be skipped or run in parallel.
        return jax.lax.fori_loop(
            0, 16, lambda _, c: jnp.sum(x * c.astype(x.dtype), dtype=jnp.float32) * 1e-9 + 1, 1.0
        )

    return 16 * x.nbytes / median_seconds(lambda: read(x), 5)


def median_seconds(call: Callable[[], Any], repeats: int, warmup: int = 2) -> float:
    """Median wall-clock seconds of a call, including waiting for its result."""
    for _ in range(warmup):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def chain_of(call, q, inputs, *fixed):
    """Compiles a chain of CALLS calls that alternate between the inputs.

    Args:
      call: `call(q, one of inputs, *fixed) -> q`.
      q: the argument of the first call.
      inputs: pools, or other inputs.
      *fixed: arguments that all calls share.

    Returns:
      A function that runs the chain.
    """
    once = jax.jit(call)

    def chain(q, inputs, *fixed):
        for i in range(CALLS):
            q = once(q, inputs[i % len(inputs)], *fixed)
        return q

    arguments = (q, inputs, *fixed)
    return functools.partial(jax.jit(chain).lower(*arguments).compile(), *arguments)


def time_in_turns(
    calls: Mapping[str, tuple[Callable, tuple]], rounds: int
) -> dict[str, list[list[tuple[str, float]]]]:
    """Times the kernels of alternating compiled functions, by CUPTI.

    Such a process must not use jax's profiler (`events_by_device`), because both read CUPTI.

    Args:
      calls: function and arguments by name.
      rounds: calls of each.

    Returns:
      For each name and round: name and milliseconds of every launched kernel.
    """
    from jax.experimental.mosaic.gpu import profiler

    timers = {
        name: profiler.Cupti(finalize=False).measure(function, aggregate=False)
        for name, (function, _) in calls.items()
    }
    found: dict[str, list[list[tuple[str, float]]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            launches: Any = timer(*calls[name][1])[1]
            assert launches, "the profiler saw no kernel"
            found[name].append(launches)
    return found


def kernel_medians(rounds: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Median milliseconds of each kernel over all its launches."""
    times: dict[str, list[float]] = {}
    for name, duration in itertools.chain(*rounds):
        times.setdefault(name[:80], []).append(duration)
    return {name: statistics.median(each) for name, each in times.items()}


def draw_queries(case: DecodeCase, seed: int) -> jax.Array:
    """Draws the queries of a case."""
    shape = (case.rows, case.group, case.head_dim)
    return jax.random.normal(jax.random.key(seed), shape, case.dtype)


def draw_pools(case: DecodeCase, seed: int = 0) -> list[tuple[jax.Array, ...]]:
    """Draws page pools of a case, too many for any cache.

    Returns:
      For each pool k_pages, v_pages, page_table, k_scales and v_scales (None without scales); rows
      own pages in random order unless the case says otherwise.
    """
    shape = (case.pages, case.page_size, case.head_dim)
    dtype = case.pages_dtype or case.dtype
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))
    scales = jax.jit(
        lambda key: (
            jax.random.uniform(key, shape[:2], minval=0.5, maxval=2.0) if case.pages_dtype else None
        )
    )
    pools = []
    for i in range(min(CALLS, -(-ROTATED_BYTES // case.live_bytes))):
        keys = jax.random.split(jax.random.key(seed + i), 4)
        order = np.arange(case.pages)
        if case.shuffled:
            order = np.random.default_rng(seed + i).permutation(case.pages)
        table = np.zeros((case.rows, case.columns), np.int32)
        taken = 0
        for row, length in enumerate(case.lengths):
            count = -(-length // case.page_size)
            table[row, :count] = order[taken : taken + count]
            taken += count
        arrays = draw(keys[0]), draw(keys[1]), jnp.asarray(table)
        pools.append((*arrays, scales(keys[2]), scales(keys[3])))
    return pools


def environment() -> dict[str, Any]:
    """The environment of a measurement: device, versions, date, and XLA flags, if any."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "triton")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "runtime": device.client.platform_version.splitlines()[0],
        "versions": {name: found[name] for name in names if name in found},
        "date": datetime.date.today().isoformat(),
    } | ({"xla_flags": flags} if (flags := os.environ.get("XLA_FLAGS")) else {})


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures with three decimals, to print."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def about(config: Any) -> dict[str, Any]:
    """The environment, the command and the settings of a report, except its output path."""
    settings = {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)}
    settings.pop("out")
    return environment() | {"command": command(without=("--out",)), "config": settings}
