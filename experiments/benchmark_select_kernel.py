"""Time the selection of the largest scores of each row on a GPU, and XLA's two sorts.

Every implementation is checked against NumPy on fresh random scores before it is timed. A chain of
selections runs in one program, each over scores of its own; what counts is the time from a chain's
first kernel to the end of its last, divided by its selections.

    python experiments/benchmark_select_kernel.py --out experiments/results/kernels
"""

import argparse
import functools
import json
import os
import statistics
from typing import Any

import jax
import numpy as np
from kernel_timing import (
    CALLS,
    CHAINS,
    command_line,
    device_events,
    environment,
    prepare_output,
)

from pallas_kernels import select_largest
from pallas_kernels.select import cases

IMPLEMENTATIONS = ("xla", "triton")


def is_right(scores: jax.Array, got: jax.Array, count: int) -> bool:
    """Whether these are the largest by a stable sort, in the order of their places."""
    ranked = np.argsort(-np.asarray(scores), axis=-1, kind="stable")
    return bool((np.sort(ranked[:, :count], -1) == got).all())


def measure(case: cases.SelectCase, implementation: str, seed: int) -> dict[str, Any]:
    """Check and time one implementation."""
    record: dict[str, Any] = {"case": case.name, "implementation": implementation}
    record |= {"rows": case.rows, "width": case.width, "count": case.count}
    draw = jax.jit(lambda key: jax.random.normal(key, (case.rows, case.width), case.dtype))
    keys = jax.random.split(jax.random.key(seed), CALLS)
    steps = [draw(key) for key in keys]
    select = functools.partial(select_largest, count=case.count, implementation=implementation)
    record["right"] = is_right(steps[0], jax.jit(select)(steps[0]), case.count)

    @jax.jit
    def chain(steps):
        found = []
        for scores in steps:
            # Nothing of a selection is done before its turn.
            scores, found = jax.lax.optimization_barrier((scores, found))
            found.append(select(scores))
        return found

    def run():
        jax.block_until_ready(chain(steps))

    for _ in range(2):
        run()
    chains = [device_events(run) for _ in range(CHAINS)]
    spans = [one[-1][0] + one[-1][1] - one[0][0] for one in chains]
    return record | {
        "select_us": round(statistics.median(spans) / CALLS, 2),
        "launches": statistics.median(map(len, chains)) / CALLS,
    }


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="experiments/results/kernels")
    arguments = parser.parse_args()
    folder = prepare_output(arguments.out)
    seed = int.from_bytes(os.urandom(4), "little")
    report: dict[str, Any] = environment() | {
        "command": command_line(),
        "seed": seed,
        "records": [],
    }
    for case in cases.BENCHMARK:
        for implementation in IMPLEMENTATIONS:
            try:
                record = measure(case, implementation, seed)
            except NotImplementedError as reason:  # Which one cannot serve is part of the result.
                record = {"case": case.name, "implementation": implementation}
                record["failed"] = str(reason).splitlines()[0][:200]
            report["records"].append(record)
            print(record, flush=True)
            (folder / "select.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
