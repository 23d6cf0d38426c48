"""RULER's tasks but the two needles, one by one and by what lessons with retrieval had of them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dms_jax.evaluation import difference
from experiments.reproduction.claims.cells import percent, table
from experiments.reproduction.real import legends
from experiments.reproduction.real.measures import tokens_of
from experiments.reproduction.real.names import shown
from experiments.reproduction.real.results import Results, score
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    FREE,
    OTHERS,
    RULER_TASKS,
    SHORT_TASKS,
    TRAININGS,
    VANILLA,
)
from experiments.reproduction.real.training import QWEN

# RULER's tasks by what the problems of retrieval among the lessons have of them (`lessons.py`).
WORDINGS = {
    "worded alike": ("niah_multikey_1", "niah_multikey_2", "vt"),
    "other needles": ("niah_single_3", "niah_multikey_3", "niah_multivalue", "niah_multiquery"),
    "unlike": ("cwe", "fwe"),
}


def ruler(config: Config, results: Results, model: str) -> str:
    """A table for each length, with what it is of; nothing where no such task was asked."""
    kinds = (RULER_TASKS, SHORT_TASKS)
    asked = [each for each in OTHERS[model] if results.labels(model, each)]
    own = [each for each in asked if each.partition("-")[0] in kinds]
    parts = [_of_length(config, results, model, each) for each in own]
    parts += [legends.RULER] if parts else []
    if model == QWEN:
        parts += [_by_wording(config, results, each) for each in own]
    return "\n\n".join(filter(None, parts))


def _of_length(config: Config, results: Results, model: str, measure: str) -> str:
    def place(label: str) -> tuple[bool, bool, float]:
        value = score(results.records[model, label, measure]).value
        return label != VANILLA, label in FREE, -value

    labels = sorted(results.labels(model, measure), key=place)
    tasks = list(results.records[model, labels[0], measure]["tasks"])
    rows = []
    for label in labels:
        record = results.records[model, label, measure]
        gap = None if label == VANILLA else results.gap(model, label, VANILLA, measure)
        rows.append(
            [
                shown(results, label, record),
                *(f"{100 * record['tasks'][task]['accuracy'][0]:.0f}" for task in tasks),
                percent(score(record)),
                "" if label == VANILLA else percent(gap, sign=True),
                f"{record['peak']:.0f}",
            ]
        )
    heads = ["", *(task.removeprefix("niah_") for task in tasks), "mean", "to vanilla", "peak"]
    return f"{tokens_of(config, measure):,} tokens:\n\n" + table(heads, rows)


def _by_wording(config: Config, results: Results, measure: str) -> str:
    """What learned in a run is behind the model itself, by `WORDINGS`.

    Nothing where no system of that run had lessons with retrieval.
    """
    whole = results.get(QWEN, VANILLA, measure)
    if whole is None:
        return ""
    learned = [label for label in results.labels(QWEN, measure) if label not in FREE]
    of_run = {label: results.records[QWEN, label, measure] for label in learned}
    of_run = {label: each for label, each in of_run.items() if each["run"] == whole["run"]}
    if all(TRAININGS[each["system"]].lessons != "mixed" for each in of_run.values()):
        return ""
    first, *others = WORDINGS.values()
    groups = [first, *others, tuple(itertools.chain(*others))]
    of_model = [_of_tasks(whole, group) for group in groups]
    rows = [[f"{shown(results, VANILLA, whole)}, %", *(f"{100 * s.mean():.1f}" for s in of_model)]]
    for label, record in sorted(of_run.items(), key=lambda each: -each[1]["score"][0]):
        pairs = zip((_of_tasks(record, group) for group in groups), of_model, strict=True)
        gaps = [percent(difference(own[None], model[None]), sign=True) for own, model in pairs]
        rows.append([shown(results, label, record), *gaps])
    names = [*WORDINGS, "both"]
    heads = [f"{name} ({len(s)})" for name, s in zip(names, of_model, strict=True)]
    told = (
        f"{tokens_of(config, measure):,} tokens, points to vanilla, by what lessons had of a task:"
    )
    return "\n\n".join([told, table(["", *heads], rows), legends.WORDINGS])


def _of_tasks(record: dict[str, Any], tasks: Sequence[str]) -> np.ndarray:
    """Scores of the problems of some tasks; those of all tasks are asked in turn."""
    every = list(record["tasks"])
    scores = np.asarray(record["per_problem"]["scores"], np.float64).reshape(-1)
    return np.concatenate([scores[every.index(task) :: len(every)] for task in tasks])
