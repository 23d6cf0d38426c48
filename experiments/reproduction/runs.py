"""A run in pieces: its plan on disk, its workers, and what a script does with both."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, get_args, get_type_hints

import dms_jax
from dms_jax import assets
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import FAILED
from dms_jax.model.language_model import LanguageModel
from experiments.reproduction.files import read_json, refuse_other_settings, write_json
from experiments.reproduction.processes import run_workers
from experiments.reproduction.queue import Places, Queue

BASE = "reasoner-11m"
_OF_A_CALL = ("out", "pages", "pack", "only")
FREE = {*_OF_A_CALL, "processes", "deadline_minutes"}  # may change from call to call of a plan


class Plan(Protocol):
    """What the settings of every plan have."""

    @property
    def out(self) -> pathlib.Path: ...

    @property
    def pages(self) -> pathlib.Path | None: ...

    @property
    def processes(self) -> int: ...

    @property
    def deadline_minutes(self) -> float: ...

    @property
    def only(self) -> str: ...


class PlanOfOneModel(Plan, Protocol):
    """A plan whose jobs begin with one base model."""

    @property
    def model(self) -> str: ...


class Worker[P: Places, C: PlanOfOneModel](Queue[P]):
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
    write_json(config.out / "config.json", {name: _plain(v) for name, v in vars(config).items()})


def _plain(value: Any) -> Any:
    """A setting as JSON data."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, pathlib.Path) else value


def read_plan[C](kind: type[C], root: pathlib.Path) -> C:
    """The plan that is in a run directory, as settings of a kind."""
    data: dict[str, Any] = read_json(root / "config.json")
    for name, hint in get_type_hints(kind).items():
        if name not in data:
            continue  # a setting that there was none of
        if pathlib.Path in (hint, *get_args(hint)) and data[name] is not None:
            is_one = not isinstance(data[name], list)
            paths = map(pathlib.Path, [data[name]] if is_one else data[name])
            data[name] = next(paths) if is_one else tuple(paths)
        elif isinstance(data[name], list):
            data[name] = tuple(data[name])
    return kind(**data)


def check_plan(config: Plan, free: Collection[str]) -> None:
    """Refuses to go on with other settings than those that made what is in the run directory.

    Args:
      config: the plan of this call.
      free: settings, beside `FREE`, that may change from one call to the next.

    Raises:
      ConfigError: another setting differs.
    """
    if (config.out / "config.json").exists():
        before = read_plan(type(config), config.out)
        refuse_other_settings(before, config, set(vars(config)) - FREE - set(free))


def carry_out[C: Plan](config: C, module: str, check: Callable[[C], None]) -> C:
    """Does what is left of a plan, unless the page alone is wanted; returns what was carried out.

    Args:
      config: the plan.
      module: the module whose `worker(root, deadline)` a process calls.
      check: refuses a plan that does not go on with what is there.
    """
    end = time.time() + 60 * config.deadline_minutes
    if config.only != "report":
        make_folder("--out", config.out)
        check(config)
        for leftover in ("locks", "died", "failed"):  # of a run that was cut off
            shutil.rmtree(config.out / leftover, ignore_errors=True)
        write_plan(config)
        run_workers(module, config.out, config.processes, end)
    elif (config.out / "config.json").exists():  # with the folders of this call
        own = {name: value for name, value in vars(config).items() if name in _OF_A_CALL}
        config = dataclasses.replace(read_plan(type(config), config.out), **own)  # pyright: ignore
    return config


def status(config: Plan) -> int:
    """Says which jobs failed; the exit status of the script."""
    failures = sorted((config.out / "failed").glob("*.txt"))
    for failure in failures:
        print(f"failed: {failure}\n{failure.read_text().strip().splitlines()[-1]}")
    return FAILED if failures else 0


def require_results(config: Plan, needed: str = "results/vanilla/*") -> None:
    """Refuses to write a page of nothing.

    Args:
      config: the plan.
      needed: the files without which there is no page; of the plain cache, with which all others
        are compared.

    Raises:
      ConfigError: there are none.
    """
    if not any(config.out.glob(needed)):
        raise dms_jax.ConfigError(
            f"{config.out} holds no results yet; the same command without --only makes them."
        )


def thinned(steps: Sequence[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """The log of a training for its record: every so many steps, and the last."""
    last = steps[-1]["step"]
    return [rounded(step) for step in steps if step["step"] % every == 0 or step["step"] == last]


def rounded(step: dict[str, Any]) -> dict[str, Any]:
    """A step's figures to five digits."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in step.items()
    }
