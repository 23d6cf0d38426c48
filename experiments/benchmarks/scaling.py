"""Times training, decode steps and whole calls on 1, 2, 4 and 8 GPUs of one host, in one table.

A row is a process of `training`, `decode_steps` or `engine`, so that the memory it reports is its
own. Rows of one name are compared with that of one device (`times_one`): `data` gives each device
the same work, `sequence` and `model` split that of one. A row reports tokens a second; the share of
the devices' peak (training) or of the step's roofline (decoding); the most bytes that a device held
beside those planned; and from a profile the share of a step in which collectives run on a device,
and in which nothing else does. NVLink multicast stays off.

    python -m experiments.benchmarks.scaling --out runs/scaling.json
    python -m experiments.benchmarks.scaling --devices 1 8 --parts training    # part of it
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 \
        python -m experiments.benchmarks.scaling --tiny --steps 1              # a dry run
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Literal

import dms_jax
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import FAILED, command, run
from experiments.benchmarks.settings import check_numbers

Part = Literal["training", "decoding", "engine"]
# Of the machine: asked in a process that ends, because jax takes the memory of every GPU.
_ABOUT = (
    "import jax, json; from experiments.benchmarks.timing import environment; "
    "print(json.dumps(environment() | dict(devices=jax.device_count())))"
)
_LEAST_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Config:
    """Time 1, 2, 4 and 8 GPUs."""

    devices: tuple[int, ...] = ()
    """Numbers of devices; by default those of 1, 2, 4 and 8 that the machine has."""
    parts: tuple[Part, ...] = ("training", "decoding", "engine")
    """Parts of the table."""
    tiny: bool = False
    """Tiny models instead of 1B and 8B, to try the command."""
    steps: int = 5
    """Timed steps or calls of a row; the median counts."""
    seconds: float = 3600
    """Seconds for all rows; those that would begin later are left out."""
    out: pathlib.Path = pathlib.Path("runs/scaling.json")
    """JSON file for the table, written after each row."""

    def __post_init__(self):
        check_numbers(self)


@dataclasses.dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
      part: the script that times it.
      name: what it times; equal for rows that are compared.
      data, sequence, model: devices of each axis.
    """

    part: Part
    name: str
    data: int = 1
    sequence: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """The devices of the mesh."""
        return self.data * self.sequence * self.model


def jobs_of(sizes: tuple[int, ...]) -> list[Job]:
    """Returns the rows for these numbers of devices: what each axis does, the goals first."""
    goals: tuple[tuple[Part, str], ...] = (
        ("training", "1b"),
        ("training", "8b"),
        ("decoding", "8b"),
        ("engine", "generate 8b"),
        ("engine", "serve 8b"),
    )
    jobs = [Job(part, name, data=size) for part, name in goals for size in sizes]
    for size in sizes:
        if size > 2:  # two have no room for its training state
            jobs.append(Job("training", "8b-all", data=size))
        if size > 1:
            jobs += [Job("training", "1b", model=size), Job("decoding", "8b", model=size)]
        if size > 2:
            jobs.append(Job("training", "1b", data=size // 2, model=2))
            jobs.append(Job("decoding", "8b", data=size // 2, model=2))
        jobs.append(Job("training", "1b-32k", sequence=size))
    return jobs


def call_of(job: Job, config: Config) -> list[str]:
    """Returns the module and the options that time a row, without its --out."""
    if job.part == "training":
        axes = {axis: getattr(job, axis) for axis in ("data", "sequence", "model")}
        settings = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
        case = "+".join(["tiny-heads" if config.tiny else job.name, "auto", *settings])
        return ["training", "--cases", case, "--steps", str(config.steps)]
    shape = "tiny-heads" if config.tiny else "llama-3.1-8b"
    dtype = "float32" if config.tiny else "bfloat16"
    split = ["--data-parallel", str(job.data), "--model-parallel", str(job.model)]
    if job.part == "decoding":
        sizes = dict(batch=2, context=192, window=16, chunk=4) if config.tiny else {}
        sizes = dict(batch=32, context=4096) | sizes | dict(repeats=config.steps)
        options = ["--shapes", shape, "--ratios", "1", "--profile-below", "9", *split]
        return ["decode_steps", *options, *_options(sizes), "--dtype", dtype]
    lanes = job.data * (2 if config.tiny else 64)
    sizes = dict(lanes=lanes, requests=4 * lanes, runs=config.steps)
    sizes |= dict(new_tokens=4, chunk=4) if config.tiny else dict(new_tokens=128)
    if job.name.startswith("serve"):
        sizes |= dict(clients=lanes)
    prompts = ["5", "9"] if config.tiny else ["64", "1024"]
    return [
        *("engine", "--shape", shape, "--prompts", *prompts, *split),
        *(*_options(sizes), "--dtype", dtype),
    ]


def _options(sizes: dict[str, int]) -> list[str]:
    """Returns the options of these numbers, such as ["--new-tokens", "4"]."""
    return [word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", str(n))]


def figures_of(job: Job, report: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a row from the report of its script."""
    if job.part == "engine":
        runs = sorted(report["runs"], key=lambda each: each["tokens_per_second"])
        return {"tokens_per_second": runs[len(runs) // 2]["tokens_per_second"]}
    (row,) = report["rows"]
    kernels = row.get("kernels") or {}
    if job.part == "training":
        if "failed" in row:
            return {"failed": row["failed"]}
        named = ("tokens_per_second", "share_of_peak", "chosen_remat", "planned_bytes")
        shares = kernels.get("collectives", {})
        return {
            **{name: row[name] for name in named},
            "held_bytes": row["peak_bytes_so_far"],
            "collectives_share": shares.get("share"),
            "collectives_alone_share": shares.get("alone_share"),
        }
    collectives = kernels.get("collectives", {})
    return {
        **{name: row[name] for name in ("tokens_per_second", "share_of_roofline", "step_ms")},
        "collectives_share": collectives.get("share"),
        "collectives_alone_share": collectives.get("alone_share"),
    }


def time_job(job: Job, config: Config, seconds: float) -> dict[str, Any]:
    """Runs the script of a row; returns its figures, or the end of its output if it failed."""
    module, *options = call_of(job, config)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "report.json")
        call = [sys.executable, "-m", f"experiments.benchmarks.{module}", *options]
        environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
        try:
            done = subprocess.run(
                [*call, "--out", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than the {seconds:.0f} seconds that were left"}
        if done.returncode or not out.exists():
            return {"failed": done.stdout[-2000:]}
        return figures_of(job, json.loads(out.read_text(encoding="utf-8")))


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row how many times the tokens/s of one device it has, and its layout's share."""
    alone = {
        (row["part"], row["name"]): row["tokens_per_second"]
        for row in rows
        if row["devices"] == 1 and row.get("tokens_per_second")
    }
    for row in rows:
        one = alone.get((row["part"], row["name"]))
        if one and row.get("tokens_per_second"):
            row["times_one"] = round(row["tokens_per_second"] / one, 3)


def main(config: Config) -> int:
    """Times the rows and writes the table after each; returns 1 if a row failed."""
    make_place("--out", config.out)
    asked = subprocess.run([sys.executable, "-c", _ABOUT], stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        raise dms_jax.ConfigError("jax finds no device: its error is above.")
    about = json.loads(asked.stdout.splitlines()[-1])
    sizes = config.devices or tuple(n for n in (1, 2, 4, 8) if n <= about["devices"])
    if max(sizes) > about["devices"]:
        raise dms_jax.ConfigError(f"--devices {max(sizes)}: there are {about['devices']}.")
    rows: list[dict[str, Any]] = []
    report = about | {"command": command(without=("--out",)), "rows": rows}
    began = time.perf_counter()
    for job in jobs_of(sizes):
        if job.part not in config.parts:
            continue
        row = dataclasses.asdict(job) | {"devices": job.devices}
        rows.append(row)
        start = time.perf_counter()
        left = config.seconds - (start - began)
        if left < _LEAST_SECONDS:
            row["left_out"] = "no time left"
        else:
            row |= time_job(job, config, left) | {"seconds": round(time.perf_counter() - start, 1)}
        compare(rows)
        shown = [row.get(key) for key in ("tokens_per_second", "times_one", "share_of_peak")]
        mesh = f"{job.data} x {job.sequence} x {job.model}"
        print(job.part, job.name, mesh, *shown, row.get("failed", ""), flush=True)
        write_json(config.out, report)
    return FAILED if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
