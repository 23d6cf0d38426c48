"""Times a newcomer's commands to a first token, a comparison, a retrofit and a server.

Each step runs as a separate process in an empty folder with an empty compile cache; the three
commands of the documentation share one folder and cache. The main figure is CPU time of all
threads, with wall seconds and machine load beside it, because other processes may use the cores.
With `--again` each step runs again with a filled cache. The models and texts ship; nothing is
downloaded.

    python -m experiments.benchmarks.first_results
    python -m experiments.benchmarks.first_results --only token server --again 3
"""

import dataclasses
import json
import os
import pathlib
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import dms_jax
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.compilation import SWITCH
from experiments.benchmarks.serving import ask, model_name, started
from experiments.benchmarks.settings import check_numbers

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
BLOCK = "block.py"  # the block of README.md that retrofits, as a file
LONGEST = 7200  # timeout of a step, seconds


@dataclasses.dataclass(frozen=True)
class Step:
    """A command.

    Attributes:
      what: its place in the documentation.
      command: the command line.
      folder: steps of one folder run in sequence, the first with an empty compile cache.
      figures: the JSON file that it writes there, with the key and the fields of the rows to
        record; None if it writes none.
    """

    what: str
    command: str
    folder: str
    figures: tuple[str, str, tuple[str, ...]] | None = None


SERVE = "dms-jax serve"
STEPS = {
    "token": Step(
        "documentation, Generate",
        'dms-jax generate "Once upon a time" --max-new-tokens 60',
        "token",
    ),
    "comparison": Step(
        "documentation, Compare, two policies",
        "dms-jax evaluate --model stories260k --task text --task-options max_tokens=1000 "
        "--policies Vanilla TOVA,compression_ratio=4 StreamingLLM,compression_ratio=4",
        "comparison",
    ),
    "python": Step("README.md, Retrofit (Python)", f"python {BLOCK}", "python"),
    "server": Step(
        "documentation, Serve, until a completion of 60 tokens",
        f"{SERVE} --lanes 4 --max-tokens 512",
        "server",
    ),
    "retrofit": Step(
        "three commands, 1",
        "dms-jax retrofit self-taught-stories260k --out mine",
        "three",
        (
            "mine/results.json",
            "systems",
            ("tokens", "peak", "live", "distillation", "decoded_loss"),
        ),
    ),
    "story": Step(
        "three commands, 2",
        'dms-jax generate "Once upon a time" --adapter mine/training/model --max-new-tokens 300',
        "three",
    ),
    "frontier": Step(
        "three commands, 3",
        "dms-jax evaluate --model stories260k --task text --task-options max_tokens=4000 "
        "--policies Vanilla DMS,adapter=mine/training/snapshots/4 TOVA,compression_ratio=4 "
        "StreamingLLM,compression_ratio=4 --out mine/policies.json",
        "three",
        (
            "mine/policies.json",
            "systems",
            ("name", "loss", "change", "peak", "reads"),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time first results."""

    only: tuple[str, ...] = tuple(STEPS)
    """Steps to time, by name; story and frontier need the files of retrofit."""
    again: int = 0
    """Repetitions of each step."""
    out: pathlib.Path = pathlib.Path("runs/first_results/times.json")
    """JSON file for the figures, which are written after every step."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("again",))


def words_of(command: str) -> list[str]:
    """The command line for a process of this Python."""
    program, *options = shlex.split(command)
    return [
        sys.executable,
        *(["-m", "dms_jax.command_line"] if program == "dms-jax" else []),
        *options,
    ]


def block() -> str:
    """The block of README.md that retrofits.

    Raises:
      DmsJaxError: there is none.
    """
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for text in found:
        if "dms_jax.retrofit(" in text:
            return text
    raise dms_jax.DmsJaxError(f"{README.name} has no block of Python that retrofits.")


def typed(command: str, work: pathlib.Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command to its end, or a server until it has answered; returns its output.

    Raises:
      DmsJaxError: it failed.
    """
    if command.startswith(SERVE):
        start = time.perf_counter()
        with started(command.removeprefix(SERVE), environment) as address:
            ready = time.perf_counter() - start
            body = dict(model=model_name(address), prompt="Once upon a time", max_tokens=60)
            answer = ask(address, body | dict(temperature=0, stream=True))
        if answer.error is not None:
            raise dms_jax.DmsJaxError(f"{command}: {answer.error}")
        return {"ready_seconds": round(ready, 1)}
    done = subprocess.run(
        words_of(command),
        cwd=work,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )
    if done.returncode:
        raise dms_jax.DmsJaxError(f"{command}: {done.stdout[-2000:]}")
    return {}


def timed(step: Step, folder: pathlib.Path) -> dict[str, Any]:
    """Runs a step in its folder and returns its seconds."""
    cache = folder / "compiled"
    row: dict[str, Any] = {
        "what": step.what,
        "command": step.command,
        "cache": "of the steps before" if cache.exists() else "empty",
    }
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / BLOCK).write_text(block(), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if "JAX_COMP" not in name}
    load, start = os.getloadavg()[0], time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = typed(step.command, work, environment | {SWITCH: str(cache)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return row | {
        "processor_seconds": round(processor, 1),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        **told,
        **({} if step.figures is None else {"figures": figures(work, *step.figures)}),
    }


def figures(work: pathlib.Path, file: str, key: str, fields: tuple[str, ...]) -> Any:
    """Returns the recorded part of a results file: named rows by name, others in order."""
    rows = json.loads((work / file).read_text(encoding="utf-8"))[key]
    chosen = [
        {field: row[field] for field in fields}
        for row in (rows.values() if isinstance(rows, dict) else rows)
    ]
    return dict(zip(rows, chosen, strict=True)) if isinstance(rows, dict) else chosen


def main(config: Config) -> list[dict[str, Any]]:
    """Runs the steps in sequence, writes the figures after each, and returns them."""
    check_names("--only", config.only, STEPS)
    make_place("--out", config.out)
    rows: list[dict[str, Any]] = []
    report = provenance(config) | {"cores": os.cpu_count(), "rows": rows}
    with tempfile.TemporaryDirectory() as place:
        for name in config.only:
            for _ in range(1 + config.again):
                rows.append(timed(STEPS[name], pathlib.Path(place) / STEPS[name].folder))
                print(
                    f"{rows[-1]['processor_seconds']} s of processor time, "
                    f"{rows[-1]['wall_seconds']} s: {rows[-1]['command']}",
                    flush=True,
                )
                write_json(config.out, report)
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
