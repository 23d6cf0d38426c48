"""Time kernels on a GPU by the profiler: how long each takes, and how far apart calls start.

A call is repeated in one compiled chain, each call feeding the next, so that what is measured is
the device's time, not the host's. Inputs that fit the second-level cache are rotated.
"""

import datetime
import functools
import glob
import importlib.metadata
import itertools
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import command
from dms_jax.json_text import json_text
from pallas_kernels import tuned
from pallas_kernels.decode.cases import DecodeCase

# Calls in a chain, and chains in a measurement.
CALLS, CHAINS = 8, 4
# Pools are drawn until they are this large together: several times the second-level cache.
ROTATED_BYTES = 256 << 20


@dataclass(frozen=True)
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


def device_events(run: Callable[[], None]) -> list[tuple[float, float, str]]:
    """Run under the profiler; (start, duration, name) in microseconds of what the GPU did."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        return sorted(
            (event.start_ns / 1e3, event.duration_ns / 1e3, event.name)
            for plane in data.planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        )


def require_gpu() -> None:
    """Refuses to run where there is nothing to time.

    Raises:
      ConfigError: jax sees no GPU.
    """
    if jax.default_backend() != "gpu":
        raise dms_jax.ConfigError(
            "The times are read off a GPU's own record of what it ran, and jax sees no GPU here "
            f"(it runs on {jax.default_backend()})."
        )


def time_program(run: Callable[[], None]) -> dict[str, float]:
    """Time a program of CALLS calls, from its first kernel to the end of its last.

    Args:
      run: runs it and waits for its end.

    Returns:
      span_us, kernels_us (the sum of the kernels) and launches of a call, medians of CHAINS runs.
    """
    for _ in range(2):
        run()
    runs = [device_events(run) for _ in range(CHAINS)]
    spans = [events[-1][0] + events[-1][1] - events[0][0] for events in runs]
    busy = [sum(duration for _, duration, _ in events) for events in runs]
    return {
        "span_us": round(statistics.median(spans) / CALLS, 2),
        "kernels_us": round(statistics.median(busy) / CALLS, 2),
        "launches": statistics.median(map(len, runs)) / CALLS,
    }


def measure_all(
    path: pathlib.Path,
    cases: Iterable[Any],
    implementations: Iterable[str],
    measure: Callable[[Any, str, int], dict[str, Any]],
) -> None:
    """Measures every implementation on every case; prints and writes the report as it grows.

    Args:
      path: path of the report.
      cases: cases with names.
      implementations: names of implementations.
      measure: returns the figures of a case and an implementation, given a seed for its data.
    """
    require_gpu()
    make_folder("--out", path.parent)
    seed = int.from_bytes(os.urandom(4), "little")
    report: dict[str, Any] = environment() | {
        "command": command_line(),
        "seed": seed,
        "records": [],
    }
    for case, implementation in itertools.product(cases, implementations):
        record: dict[str, Any] = {"case": case.name, "implementation": implementation}
        try:
            record |= measure(case, implementation, seed)
        except NotImplementedError as reason:  # Which one cannot serve is part of the result.
            record["failed"] = str(reason).splitlines()[0][:200]
        report["records"].append(record)
        print(record, flush=True)
        path.write_text(json_text(report, indent=1) + "\n")


def time_chain(chain: Callable[[], jax.Array]) -> Timing:
    """Time a compiled chain of CALLS calls.

    Args:
      chain: runs the chain and returns its result.
    """
    for _ in range(2):
        chain().block_until_ready()

    def run():
        for _ in range(CHAINS):
            chain().block_until_ready()

    events = device_events(run)
    durations: dict[str, list[float]] = {}
    for _, duration, name in events:
        durations.setdefault(name, []).append(duration)
    main = max(durations, key=lambda name: sum(durations[name]))
    starts = [start for start, _, name in events if name == main]
    # The step from the last call of one chain to the first of the next waits for the host.
    steps = [b - a for i, (a, b) in enumerate(itertools.pairwise(starts)) if (i + 1) % CALLS]
    kernels = {name: statistics.median(times) for name, times in durations.items()}
    return Timing(statistics.median(steps), kernels[main], kernels)


def chain_of(call, q, inputs, *fixed):
    """Compiles a chain of CALLS calls that take turns with the inputs.

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


def draw_queries(case: DecodeCase, seed: int) -> jax.Array:
    """Draws the queries of a case."""
    shape = (case.rows, case.group, case.head_dim)
    return jax.random.normal(jax.random.key(seed), shape, case.dtype)


def draw_pools(case: DecodeCase, seed: int = 0) -> list[tuple[jax.Array, ...]]:
    """Draw page pools of a case, as many as it takes to be sure that no cache holds them.

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


def versions() -> dict[str, str]:
    """Versions of what takes part in a measurement, where it is installed."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "triton")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in names if name in found}


def environment() -> dict[str, Any]:
    """What a measurement was made on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "runtime": device.client.platform_version.splitlines()[0],
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    } | ({"xla_flags": flags} if (flags := os.environ.get("XLA_FLAGS")) else {})


def command_line() -> str:
    """How this program was called, without the place of its results."""
    return command(without=("--out",))


def save_settings(folder: pathlib.Path, kernel: str, entry: dict) -> None:
    """Put an entry into this device's file of settings, in the place of one for the same shapes.

    Args:
      folder: where the files of all devices lie.
      kernel: "operation/implementation".
      entry: see `pallas_kernels.tuned`.
    """
    make_folder("--out", folder)
    path = folder / tuned.file_name(jax.devices()[0].device_kind)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"kernels": {}}
    entries = {json.dumps(e["when"]): e for e in report["kernels"].get(kernel, [])}
    entries[json.dumps(entry["when"])] = entry | {"command": command_line()}
    # The first entry that applies is taken: those for little work come first.
    report["kernels"][kernel] = sorted(entries.values(), key=lambda e: "small" not in e["when"])
    path.write_text(json_text(report | environment(), indent=1) + "\n")
