"""From the files of single evaluations to curves, comparisons and verdicts.

Seeds of a system at a setting answered the same problems; comparisons are paired by problem and
their errors hold both the choice of problems and the spread of seeds (`dms_jax.evaluation`).
"""

import collections
import dataclasses
from typing import Any, Literal

import numpy as np

from dms_jax.evaluation import (
    Level,
    Measured,
    average_gain,
    difference,
    gain_at,
    mean_over_seeds,
)
from experiments.reproduction.curve.plan import (
    CHOICE_RATIO,
    FURTHER,
    TRAINING_FREE,
    VARIANTS,
    Config,
    Paths,
)
from experiments.reproduction.files import read_json

Axis = Literal["peak", "reads"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A system at one setting on one task, over its seeds.

    Attributes:
      scores: [seeds, problems], means over chains.
      peak, reads: tokens of one chain.
      voted: of the majority vote, the mean over seeds; that of one chain where there is one.
      ratio: tokens seen over live tokens, at the end.
      ended: share of chains that ended by themselves.
      kinds: accuracy of each of several tasks that were asked in turn.
    """

    system: str
    setting: float
    task: str
    seeds: tuple[int, ...]
    scores: np.ndarray
    peak: float
    reads: float
    voted: float
    ratio: float
    new_tokens: float
    ended: float
    kinds: dict[str, float]

    @property
    def accuracy(self) -> Measured:
        return mean_over_seeds(self.scores)

    def level(self, axis: Axis) -> Level:
        return Level(getattr(self, axis), self.scores)

    def to_dict(self) -> dict[str, Any]:
        value, error = self.accuracy.to_list()
        by_seed = self.scores.mean(1).tolist()
        data = {key: value for key, value in vars(self).items() if key != "scores"}
        return {
            **data,
            "accuracy": value,
            "error": error,
            "accuracy_by_seed": by_seed,
            "problems": self.scores.shape[1],
        }


class Results:
    """Every point that was measured."""

    def __init__(self, config: Config):
        self.config = config
        groups: dict[tuple[str, float, str], list[dict[str, Any]]] = collections.defaultdict(list)
        for path in sorted(Paths(config).root.glob("results/*/*.json")):
            data = read_json(path)
            task = path.stem.rsplit("-", 1)[1]
            groups[data["system"], float(data["setting"]), task].append(data)
        self.points = {key: _point(*key, group) for key, group in groups.items()}

    def of(self, system: str, task: str) -> list[Point]:
        """The points of a system on a task, from the least compressed on."""
        own = [p for (name, _, on), p in self.points.items() if (name, on) == (system, task)]
        return sorted(own, key=lambda point: point.setting)

    def get(self, system: str, setting: float, task: str) -> Point | None:
        return self.points.get((system, setting, task))

    @property
    def variants(self) -> list[str]:
        """The DMS variants of which there is anything."""
        systems = {system for system, _, _ in self.points}
        return [name for name in VARIANTS if name in systems]

    @property
    def control(self) -> str:
        """What DMS is held against: vanilla trained further, or vanilla where that is missing."""
        return FURTHER if self.get(FURTHER, 1.0, self.config.asked[0]) else "vanilla"

    @property
    def best(self) -> str | None:
        """The variant with the highest mean accuracy at ratio 4 on the validation problems.

        The problems that it is judged on have no say. Only variants retrofitted with the most
        seeds stand for election: of a single retrofit the error does not hold what another would
        have come to, and the best of many is a lucky one. None before there was an election.
        """
        known = {}
        for name in self.variants:
            judged = [self.get(name, CHOICE_RATIO, task) for task in self.config.asked]
            chosen = self.get(name, CHOICE_RATIO, self.config.choice)
            if chosen and all(judged):
                seeds = min(len(point.seeds) for point in (chosen, *judged) if point)
                known[name] = (seeds, chosen.accuracy.value)
        return max(known, key=known.__getitem__) if known else None

    def curve(self, system: str, task: str, axis: Axis) -> list[Level]:
        """A system's levels. With budget enough a training-free one is vanilla.

        Where a run was cut off, all levels have the seeds that the least of them has.
        """
        points = self.of(system, task)
        if system in TRAINING_FREE and points:
            points += self.of("vanilla", task)
        seeds = min((len(point.seeds) for point in points), default=0)
        return [Level(getattr(point, axis), point.scores[:seeds]) for point in points]

    def against_dense(self, system: str, setting: float, task: str, dense: str) -> Measured | None:
        """What a system gains over one that evicts nothing, in accuracy."""
        point, whole = self.get(system, setting, task), self.get(dense, 1.0, task)
        return difference(point.scores, whole.scores) if point and whole else None

    def against(
        self, system: str, setting: float, rival: str, task: str, axis: Axis
    ) -> Measured | None:
        """What a system scores above another at equal measured budget."""
        point = self.get(system, setting, task)
        return gain_at(point.level(axis), self.curve(rival, task, axis)) if point else None

    def average_gain(self, left: str, right: str, task: str, axis: Axis) -> float | None:
        """Mean gap between the Pareto frontiers of two systems (tables 10 and 11 of the paper)."""

        def points(system: str) -> list[tuple[float, float]]:
            levels = self.curve(system, task, axis)
            return [(level.budget, float(level.scores.mean())) for level in levels]

        return average_gain(points(left), points(right))


def _point(system: str, setting: float, task: str, group: list[dict[str, Any]]) -> Point:
    def mean(name: str) -> float:
        return float(np.mean([data[name] for data in group]))

    return Point(
        system=system,
        setting=setting,
        task=task,
        seeds=tuple(data["seed"] for data in group),
        scores=np.asarray([data["per_problem"]["scores"] for data in group], np.float64),
        peak=mean("peak") / group[0]["chains"],
        reads=mean("reads") / group[0]["chains"],
        voted=float(np.mean([data["voted"][0] for data in group])),
        ratio=mean("compression_ratio"),
        new_tokens=mean("new_tokens"),
        ended=mean("ended"),
        kinds={
            name: float(np.mean([data["tasks"][name]["accuracy"][0] for data in group]))
            for name in group[0].get("tasks", ())
        },
    )
