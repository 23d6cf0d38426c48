"""Counts what GPUs send each other in programs compiled for them, without the GPUs.

XLA compiles the training steps of `training` and the decode steps of an 8B shape for 4 and 8 GPUs
of one host (`make gpu-compiler`). For each program: the collectives of a step, the bytes that a GPU
sends in them, the seconds these take at the links' rate, and the tokens/s of all GPUs in multiples
of one GPU's, if nothing of that is hidden behind computing. A step of one GPU takes as long as one
H200 was timed (`--timed`); of all weights of 8B, which do not fit one, as many operations a second
are expected as of its adapter.

    python -m experiments.benchmarks.collectives --kind h200
    python -m experiments.benchmarks.collectives --kind h100   # adds to the same file
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections import Counter
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import dms_jax
from dms_jax import sharding
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.devices import DEVICES
from dms_jax.generation import programs
from dms_jax.policies import DMS, Vanilla
from dms_jax.training.planning import bytes_a_device
from dms_jax.training.program import program_of_shape
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import COMMON, SHAPES
from experiments.benchmarks.training import case_of, recipe_of
from tests.generation import split_steps
from tests.support import gpu_compiler
from tests.support.ahead import GPU_COMPILER, compile_ahead
from tests.training.collectives import collectives, moved_bytes

# Nothing is timed: no kernels are compared, and ptxas optimizes little.
_OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_force_compilation_parallelism": 1,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
# Of the bytes of whole arrays, what each of N devices sends: this times (N - 1) / N.
_SENT = {"all-reduce": 2}
# The collectives of a step on two H200s, 37.2 ms for 6.0 GB and 223 ms for 37.0 GB
# (results/training/two_gpus_kept.json), beside products on the same cores.
_SEEN_RATE = 164e9


@dataclasses.dataclass(frozen=True)
class Config:
    """Count collectives."""

    kind: Literal["h200", "h100"] = "h200"
    """GPU to compile for; rows of others in --out stay."""
    devices: tuple[int, ...] = (4, 8)
    """Numbers of GPUs of one host."""
    cases: tuple[str, ...] = ("1b+auto", "8b+auto", "8b-all+auto")
    """Cases of `training`, on that many devices along `data`."""
    decode: bool = True
    """Also decode steps of an 8B shape with heads split over the devices."""
    timed: pathlib.Path = pathlib.Path("experiments/results/training/auto_now.json")
    """Report of `training` with the tokens/s of one GPU."""
    out: pathlib.Path = pathlib.Path("runs/collectives.json")
    """JSON file for the figures, written after each program."""

    def __post_init__(self):
        check_numbers(self)


def mesh_of(kind: str, data: int, model: int) -> Mesh:
    """Returns a mesh of absent GPUs of one host."""
    count = data * model
    devices = np.array(gpu_compiler.devices(kind, count, a_host=count))
    return Mesh(
        devices.reshape(data, model),
        (sharding.DATA, sharding.MODEL),
        axis_types=(AxisType.Auto,) * 2,
    )


def counted(text: str, devices: int, steps: int = 1) -> dict[str, dict[str, int]]:
    """Returns for each kind the number of collectives of a step and the bytes that a GPU sends.

    Args:
      text: a compiled program.
      devices: number of GPUs, which all take part.
      steps: steps of the program; collectives outside of them do not count.
    """
    count, sent = Counter[str](), Counter[str]()
    for kind, arrays, times in collectives(text):
        if times % steps == 0:
            size = moved_bytes(kind, arrays, devices) * _SENT.get(kind, 1)
            count[kind] += times // steps
            sent[kind] += times // steps * size * (devices - 1) // devices
    return {kind: {"count": count[kind], "bytes": sent[kind]} for kind in sorted(count)}


def training_row(kind: str, name: str, count: int, rates: dict[str, float]) -> dict[str, Any]:
    """Compiles a training step; returns its figures."""
    case = case_of(f"{name}+data{count}")
    config = dms_jax.ModelConfig.from_hf(COMMON | SHAPES[case.shape])
    mesh, sheet = mesh_of(kind, count, 1), DEVICES[kind]
    assert sheet.link is not None
    policy, recipe = DMS(window=256, source="adapter"), recipe_of(case)
    program = program_of_shape(config, policy, recipe, mesh, "bfloat16", memory=float(sheet.memory))
    lowered = program.lower(program.recipe.stages[0])
    report = compile_ahead(lowered, f"{count} x {kind}", _OPTIONS)
    memory = report.memory
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = counted(report.text, count)
    sent = sum(each["bytes"] for each in found.values())
    step = case.sequences * case.length / rates[name]
    return dict(
        remat=program.recipe.remat,
        planned_bytes=memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes,
        constant_bytes=bytes_a_device(program.constants),
        collectives=found,
        sent_bytes=sent,
        one_gpu_seconds=step,
        link_seconds=sent / sheet.link,
        seen_seconds=sent / _SEEN_RATE,
        times_one_unhidden=count * step / (step + sent / sheet.link),
        times_one_unhidden_seen=count * step / (step + sent / _SEEN_RATE),
    )


def decode_row(kind: str, count: int) -> dict[str, Any]:
    """Compiles decode steps with heads over `model`; returns the figures of a step."""
    config = dms_jax.ModelConfig.from_hf(COMMON | SHAPES["llama-3.1-8b"])
    mesh = mesh_of(kind, 1, count)
    given = split_steps.split_arguments(Vanilla(), config, mesh, split_steps.GREEDY)
    with jax.set_mesh(mesh), mock.patch.object(jax, "default_backend", return_value="gpu"):
        lowered = programs.decode.on_gpu.trace(*given).lower(lowering_platforms=("cuda",))
        text = compile_ahead(lowered, f"{count} x {kind}", _OPTIONS).text
    found = counted(text, count, split_steps.STEPS)
    sent, link = sum(each["bytes"] for each in found.values()), DEVICES[kind].link
    assert link is not None
    return dict(collectives=found, sent_bytes=sent, link_seconds=sent / link)


def rates_of(path: pathlib.Path) -> dict[str, float]:
    """Returns the tokens/s of one GPU by case; of all 8B weights by their operations."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rates = {row["case"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    # Four forward passes' operations instead of three: frozen matrices have no gradients.
    return rates | {"8b-all+auto": rates["8b+auto"] * 3 / 4}


def main(config: Config) -> None:
    """Compiles the programs, and writes the figures after each."""
    make_place("--out", config.out)
    jax.config.update("jax_platforms", "cpu")  # leaves a present GPU alone
    if not (GPU_COMPILER / "jax_plugins").exists():
        raise dms_jax.ConfigError("The compiler for GPUs is not there: `make gpu-compiler`.")
    sys.path.append(str(GPU_COMPILER))
    rates, kind = rates_of(config.timed), config.kind
    earlier = json.loads(config.out.read_text(encoding="utf-8")) if config.out.exists() else {}
    rows = [row for row in earlier.get("rows", ()) if row["device"] != kind]
    report = provenance(config) | {"device": None, "seen_rate": _SEEN_RATE, "rows": rows}
    for count in config.devices:
        for name in (*config.cases, *(["8b decode"] if config.decode else [])):
            start = time.perf_counter()
            decodes = name == "8b decode"
            row: dict[str, Any] = dict(device=kind, devices=count, program=name)
            row |= decode_row(kind, count) if decodes else training_row(kind, name, count, rates)
            rows.append(row | {"compile_seconds": round(time.perf_counter() - start)})
            print(kind, count, name, f"{row['sent_bytes'] / 1e9:.2f} GB a GPU", flush=True)
            write_json(config.out, report)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
