"""Reads the records of `experiments/results`, which have scores by problem.

SYSTEMS names a system of a record: its last training ("control"), one ("control:8"), all of them
("control:*"), or a group of trainings of the record ("nine"). MEASURE is a task ("gsm8k"), or one
of the nine that alternate in another ("ruler-4k/vt").
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError
from dms_jax.evaluation import Hyperscaling, Measured, Point, difference

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
RECORDS = {  # of each model
    "1.5b": "real_models/qwen2.5-coder-1.5b.json",  # written by `campaign`
    "0.5b": "real_models/qwen2.5-coder-0.5b.json",
    "135m": "real_models/smollm2-135m.json",
    "11m": "reasoner_11m/record.json",
}
NINE = (  # RULER's tasks in their alternating order; the two easiest are measured separately
    *("niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)


@functools.cache
def record(name: str) -> dict[str, Any]:
    """The record of a model: `rows` of one chain, and `votes`."""
    return json.loads((RESULTS / RECORDS[name]).read_text(encoding="utf-8"))


def rows(name: str, systems: str, measure: str) -> list[dict[str, Any]]:
    """The rows of a system or of a group of trainings.

    Raises:
      DataError: the record has none.
    """
    found = []
    for one in record(name).get("groups", {}).get(systems, [systems]):
        system, _, training = one.partition(":")
        own = [
            row
            for row in record(name)["rows"]
            if (row["system"], row["measure"]) == (system, measure.partition("/")[0])
            and training in ("", "*", str(row.get("run")))
        ]
        if not own:
            raise DataError(f"the record {name} has no {one} of {measure}.")
        own.sort(key=lambda row: row.get("run", 0))
        found += own if training == "*" else own[-1:]
    return found


def mean_of(what: str, name: str, systems: str, measure: str) -> float:
    """The mean of a figure over trainings: peak, reads, million_tokens."""
    return float(np.mean([row[what] for row in rows(name, systems, measure)]))


def scores(
    name: str, systems: str, measure: str
) -> Float[np.ndarray, "trainings problems"] | Float[np.ndarray, "seeds 1"]:
    """Scores by problem; the mean of each seed if a record has no more."""
    found = []
    for row in rows(name, systems, measure):
        if "by_seed" in row:
            return np.asarray(row["by_seed"], np.float64)[:, None]
        found.append([float(score) for score in row["scores"]])
    _, _, task = measure.partition("/")
    own = np.asarray(found, np.float64)
    return own[:, NINE.index(task) :: len(NINE)] if task else own


def gap(name: str, left: str, right: str, measure: str) -> Measured:
    """Difference of two systems, paired by problem if scores by problem are known."""
    parts = []
    for each in measure.split("+"):
        one, other = scores(name, left, each), scores(name, right, each)
        if min(one.shape[1], other.shape[1]) > 1:
            parts.append(difference(one, other))
        else:
            spread = math.hypot(*(_error_of_seeds(x.mean(1)) for x in (one, other)))
            parts.append(Measured(float(one.mean() - other.mean()), spread))
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Measured(float(np.mean([part.value for part in parts])), error)


def _error_of_seeds(means: Float[np.ndarray, " seeds"]) -> float:
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def points(name: str, systems: Sequence[str], measure: str = "gsm8k") -> Hyperscaling:
    """The votes of systems on one task.

    A system with a single training stands for as many trainings as the others have.
    """
    found = []
    for one in systems:
        system, _, training = one.partition(":")
        own = [
            each
            for each in record(name)["votes"]
            if (each["system"], each.get("measure", "gsm8k")) == (system, measure)
            and training in ("", "*", str(each["run"]))
        ]
        runs = sorted({each["run"] for each in own}) if training == "*" else [own[-1]["run"]]
        settings = {(each["length"], each["temperature"]): each for each in own}
        for (length, temperature), first in settings.items():
            same = [
                each
                for run_ in runs
                for each in own
                if (each["run"], each["length"], each["temperature"]) == (run_, length, temperature)
            ]
            for chains in map(int, first["scores"]):
                found.append(
                    Point(
                        system=one,
                        compression_ratio=None,
                        length=length,
                        chains=chains,
                        temperature=temperature,
                        policy=first["policy"],
                        scores={"vote": np.stack([_votes(each, chains) for each in same])},
                        reads=np.stack([_spent(each, "reads", chains) for each in same]),
                        peak=np.stack([_spent(each, "peak", chains) for each in same]),
                        new_tokens=float(first["new_tokens"]),
                        ended=float(first["ended"]),
                    )
                )
    most = max(len(point.reads) for point in found)
    return Hyperscaling({}, tuple(_repeated(point, most) for point in found))


def _repeated(point: Point, trainings: int) -> Point:
    if len(point.reads) in (1, trainings):
        wide = functools.partial(np.repeat, repeats=trainings // len(point.reads), axis=0)
        return dataclasses.replace(
            point,
            scores={name: wide(x) for name, x in point.scores.items()},
            reads=wide(point.reads),
            peak=wide(point.peak),
        )
    raise DataError(f"{point.system} has {len(point.reads)} trainings, others have {trainings}.")


def _votes(row: dict[str, Any], chains: int) -> Float[np.ndarray, " problems"]:
    """Scores of votes; the record has a digit of base 36 a problem: the groups that were right."""
    own, groups = row["scores"][str(chains)], row["chains"] // chains
    return np.asarray([int(digit, 36) for digit in own], np.float64) / groups


def _spent(row: dict[str, Any], axis: str, chains: int) -> Float[np.ndarray, " problems"]:
    """Tokens of that many chains per problem; some records have only the mean of greedy ones."""
    own = np.broadcast_to(
        np.asarray(row[axis], np.float64), (len(next(iter(row["scores"].values()))),)
    )
    return own * chains
