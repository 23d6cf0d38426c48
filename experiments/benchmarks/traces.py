"""Reads jax's GPU profiles: kernels by program and family, and the waits between them.

A kernel's wait is the idle time before it.
"""

import collections
import contextlib
import dataclasses
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

# Names in the profiler's trace.
_PROCESS, _MODULE = "process_name", "hlo_module"
# Number of listed families and kernels.
_LISTED, _IN_ORDER = 30, 60


@dataclasses.dataclass
class Trace:
    """The contents of a profile.

    Attributes:
      kernels: kernels and copies on the first GPU, in order; "ts" and "dur" are microseconds.
    """

    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def of(self, program: str) -> list[dict[str, Any]]:
        """Returns the kernels of a jitted function, in order."""
        return [each for each in self.kernels if _program(each) == program]

    def programs(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of every jitted function, the longest first."""
        found = {name: summarise(self.of(name)) for name in {_program(x) for x in self.kernels}}
        return dict(sorted(found.items(), key=lambda each: -each[1]["busy_ms"]))


def _program(kernel: dict[str, Any]) -> str:
    return kernel["args"].get(_MODULE, "").removeprefix("jit_")


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Profiles the context's body; the yielded trace is filled at the end."""
    trace, options = Trace(), jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace has room for a million events
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield trace
        trace.kernels = read(pathlib.Path(folder))


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the kernels in a profiler's folder."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == _PROCESS}
    devices = sorted(pid for pid, name in names.items() if "GPU" in name)
    timed = [each for each in events if each.get("ph") == "X"]
    first = next((pid for pid in devices if any(each["pid"] == pid for each in timed)), None)
    kernels = [each for each in timed if each["pid"] == first]
    return sorted(kernels, key=lambda each: each["ts"])


def summarise(kernels: list[dict[str, Any]], runs: float = 1) -> dict[str, Any]:
    """Returns launches, the busy time, and the longest families.

    Args:
      kernels: kernels and copies, in order.
      runs: number of runs (such as steps) over which everything but shares is averaged.
    """
    families = collections.defaultdict[str, list[tuple[float, float]]](list)
    in_order: list[tuple[str, float, float]] = []
    busy, end = 0.0, kernels[0]["ts"] if kernels else 0.0
    for each in kernels:
        start, stop = max(each["ts"], end), each["ts"] + each["dur"]
        wait = start - end
        busy, end = busy + max(0.0, stop - start), max(end, stop)
        families[family(each["name"])].append((each["dur"], wait))
        in_order.append((each["name"][:80], round(each["dur"], 2), round(wait, 2)))
    span = end - kernels[0]["ts"] if kernels else 0.0
    longest = sorted(families.items(), key=lambda each: -sum(map(sum, each[1])))[:_LISTED]
    middle = len(in_order) // 2
    return dict(
        launches=len(kernels) / runs,
        span_ms=1e-3 * span / runs,
        busy_ms=1e-3 * busy / runs,
        busy_share=busy / span if span else None,
        families=[
            dict(
                name=name,
                launches=len(each) / runs,
                us=round(sum(own for own, _ in each) / runs, 3),
                wait_us=round(sum(wait for _, wait in each) / runs, 3),
            )
            for name, each in longest
        ],
        # Name, microseconds, and microseconds of the wait before it, from the middle.
        in_order=in_order[middle : middle + _IN_ORDER],
    )


def family(name: str) -> str:
    """Returns the name of a kernel without its number, and of a product without its tiles.

    # In: loop_add_fusion_12_double_buffer_clone  Out: loop_add_fusion
    # In: nvjet_sm90_tst_64x40_64x16_2x4_h_badd_NNT  Out: nvjet_sm90_tst_h_badd_NNT
    """
    name = re.sub(r"_\d+x\d+", "", name.replace("_double_buffer_clone", ""))
    return re.sub(r"_\d+$", "", name)[:60]
