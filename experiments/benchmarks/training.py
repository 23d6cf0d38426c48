"""Times whole training steps: real model shapes, random weights and tokens, one to several GPUs.

Each case is a retrofit by distillation (an adapter of DMS, passes in bfloat16) with a shape, a
length, the weights that are trained, and a mesh of (data, sequence, model) devices; "1b+text" has
the loss on the text alone, without the teacher's pass. Cases that differ only in `data` or `model`
have equal tokens per device; `sequence` splits existing tokens. Reports tokens a second, the share
of the devices' peak (model operations: neither recomputation nor padding counts), the memory that
the compiler plans for the step beside the device's peak in the process so far (the step's own peak
only if no earlier case took more), and the kernels of one step by family. Figures are written
before the profiled step.

    python -m experiments.benchmarks.training --cases 1b 1b+data2 1b+model2 --out runs/training.json
    python -m experiments.benchmarks.training --cases 1b 1b+data4 1b+data8 1b+data2+model4 8b \
        8b+data4 8b+data8 8b-all+data8 1b-32k 1b-32k+sequence4 1b-32k+sequence8 --seconds 1200

A name may be followed by settings: "1b+products+double" is "1b" with both, and "1b+data8" is "1b"
on eight devices that share the weights.
"""

import collections
import dataclasses
import gc
import itertools
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import run
from dms_jax.model.language_model import use_mesh
from dms_jax.policies import DMS
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.trainer import Trainer
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, config_of
from experiments.benchmarks.timing import about, events_by_device


@dataclasses.dataclass(frozen=True)
class Case:
    """One job: `sequences` are those of a shard of `data`, in one pass."""

    shape: Shape = "llama-3.2-1b"
    length: int = 4096
    sequences: int = 4
    trainable: Literal["all", "adapter"] = "all"
    data: int = 1
    sequence: int = 1
    model: int = 1
    remat: str = "all_but_attention"
    packed: bool = False
    loss: Literal["distillation", "language_modeling"] = "distillation"

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.data * self.sequence * self.model


BASE, SMALL = Case(), Case("qwen2.5-0.5b", 2048, 8, packed=True)
LARGE = Case("llama-3.1-8b", 8192, 1, trainable="adapter")
CASES: dict[str, Case] = {
    "1b": BASE,
    "1b-32k": dataclasses.replace(BASE, length=32768, sequences=1),
    "1b-64k": dataclasses.replace(BASE, length=65536, sequences=1),
    "0.5b": SMALL,
    "1.5b": dataclasses.replace(SMALL, shape="qwen2.5-1.5b"),
    "8b": LARGE,
    "8b-all": dataclasses.replace(LARGE, trainable="all"),
    "8b-32k": dataclasses.replace(LARGE, length=32768),
    "8b-all-fsdp2": dataclasses.replace(LARGE, length=4096, trainable="all", data=2),
    "8b-all-tp2": dataclasses.replace(LARGE, length=4096, sequences=2, trainable="all", model=2),
    "tiny": Case("tiny", 64, 2),
    "tiny-fsdp2": Case("tiny", 64, 2, data=2, packed=True),
}

# Settings that may follow a name.
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"remat": "auto"},
    "products": {"remat": "all_but_products"},
    "everything": {"remat": "everything"},
    "double": {"sequences": 8},
    "text": {"loss": "language_modeling"},  # without the teacher
    # Axes of the mesh: "1b+data2+model4" is for 8 devices.
    **{f"{axis}{n}": {axis: n} for axis in ("data", "sequence", "model") for n in (2, 4, 8)},
}

# Kernel families by name patterns; the first match counts.
FAMILIES = (
    ("collectives", r"nccl|all_reduce|all_gather|reduce_scatter"),
    ("attention", r"retrofit"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|sm90|wgmma|dot"),
    ("copies", r"memcpy|memset|copy|transpose"),
    ("reductions", r"reduce"),
    ("elementwise", r"fusion|loop|input|wrapped"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time training steps."""

    cases: tuple[str, ...] = ("1b", "0.5b", "8b")
    """Names of `CASES`, in order; cases that need more devices are left out."""
    steps: int = 5
    """Timed steps of a case; the median counts."""
    seconds: float = 240
    """Seconds after which no further case begins."""
    profile: bool = True
    """Whether to profile one more step."""
    out: pathlib.Path = pathlib.Path("runs/training.json")
    """JSON file for the figures, written after each case."""

    def __post_init__(self):
        check_numbers(self)


def recipe_of(case: Case) -> Recipe:
    """Returns the recipe of a case."""
    options: dict[str, Any] = dict(
        name="benchmark",
        stages=(Stage("ramp", 1000, 1e-5, 8.0),),
        sequence_length=case.length,
        batch_size=case.sequences * case.data,
        micro_batch_size=case.sequences,
        trainable=case.trainable,
        remat=case.remat,
        loss=case.loss,
    )
    return Recipe(**options)


def case_of(name: str) -> Case:
    """Returns the case of a name.

    Raises:
      ConfigError: there is no such case, or no such setting.
    """
    start, *settings = name.split("+")
    if start not in CASES:
        raise dms_jax.ConfigError(f"There is no case {start!r}; {', '.join(CASES)} are known.")
    changes: dict[str, Any] = {}
    for setting in settings:
        if setting not in SETTINGS:
            raise dms_jax.ConfigError(
                f"{name}: there is no setting {setting!r}; {', '.join(SETTINGS)} are known."
            )
        changes |= SETTINGS[setting]
    return dataclasses.replace(CASES[start], **changes)


def batch_of(case: Case, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns the random sequences of a pass, or packed documents of 100 to 1,000 tokens."""
    random = np.random.default_rng(0)
    shape = (case.sequences * case.data, case.length)
    batch = {
        "tokens": random.integers(0, vocab_size, shape).astype(np.int32),
        "loss_mask": np.ones(shape, bool),
    }
    if case.packed:
        starts = np.zeros(shape, np.int32)
        for row in starts:
            at = 0
            while at < case.length:
                row[at] = 1
                at += random.integers(100, 1000)
        batch["segment_ids"] = starts.cumsum(1, dtype=np.int32)
    return batch


def time_case(case: Case, config: Config, row: dict[str, Any], write: Callable[[], None]) -> None:
    """Times one case; writes its figures into `row`, and saves them before the profile."""
    mesh = None
    if case.devices > 1:
        mesh = dms_jax.make_mesh(case.data, case.model, sequence=case.sequence)
    shape = config_of(case.shape)
    recipe, policy = recipe_of(case), DMS(window=256, source="adapter")
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    began = time.perf_counter()
    with use_mesh(mesh):
        model = dms_jax.initialize(shape, dtype=dtype)
        trainer = Trainer(model, policy, recipe, 0, mesh)
        del model
        batches = [batch_of(case, shape.vocab_size)]

        def step(index: int) -> dict[str, float]:
            metrics = trainer.step(batches, recipe.progress(index, policy))
            return {name: float(x) for name, x in jax.device_get(metrics).items()}

        metrics = step(0)
        first = time.perf_counter() - began
        step(1)
        times = []
        for index in range(config.steps):
            start = time.perf_counter()
            metrics = step(2 + index)
            times.append(time.perf_counter() - start)
        tokens = case.sequences * case.data * case.length
        rate = tokens / statistics.median(times)
        share = trainer.utilisation(
            rate * metrics["document_share"], metrics["visible_keys"], "ramp"
        )
        stats = jax.local_devices()[0].memory_stats() or {}
        row |= dict(
            tokens_per_second=round(rate),
            tokens_per_second_and_device=round(rate / case.devices),
            chosen_remat=trainer.recipe.remat,
            share_of_peak=None if share is None else round(share, 4),
            step_ms=[round(1e3 * each, 2) for each in times],
            first_step_s=round(first, 1),
            peak_bytes_so_far=stats.get("peak_bytes_in_use"),
            planned_bytes=trainer.step_bytes(batches, recipe.progress(1, policy)),
            metrics=metrics,
        )
        write()
        if config.profile and jax.default_backend() == "gpu":
            row["kernels"] = kernels_of(lambda: step(2 + config.steps))


def kernels_of(run_step: Any) -> dict[str, Any]:
    """Returns the milliseconds and launches of a step, by family and for the longest kernels.

    They are means over the devices.
    """
    devices = events_by_device(run_step)
    total: dict[str, float] = collections.defaultdict(float)
    names: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    for _, duration, name in itertools.chain(*devices):
        family = next((f for f, sign in FAMILIES if re.search(sign, name.lower())), "other")
        total[family] += duration / len(devices)
        count[family] += 1
        names[name[:100]] += duration / len(devices)
    longest = sorted(names.items(), key=lambda item: -item[1])[:25]
    return {
        "families": {
            name: {"ms": round(total[name] / 1e3, 2), "launches": count[name] / len(devices)}
            for name in total
        },
        "longest_ms": {name: round(us / 1e3, 2) for name, us in longest},
    }


def main(config: Config) -> list[dict[str, Any]]:
    """Times the cases, writes the figures after each, and returns them.

    Raises:
      ConfigError: there is no such case.
    """
    make_place("--out", config.out)
    cases = {name: case_of(name) for name in config.cases}
    rows: list[dict[str, Any]] = []
    report = about(config) | dict(devices=jax.device_count(), rows=rows)

    def write() -> None:
        write_json(config.out, report)

    began = time.perf_counter()
    for name, case in cases.items():
        row: dict[str, Any] = dict(case=name, **dataclasses.asdict(case))
        rows.append(row)
        if case.devices > jax.device_count():
            row["left_out"] = "too few devices"
        elif time.perf_counter() - began > config.seconds:
            row["left_out"] = "no time left"
        else:
            try:
                time_case(case, config, row, write)
            except (
                jax.errors.JaxRuntimeError
            ) as error:  # mostly out of memory; the other cases still count
                row["failed"] = str(error)[:500]
            gc.collect()
        shown = {key: row.get(key) for key in ("tokens_per_second", "share_of_peak")}
        row["seconds"] = round(time.perf_counter() - began, 1)
        print(name, shown, row.get("left_out", row.get("failed", "")), flush=True)
        write()
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
