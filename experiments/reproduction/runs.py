"""A run in pieces: its plan on disk, its workers, and what a script does with both."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any, Protocol

import dms_jax
from dms_jax import assets
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import FAILED
from dms_jax.model.language_model import LanguageModel
from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.processes import run_workers
from experiments.reproduction.queue import Places, Queue

BASE = "reasoner-11m"
FOLDERS = ("out", "pages", "pack")  # of a plan


class Plan(Protocol):
    """What the settings of every plan have."""

    @property
    def out(self) -> pathlib.Path: ...

    @property
    def model(self) -> str: ...

    @property
    def pages(self) -> pathlib.Path | None: ...

    @property
    def pack(self) -> pathlib.Path | None: ...

    @property
    def processes(self) -> int: ...

    @property
    def deadline_minutes(self) -> float: ...

    @property
    def only(self) -> str: ...


class Worker[P: Places, C: Plan](Queue[P]):
    """One process of a plan whose jobs begin with one base model.

    Args:
      config: the plan.
      paths: where the files are.
      deadline: seconds since the epoch after which nothing new is begun.
    """

    def __init__(self, config: C, paths: P, deadline: float):
        super().__init__(paths, deadline)
        self.config = config

    @functools.cached_property
    def base(self) -> LanguageModel:
        """The base model."""
        return dms_jax.load(self.config.model or assets.path(BASE))


def write_plan(config: Any) -> None:
    """Leaves the plan in the run directory for the workers."""
    data = dataclasses.asdict(config)
    data |= {name: None if data[name] is None else str(data[name]) for name in FOLDERS}
    write_json(config.out / "config.json", data)


def read_plan[C](kind: type[C], root: pathlib.Path) -> C:
    """The plan that is in a run directory, as settings of a kind."""
    data: dict[str, Any] = read_json(root / "config.json")
    data |= {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    data |= {name: None if data[name] is None else pathlib.Path(data[name]) for name in FOLDERS}
    return kind(**data)


def carry_out[C: Plan](config: C, module: str, check: Callable[[C], None]) -> C:
    """Does what is left of a plan, unless the page alone is wanted; returns what was carried out.

    Args:
      config: the plan.
      module: the module whose `worker(root, deadline)` a process calls.
      check: refuses a plan that does not go on with what is there.
    """
    end = time.time() + 60 * config.deadline_minutes
    if config.only != "report":
        check(config)
        make_folder("--out", config.out)
        for leftover in ("locks", "failed"):  # of a run that was cut off
            shutil.rmtree(config.out / leftover, ignore_errors=True)
        write_plan(config)
        run_workers(module, config.out, config.processes, end)
    elif (config.out / "config.json").exists():  # with the folders of this call
        own = {name: getattr(config, name) for name in (*FOLDERS, "only")}
        config = dataclasses.replace(read_plan(type(config), config.out), **own)  # pyright: ignore
    return config


def status(config: Plan) -> int:
    """Says which jobs failed; the exit status of the script."""
    failures = sorted((config.out / "failed").glob("*.txt"))
    for failure in failures:
        print(f"failed: {failure}\n{failure.read_text().strip().splitlines()[-1]}")
    return FAILED if failures else 0


def require_results(config: Plan) -> None:
    """Refuses to write a page of nothing.

    Raises:
      ConfigError: there are no results of the plain cache, which all others are compared with.
    """
    if not any(config.out.glob("results/vanilla/*")):
        raise dms_jax.ConfigError(
            f"{config.out} holds no results yet; the same command without --only makes them."
        )
