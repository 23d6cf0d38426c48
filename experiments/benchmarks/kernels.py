"""Times each kernel of the library on one GPU beside its alternatives.

- **decode**: decode attention beside cuDNN on dense rows, jax's stock Pallas kernel and XLA. Rates
  count the bytes of live keys and values once. cuDNN does not support rows of different lengths.
- **prefill**: a chunk of a prompt over a compressed past, beside cuDNN over all of it.
- **training**: attention with the DMS mask, beside cuDNN's plain causal attention and, where
  PyTorch is installed, FlexAttention with the same mask; and the memory of forward and backward.

Everything is checked on fresh random data before timing. Decode runs a chain of calls in one
program, each over separate data; for the others the kernels' own times count.

    python -m experiments.benchmarks.kernels --kernel decode --out experiments/results/kernels
    python -m experiments.benchmarks.kernels --kernel training \
        --out experiments/results/kernels
    python -m experiments.benchmarks.kernels --picture experiments/results/kernels
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

import dms_jax
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder, write_json
from dms_jax.command_line.running import run
from experiments.benchmarks import kernels_decoding, kernels_training
from experiments.benchmarks.timing import about, read_rate, require_gpu
from pallas_kernels.decode import cases as decode_cases
from pallas_kernels.training import cases as training_cases

CONTENDERS = {
    "mosaic_gpu": ("this kernel (Mosaic GPU)", "#c0392b"),
    "mosaic_mma": ("the kernel for other GPUs", "#e59866"),
    "cudnn, dense": ("cuDNN, no pages", "#2471a3"),
    "stock pallas": ("jax's own Pallas kernel", "#7d8c2f"),
    "xla": ("XLA", "#909497"),
}
DECODE = ("mosaic_gpu", "mosaic_gpu, plan included", *list(CONTENDERS)[1:])
FILES = {
    "decode": "decode.json",
    "prefill": "prefill_kernel.json",
    "training": "training_kernels.json",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time a kernel."""

    kernel: Literal["decode", "prefill", "training"] = "decode"
    """Kernel to time."""
    cases: tuple[str, ...] = ()
    """Cases to time, by name; all unless given. Kernel "prefill" has none."""
    implementation: Literal["mosaic_gpu", "mosaic_mma", "xla"] = "mosaic_gpu"
    """Implementation of prefill and training attention."""
    picture: pathlib.Path | None = None
    """A folder with decode.json or training_kernels.json: time nothing, draw them into --out."""
    out: pathlib.Path = pathlib.Path("runs/kernels")
    """Folder for the figures and pictures."""


def time_decode(config: Config, report: dict[str, Any], write: Callable[[], None]) -> None:
    """Times the contenders of decode attention; prints and writes each record."""
    report["read_terabytes_per_second"] = round(read_rate() / 1e12, 3)
    report["records"] = []
    for case, name in itertools.product(decode_cases.BENCHMARK, DECODE):
        if case.name not in (config.cases or names_of(decode_cases.BENCHMARK)):
            continue
        record = {"case": case.name, "implementation": name}
        try:
            figures = kernels_decoding.measure_decode(case, name, report["seed"])
        except Exception as reason:  # A refusal of a contender is part of the result.
            figures = {"failed": f"{type(reason).__name__}: {reason}".splitlines()[0][:200]}
        if figures is None:
            continue
        report["records"].append(record | figures)
        print(record | figures, flush=True)
        write()


def names_of(cases: Iterable[Any]) -> list[str]:
    """The names of cases."""
    return [case.name for case in cases]


def main(config: Config) -> None:
    """Measures, prints, and writes the report.

    Raises:
      ConfigError: there is no such case, or no GPU.
    """
    cases = {"decode": decode_cases.BENCHMARK, "training": training_cases.SPEED, "prefill": ()}
    check_names("--cases", config.cases, names_of(cases[config.kernel]))
    if config.picture is not None:
        make_folder("--out", config.out)
        draw_pictures(config.picture, config.out)
        return
    if config.kernel != "decode":  # FlexAttention needs memory beside jax, which has not started
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    require_gpu()
    make_folder("--out", config.out)
    seed = int.from_bytes(os.urandom(4), "little")
    report: dict[str, Any] = about(config) | {"seed": seed}

    def write() -> None:
        write_json(config.out / FILES[config.kernel], report)

    if config.kernel == "decode":
        time_decode(config, report, write)
        return
    report["implementation"] = config.implementation
    if config.kernel == "prefill":
        kernels_training.time_prompts(report, config.implementation)
        write()
    else:
        wanted = config.cases or tuple(names_of(training_cases.SPEED))
        kernels_training.time_training(report, wanted, config.implementation, write)


# -- pictures --------------------------------------------------------------------------------------

# Cases of the picture, with readable names; decode.json has all of them.
PICTURED = {
    "rows128_32768": "128 rows of 32,768",
    "rows512_4096": "512 rows of 4,096",
    "rows512_skewed_4096": "512 rows, uneven,\n4,096 at most",
    "rows64_1024": "64 rows of 1,024",
    "rows512_4096_head_dim64": "512 rows of 4,096,\nhead dim 64",
    "rows512_4096_float8": "512 rows of 4,096,\n8 bits",
}
TRAINING_CONTENDERS = {
    "dms": ("this kernel, DMS's mask", "#c0392b"),
    "cudnn_causal": ("cuDNN, plain causal", "#2471a3"),
    "flex_dms": ("FlexAttention", "#7d8c2f"),
}


def draw_pictures(source: pathlib.Path, out: pathlib.Path) -> None:
    """Draws the reports of a folder.

    Raises:
      ConfigError: it has none.
    """
    drawn = {"decode.json": draw_decode, "training_kernels.json": draw_training}
    found = [source / name for name in drawn if (source / name).is_file()]
    if not found:
        raise dms_jax.ConfigError(f"--picture {source}: there is no {' and no '.join(drawn)}.")
    for path in found:
        drawn[path.name](json.loads(path.read_text()), out / path.with_suffix(".png").name)


def draw_decode(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the rates of a report as bars, with the pure-read rate as a line."""
    from matplotlib.figure import Figure

    records = [r for r in report["records"] if "period_us" in r and r["case"] in PICTURED]
    names = [name for name in PICTURED if any(r["case"] == name for r in records)]
    bars = [
        [
            (name, r)
            for name in CONTENDERS
            for r in records
            if (r["case"], r["implementation"]) == (case, name)
        ]
        for case in names
    ]
    figure = Figure(figsize=(10, 0.25 * sum(map(len, bars)) + 2), layout="constrained")
    axes = figure.subplots()
    place, middles = 0.0, []
    for found in bars:  # bars of a case below each other, and a gap before the next case
        middles.append(place + (len(found) - 1) / 2)
        for name, record in found:
            label, colour = CONTENDERS[name]
            rate = record["terabytes_per_second"]
            axes.barh(place, rate, 0.85, color=colour)
            inside = rate > 2
            axes.text(
                rate + (-0.05 if inside else 0.05),
                place,
                f"{label} {rate:.2f}",
                va="center",
                ha="right" if inside else "left",
                color="white" if inside else "black",
                fontsize=8,
            )
            place += 1
        place += 0.8
    axes.axvline(report["read_terabytes_per_second"], color="black", lw=1, ls="--")
    axes.text(report["read_terabytes_per_second"], -0.8, "a plain read ", ha="right", fontsize=8)
    axes.set_yticks(middles, [PICTURED[name] for name in names])
    axes.set_ylim(-1.5, place - 0.8)
    axes.set_xlim(right=1.05 * report["read_terabytes_per_second"])
    axes.invert_yaxis()
    axes.set_xlabel("live keys and values read, TB/s (start to start, gaps included)")
    axes.set_title(f"Decode attention on {report['device']}, jax {report['jax']}", fontsize=10)
    figure.savefig(path, dpi=120)


def draw_training(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the speed of each contender at the shapes of the bars, and memory against length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    timed = [x for x in report["speed"] if x["case"]["name"] in names_of(training_cases.BARS)]
    names = [name for name in timed[0]["times"] if name.endswith("forward_backward")]
    for index, name in enumerate(names):
        rates = [x["times"].get(name, {}).get("tflops", math.nan) for x in timed]
        at = np.arange(len(timed)) + 0.25 * index
        label, colour = TRAINING_CONTENDERS[name.split(".")[0]]
        bars = left.bar(at, rates, 0.23, color=colour)
        left.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=8)
        left.bar_label(bars, [label] * len(rates), label_type="center", rotation=90, color="white")
    left.set_xticks(np.arange(len(timed)) + 0.25, [f"{x['case']['T']:,} tokens" for x in timed])
    left.set_ylabel("forward and backward, TFLOP/s")
    left.set_ylim(top=1.05 * left.get_ylim()[1])
    lengths = [x["T"] for x in report["memory"]]
    right.plot(lengths, [x["temporary_bytes"] / 2**20 for x in report["memory"]], "o-")
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="memory beside operands, MiB")
    right.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    right.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    right.minorticks_off()
    figure.suptitle(f"Training attention with the DMS mask, {report['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
