"""Runs the suite under other seeds, compilers and threads: no verdict may depend on them.

    python -m tests.steadiness --workers 28 --out runs/steadiness --variations reseed-1,optimized
    python -m tests.steadiness --variations sse4 -- tests/training -k target

Each variation writes its output and JUnit file into --out; `failures.jsonl` there holds one line
for each failure: {"variation", "test", "kind", "message"}. What follows `--` goes to pytest. The
exit status is 1 when anything failed. This takes as long as the suite, once for each variation, so
continuous integration does not run it.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.conftest import CHECKOUT, OLD_EMITTER, QUICK_FLAGS


@dataclasses.dataclass(frozen=True)
class Variation:
    """Options of pytest and environment in which a verdict must stay as it is.

    Attributes:
      options: passed to pytest.
      flags: XLA_FLAGS, in the place of those that the tests choose.
      quick: whether XLA takes little care, as it does under test.
    """

    options: tuple[str, ...] = ()
    flags: str = QUICK_FLAGS
    quick: bool = True


VARIATIONS = {
    "as-is": Variation(),
    # Other streams of random numbers; any number will do.
    "reseed-1": Variation(("--reseed", "1")),
    "reseed-2": Variation(("--reseed", "2")),
    "reseed-3": Variation(("--reseed", "3")),
    # Other orders of the same sums: what the compiler fuses, vectorizes and unrolls.
    "optimized": Variation(flags="", quick=False),
    "new-emitter": Variation(flags=""),
    "old-emitter-optimized": Variation(flags=OLD_EMITTER, quick=False),
    "level-0": Variation(flags="--xla_backend_optimization_level=0", quick=False),
    "level-1": Variation(flags="--xla_backend_optimization_level=1", quick=False),
    # Other processors: the widths of their vectors, with and without fused multiply-add.
    "sse4": Variation(flags=f"{QUICK_FLAGS} --xla_cpu_max_isa=SSE4_2"),
    "avx2": Variation(flags=f"{QUICK_FLAGS} --xla_cpu_max_isa=AVX2"),
    # Other partitions of products among threads.
    "one-thread": Variation(
        ("--cores", "1"), flags=f"{QUICK_FLAGS} --xla_cpu_multi_thread_eigen=false"
    ),
    "eight-threads": Variation(("--cores", "8")),
}


def variation(name: str) -> Variation:
    """The variation of a name; `reseed-N` for any N."""
    if match := re.fullmatch(r"reseed-(\d+)", name):
        return Variation(("--reseed", match[1]))
    if name not in VARIATIONS:
        raise SystemExit(f"there is no variation {name!r}; there are {', '.join(VARIATIONS)}")
    return VARIATIONS[name]


def command(name: str, workers: int, out: Path, rest: list[str]) -> tuple[list[str], dict]:
    """What runs a variation, and the environment it runs in."""
    chosen = variation(name)
    arguments = ["-n", str(workers), "--dist", "worksteal", "-q", "-p", "no:cacheprovider"]
    arguments += [f"--junit-xml={out / name}.xml", *chosen.options, *rest]
    # The key of a compiled function does not hold how many threads it was compiled for.
    cache = "threads-" + name if "--cores" in chosen.options else "compiled"
    environment = os.environ | {
        "XLA_FLAGS": chosen.flags,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(chosen.quick)),
        "JAX_COMPILATION_CACHE_DIR": str(out / cache),
    }
    return [sys.executable, "-m", "pytest", *arguments], environment


def failures(name: str, report: Path, status: int) -> list[dict]:
    """One entry for each test of a JUnit file that failed, or for a run that wrote none."""
    found = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            for kind in ("failure", "error"):
                for element in case.iter(kind):
                    test = f"{case.get('classname')}::{case.get('name')}"
                    message = (element.get("message") or element.text or "")[:500]
                    found.append(dict(variation=name, test=test, kind=kind, message=message))
    if status and not found:
        message = f"pytest ended with status {status}"
        found.append(dict(variation=name, test=None, kind="error", message=message))
    return found


def run(name: str, workers: int, out: Path, rest: list[str]) -> list[dict]:
    """Runs one variation and returns its failures."""
    arguments, environment = command(name, workers, out, rest)
    report = out / f"{name}.xml"
    report.unlink(missing_ok=True)
    with (out / f"{name}.log").open("w") as log:
        done = subprocess.run(
            arguments, cwd=CHECKOUT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    return failures(name, report, done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes of the test run")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "runs" / "steadiness")
    parser.add_argument("--variations", default=",".join(VARIATIONS), help="names, with commas")
    parser.add_argument("rest", nargs="*", help="after --: options of pytest")
    options = parser.parse_args()
    names = options.variations.split(",")
    for name in names:
        variation(name)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (out / "failures.jsonl").open("a") as lines:
        for name in names:
            start = time.monotonic()
            found = run(name, options.workers, out, options.rest)
            for entry in found:
                print(json.dumps(entry), file=lines, flush=True)
            print(f"{name}: {len(found)} failed, {time.monotonic() - start:.0f} s", flush=True)
            failed += len(found)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
