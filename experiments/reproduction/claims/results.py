"""From the files of the answers to accuracies, votes, and points of the frontier."""

import dataclasses
import json
from typing import Any

import numpy as np

from dms_jax.evaluation import Measured, difference, mean_over_seeds
from dms_jax.evaluation.hyperscaling_result import Hyperscaling, Point
from experiments.reproduction.claims.plan import Paths
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import LENGTHS
from experiments.reproduction.files import read_json

CHAINS = (1, 2, 4, 8, 16)  # W on the frontier


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one system answered at one setting, with one seed.

    Attributes:
      described: system, setting, seed, measure, policy and the rest, as JSON data.
      scores, answer_scores: [problems, chains], of each chain, and of the answer that it votes for.
      answers: [problems, chains], equal numbers for equal answers; -1 for none.
      reads, peak: [problems, chains], tokens of a chain.
      new_tokens, ended: [problems, chains].
    """

    described: dict[str, Any]
    scores: np.ndarray
    answer_scores: np.ndarray
    answers: np.ndarray
    reads: np.ndarray
    peak: np.ndarray
    new_tokens: np.ndarray
    ended: np.ndarray

    def vote(self, chains: int) -> np.ndarray:
        """[problems]: score of the majority of `chains` chains.

        The mean over the disjoint groups of so many; ties go to the answer seen first.
        """
        groups = self.scores.shape[1] // chains
        votes = np.zeros((groups, len(self.scores)))
        for group in range(groups):
            own = slice(group * chains, (group + 1) * chains)
            winners = majority(self.answers[:, own])
            scores = np.take_along_axis(
                self.answer_scores[:, own], np.maximum(winners, 0)[:, None], axis=1
            )[:, 0]
            votes[group] = np.where(winners >= 0, scores, 0.0)
        return votes.mean(0)


def majority(answers: np.ndarray) -> np.ndarray:
    """The first chain with the most frequent answer of each problem; -1 where none answered.

    # In: [[0, -1, 1, 1], [-1, -1, -1, -1]]  Out: [2, -1]
    """
    same = (answers[:, :, None] == answers[:, None, :]).sum(2)
    same = np.where(answers >= 0, same, 0)
    return np.where(same.max(1) > 0, same.argmax(1), -1)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A system at one setting on one measure, over its seeds.

    Attributes:
      scores: [seeds, problems], means over the chains.
      peak, reads: tokens of one chain.
      ratio: tokens seen over live tokens, at the end.
      ended: share of chains that ended by themselves.
    """

    scores: np.ndarray
    peak: float
    reads: float
    ratio: float
    ended: float

    @property
    def accuracy(self) -> Measured:
        """Mean over problems and seeds."""
        return mean_over_seeds(self.scores)


class Results:
    """Every answer of a run directory."""

    def __init__(self, config: Config):
        self.config, self.paths = config, Paths(config)
        self._answers: dict[tuple[str, str, str], dict[int, Answers]] = {}
        for path in sorted(self.paths.root.glob("results/*/*.npz")):
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            described = json.loads(str(arrays.pop("described")))
            wide = {"scores", "answer_scores", "reads", "peak"}
            arrays = {n: a.astype(np.float64) if n in wide else a for n, a in arrays.items()}
            key = (described["system"], described["setting"], described["measure"])
            answers = Answers(described, **arrays)
            self._answers.setdefault(key, {})[described["seed"]] = answers

    def keys(self) -> list[tuple[str, str, str]]:
        """(system, setting, measure) of everything that was measured."""
        return list(self._answers)

    def answers(self, system: str, setting: str, measure: str) -> list[Answers]:
        """The answers of a system, seed by seed."""
        own = self._answers.get((system, setting, measure), {})
        return [own[seed] for seed in sorted(own)]

    def settings(self, system: str, measure: str) -> list[str]:
        """Settings at which a system answered, in the order of their ratios where they have one."""
        own = [at for name, at, on in self._answers if (name, on) == (system, measure)]
        return sorted(own, key=lambda at: (float(at) if at.replace(".", "").isdigit() else 0, at))

    def cell(self, system: str, setting: str, measure: str) -> Cell | None:
        """What a system does at a setting; None if that was not measured."""
        own = self.answers(system, setting, measure)
        if not own:
            return None
        return Cell(
            scores=np.stack([each.scores.mean(1) for each in own]),
            peak=float(np.mean([each.peak.mean() for each in own])),
            reads=float(np.mean([each.reads.mean() for each in own])),
            ratio=float(np.mean([each.described["compression_ratio"] for each in own])),
            ended=float(np.mean([each.ended.mean() for each in own])),
        )

    def gap(self, left: tuple[str, str], right: tuple[str, str], measure: str) -> Measured | None:
        """Accuracy of one (system, setting) less that of another, paired by problem."""
        one, other = self.cell(*left, measure), self.cell(*right, measure)
        return difference(one.scores, other.scores) if one and other else None

    def training(self, name: str) -> list[dict[str, Any]]:
        """The thinned logs of a training, seed by seed."""
        paths = sorted((self.paths.root / "summaries").glob(f"{name}-[0-9]*.json"))
        logs = [read_json(path) for path in paths]
        return [log for log in logs if log["training"] == name]

    def frontier(self, systems: dict[str, str]) -> Hyperscaling:
        """All L-W-CR points of systems, under the names that they are given.

        A system with fewer seeds than the most has its own repeated: its spread of seeds counts as
        none.
        """
        points = []
        found = {
            (label, setting, length): self.answers(system, setting, f"frontier{length}")
            for label, system in systems.items()
            for length in LENGTHS
            for setting in self.settings(system, f"frontier{length}")
        }
        most = max((len(own) for own in found.values()), default=0)
        for (label, setting, length), own in found.items():
            own = [own[seed % len(own)] for seed in range(most)]
            for chains in CHAINS:
                if own[0].scores.shape[1] % chains:
                    continue
                points.append(
                    Point(
                        system=label,
                        compression_ratio=float(setting),
                        length=length,
                        chains=chains,
                        policy=own[0].described["policy"],
                        scores={"vote": np.stack([each.vote(chains) for each in own])},
                        reads=np.stack([chains * each.reads.mean(1) for each in own]),
                        peak=np.stack([chains * each.peak.mean(1) for each in own]),
                        new_tokens=float(np.mean([each.new_tokens.mean() for each in own])),
                        ended=float(np.mean([each.ended.mean() for each in own])),
                    )
                )
        order = list(systems)
        points.sort(key=lambda point: order.index(point.system))
        return Hyperscaling({"chains": list(CHAINS), "lengths": list(LENGTHS)}, tuple(points))


def last_figure(log: dict[str, Any], name: str, form: str) -> str:
    """The last figure of a training that was finite; a dash if none was."""
    figures = [step[name] for step in log["steps"] if step[name] is not None]
    return format(figures[-1], form) if figures else "-"
