"""What a run directory and the page before it hold: figures of each system, paired."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import dms_jax
from dms_jax.evaluation import Measured, difference, majority, mean_over_problems
from dms_jax.evaluation.hyperscaling_result import Hyperscaling, Point
from experiments.reproduction.files import read_json
from experiments.reproduction.real.commands import jobs_command
from experiments.reproduction.real.plan import Job, Paths, jobs
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    CHOICES,
    FREE,
    FRONTIER,
    FRONTIERS,
    PLANNED,
    RIVAL,
    TRAININGS,
    UNSEEN,
    VANILLA,
)
from experiments.reproduction.real.training import QWEN, SMOLLM2
from experiments.reproduction.runs import read_plan

TASKS = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "needle")  # accuracies of SmolLM2
CHAINS = (1, 2, 4, 8)
THREE = "three/three.json"  # what `three_commands.sh` wrote, in the run directory
Key = tuple[str, str, str]  # model, label of the system, measure
RunKey = tuple[int, str, str, str]  # of which run, and a key


@dataclasses.dataclass(frozen=True)
class Results:
    """Every figure of a run, and those of other runs.

    Attributes:
      run: number of this run.
      main: number of the run that the verdicts are about; this one, unless what is decided was
        measured by an earlier one alone.
      decided: the training that the verdicts are about, if it was decided before the run.
      records: (model, label of the system, measure) -> its figures; `run` says whose they are.
        Of several runs' those of the main one, else those of the last.
      trainings: name -> thinned log, of this run.
      speed: rows of the timed steps, all of one run, with the device; None if there are none.
      by_run: (run, model, label, measure) -> figures, of every run.
      earlier_trainings: thinned logs of other runs.
      three: seconds of the three commands from an empty directory, and the run that timed them;
        None if they were not timed.
      commands: number of a run -> the commands that measured it, where they are known.
    """

    run: int
    main: int
    records: dict[Key, dict[str, Any]]
    trainings: dict[str, dict[str, Any]]
    speed: dict[str, Any] | None
    by_run: dict[RunKey, dict[str, Any]] = dataclasses.field(default_factory=dict)
    earlier_trainings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    three: dict[str, Any] | None = None
    decided: str = ""
    commands: dict[int, list[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, config: Config) -> "Results":
        """All files of the run directories, and of the page of earlier runs if it is given."""
        by_run, trainings, three, commands = {}, {}, None, []
        for root in (config.out, *config.also):
            for path in sorted(root.glob("results/*/*/*.json")):
                model, label, measure = (*path.parts[-3:-1], path.stem)
                record = read_json(path) | {"run": config.run}
                if "chains_of_problems" in record:
                    record["votes"] = votes_of(record["chains_of_problems"])
                parts = record.pop("tasks") if measure == CHOICES else {measure: {}}
                for task, figures in parts.items():
                    key = (config.run, model, label, task)
                    by_run.setdefault(key, record | figures | {"measure": task})
            place = Paths(dataclasses.replace(config, out=root))
            for name in TRAININGS.keys() - trainings.keys():
                if log := read_json(place.summary(name)):
                    trainings[name] = log | {"run": config.run}
            if three is None and (timed := read_json(root / THREE)):
                three = timed | {"run": config.run}
            if (root / "config.json").exists():
                plan = read_plan(Config, root)
                commands.append(jobs_command(plan, _chosen(plan, place)))
        trainings = {name: trainings[name] for name in TRAININGS if name in trainings}
        speed = next((by_run.pop(key) for key in list(by_run) if key[3] == "speed"), None)
        known = {config.run: commands} if commands else {}
        told: dict[str, Any] = dict(decided=config.judged, commands=known)
        if config.earlier is None:
            return cls._of(config, by_run, trainings, speed, three=three, **told)
        page = read_json(config.earlier)
        if page is None:
            raise dms_jax.ConfigError(f"--earlier {config.earlier} is not there.")
        for row in page["systems"]:
            number = row.get("run", 1)
            if number != config.run:
                key = _key(row)
                scores = "loss" if key[2] == "text" else "scores"
                problems = {"per_problem": {scores: row["per_problem"]}}
                by_run[number, *key] = row | {"run": number} | problems
        logs = [{"run": 1} | log for log in page["trainings"]]
        before = [log for log in logs if log["run"] != config.run]
        speed, three = speed or page["speed"], three or page.get("three")
        before_it = {int(number): lines for number, lines in page.get("commands", {}).items()}
        told |= {"commands": before_it | known, "earlier_trainings": before, "three": three}
        return cls._of(config, by_run, trainings, speed, **told)

    @classmethod
    def _of(
        cls, config: Config, by_run: dict[RunKey, dict[str, Any]], *of_run: Any, **told: Any
    ) -> "Results":
        """With the figures of each system that stand in the tables."""
        judged = [QWEN, end_of(config.judged), "gsm8k"] if config.judged else []
        main = max((run for run, *key in by_run if key == judged), default=config.run)
        records: dict[Key, dict[str, Any]] = {}
        for key in sorted(by_run, key=lambda key: (key[0] != main, -key[0], key)):
            records.setdefault(key[1:], by_run[key])
        return cls(config.run, main, records, *of_run, by_run=by_run, **told)

    @property
    def logs(self) -> list[dict[str, Any]]:
        """Thinned logs of all trainings, those of this run first."""
        return [*self.trainings.values(), *self.earlier_trainings]

    @property
    def runs(self) -> dict[int, list[dict[str, Any]]]:
        """Number of each run -> its records, which say the devices and the date."""
        runs: dict[int, list[dict[str, Any]]] = {}
        for record in self.records.values():
            runs.setdefault(record["run"], []).append(record)
        return runs

    @property
    def judged(self) -> str:
        """The training that the verdicts are about.

        Of the rivals the one that solves most of the training questions that are in no lesson; of
        those that are within one error of it, the nearest to the model. No test problem is looked
        at. The planned one where that was not measured. If it was decided before the run, nothing
        chooses.
        """
        if self.decided:
            return self.decided
        asked = self.rivals(UNSEEN)
        if not asked:
            return PLANNED
        best = max(asked, key=lambda name: self.records[QWEN, end_of(name), UNSEEN]["score"][0])
        return next(name for name in asked if name == best or self._level(name, best))

    def _level(self, name: str, best: str) -> bool:
        gap = self.gap(QWEN, end_of(name), end_of(best), UNSEEN)
        return gap is not None and abs(gap.value) <= gap.error

    def of_run(self, run: int, *key: str) -> dict[str, Any] | None:
        """The record (model, label, measure) of a run; None if that run did not measure it."""
        return self.by_run.get((run, *key))  # pyright: ignore[reportArgumentType]

    def get(self, model: str, label: str, measure: str) -> dict[str, Any] | None:
        """The figures of a system; None if there are none."""
        return self.records.get((model, label, measure))

    def labels(self, model: str, measure: str) -> list[str]:
        """The systems that a measure was taken of."""
        return [label for name, label, on in self.records if (name, on) == (model, measure)]

    def rivals(self, measure: str | None = None) -> list[str]:
        """The planned training of Qwen and its rival, the nearest to the model first.

        Nearness is the divergence on training questions that were held out: no test problem is
        looked at.

        Args:
          measure: only trainings that it was taken of; None for all.
        """
        asked = lambda name: measure is None or (QWEN, end_of(name), measure) in self.records  # noqa: E731
        names = [name for name in (PLANNED, RIVAL) if name in self.trainings and asked(name)]
        return sorted(names, key=lambda name: self.trainings[name]["held_out"]["distillation"])

    def gap(
        self, model: str, one: str, other: str, measure: str, run: int | None = None
    ) -> Measured | None:
        """The score of one system less that of another of the same run, paired by problem.

        Where that run did not ask the other one, it is the other's of another run. None where one
        of them was not asked, or was asked other problems. The run is that of the tables, unless
        another one is given.
        """
        return _difference(*self._beside(model, one, other, measure, run), measure)

    def _beside(
        self, model: str, one: str, other: str, measure: str, run: int | None = None
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The figures of two systems, of one run if the other was measured there."""
        left, right = (self.get(model, label, measure) for label in (one, other))
        left = left if run is None else self.of_run(run, model, one, measure)
        if left and right and left["run"] != right["run"]:
            right = self.of_run(left["run"], model, other, measure) or right
        return left, right

    def unpaired(self, model: str, one: str, other: str, measure: str) -> bool:
        """Whether two systems were both asked, but not the same problems."""
        asked = None not in self._beside(model, one, other, measure)
        return asked and self.gap(model, one, other, measure) is None

    def mean_gap(self, one: str, other: str) -> Measured | None:
        """The mean over SmolLM2's tasks of paired differences, of one run that has them all.

        Of several of them the main one, else the last. What needs no training is the same in every
        run: the other system's answers that the run lacks are another's, and if no run has all
        tasks of the one, they are of several, each difference of one of them. What holds as much as
        a retrofit of its run (`LIKE`) is of that run.
        """
        run = self.run_of_mean(one, other)
        if run is not None:
            return _mean([gap for gap in self._of_tasks(run, one, other) if gap is not None])
        gaps = [self.gap(SMOLLM2, one, other, task) for task in TASKS]
        found = [gap for gap in gaps if gap is not None]
        return _mean(found) if one in FREE and len(found) == len(TASKS) else None

    def run_of_mean(self, one: str, other: str) -> int | None:
        """The run that `mean_gap` is of; None if no run has all tasks."""
        runs = {number for number, *_ in self.by_run}
        order = sorted(runs, key=lambda number: (number != self.main, -number))
        whole = (number for number in order if None not in self._of_tasks(number, one, other))
        return next(whole, None)

    def _of_tasks(self, run: int, one: str, other: str) -> list[Measured | None]:
        """Paired differences of a run, task by task of SmolLM2; see `mean_gap`."""
        of = lambda *key: self.of_run(run, SMOLLM2, *key)  # noqa: E731
        untrained = lambda *key: self.get(SMOLLM2, *key) if key[0] in FREE else None  # noqa: E731
        beside = [of(other, task) or untrained(other, task) for task in TASKS]
        pairs = zip([of(one, task) for task in TASKS], beside, TASKS, strict=True)
        return [_difference(*pair) for pair in pairs]

    def fewer(self, model: str, label: str, measure: str) -> float | None:
        """How many times smaller the peak is than the vanilla one; None as `gap` is."""
        own, vanilla = self._beside(model, label, VANILLA, measure)
        if own is None or vanilla is None or _problems(own) != _problems(vanilla):
            return None
        return vanilla["peak"] / own["peak"]

    def votes(
        self, label: str, chains: int, measure: str = FRONTIER, run: int | None = None
    ) -> tuple[np.ndarray, float, float] | None:
        """Scores of the vote of so many chains by problem, with reads and peak of all of them.

        The mean over the disjoint groups of so many chains; of the last run that has them, unless
        another one is given.
        """
        own = (self._asked(label, measure, run) or {}).get("votes", {})
        if str(chains) not in own.get("of", {}):
            return None
        reads, peak = (float(np.mean(own[name]) * chains) for name in ("reads", "peak"))
        return np.asarray(own["of"][str(chains)], np.float64), reads, peak

    def _asked(self, label: str, measure: str, run: int | None) -> dict[str, Any] | None:
        """What a system of Qwen was asked in a run, or in the last one that asked it."""
        if run is None:
            return self.get(QWEN, label, measure)
        return self.of_run(run, QWEN, label, measure)

    def frontier(self, names: Mapping[str, str], run: int | None = None) -> Hyperscaling | None:
        """The votes of 1 to 8 chains as points of systems, of each length that all were asked with.

        None if there is no such length.

        Args:
          names: label of a system -> its name in the result, the one to compare with first.
          run: of which figures are taken; None for the last one that has them, system by system.
        """
        points = []
        asked = [m for m in FRONTIERS if all(self.votes(name, 1, m, run) for name in names)]
        for (label, name), measure in itertools.product(names.items(), asked):
            record = self._asked(label, measure, run)
            assert record is not None
            own = {name: np.asarray(each) for name, each in record["votes"].items() if name != "of"}
            for chains in CHAINS:
                found = self.votes(label, chains, measure, run)
                if found is None:
                    continue
                reads, peak = (chains * own[axis][None] for axis in ("reads", "peak"))
                points.append(
                    Point(
                        system=name,
                        compression_ratio=None,
                        length=int(record["sampling"]["max_new_tokens"]),
                        chains=chains,
                        policy=record["policy"],
                        scores={"vote": found[0][None]},
                        reads=reads.astype(np.float64),
                        peak=peak.astype(np.float64),
                        new_tokens=float(own["new_tokens"].mean()),
                        ended=float(own["ended"].mean()),
                    )
                )
        return Hyperscaling({"chains": list(CHAINS)}, tuple(points)) if points else None

    def vote_gains(self, label: str) -> tuple[Measured | None, Measured | None]:
        """What votes of a system gain over the plain cache's at equal reads, and at equal peak.

        Averages over the budgets that both cover; None where there are none, or its run did not ask
        the plain cache these problems.
        """
        own = self.get(QWEN, label, FRONTIER)
        if own is None or label == VANILLA or self.unpaired(QWEN, label, VANILLA, FRONTIER):
            return None, None
        points = self.frontier({VANILLA: "vanilla", label: "own"}, own["run"])
        if points is None:
            return None, None
        reads, peak = (points.average_gain("own", "vanilla", axis) for axis in ("reads", "peak"))
        return reads, peak

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON data, of each problem its score alone."""
        kept = []
        replaced = [row for key, row in self.by_run.items() if self.records[key[1:]] is not row]
        left_out = ("per_problem", "chains_of_problems", "path")
        for record in (*self.records.values(), *replaced):
            own = {k: v for k, v in record.items() if k not in left_out}
            own["task"] = None  # has paths
            problems = record.get("per_problem", {})
            own["per_problem"] = problems.get("scores") or problems.get("loss")
            kept.append(own)
        trainings = self.logs
        told = {"speed": self.speed, "three": self.three, "commands": self.commands}
        return {"systems": kept, "trainings": trainings, **told}


def _chosen(plan: Config, place: Paths) -> list[str]:
    """The jobs that a run directory did where parts of its plan were asked for, else none.

    Those that failed measured nothing.
    """
    if not plan.parts:
        return []
    every = jobs(dataclasses.replace(plan, parts=()))
    logs = [(job.name, read_json(place.log(job))) for job in every]
    return [name for name, log in logs if log is not None and log.get("outcome") != "failed"]


def _key(row: dict[str, Any]) -> Key:
    setting = f"-at{row['setting']}" if row["setting"] else ""
    return row["model"], row["system"] + setting, row["measure"]


def _problems(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the problems of a record from others; every system has the same prompts."""
    scores = record["per_problem"].get("scores") or record["per_problem"].get("loss") or []
    told = (record.get(name) for name in ("start", "prompt_tokens", "window"))
    return len(scores), *(0 if each is None else round(each, 3) for each in told)


def _difference(
    left: dict[str, Any] | None, right: dict[str, Any] | None, measure: str
) -> Measured | None:
    """A paired difference; None unless both were asked the same problems."""
    if left is None or right is None or _problems(left) != _problems(right):
        return None
    key = "loss" if measure == "text" else "scores"
    of = [np.asarray(each["per_problem"][key], np.float64) for each in (left, right)]
    # Of several chains of a problem their mean counts.
    return difference(*(each.reshape(len(each), -1).mean(1)[None] for each in of))


def _mean(gaps: list[Measured]) -> Measured:
    """The mean of differences on different problems."""
    error = math.sqrt(sum(gap.error**2 for gap in gaps)) / len(gaps)
    return Measured(float(np.mean([gap.value for gap in gaps])), error)


def votes_of(chains: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the chains of each problem.

    `of`: so many chains -> the score of their vote, the mean over the disjoint groups; reads and
    peak of a chain, new tokens and whether it ended, means over the chains.
    """
    own = {name: np.asarray(each) for name, each in chains.items()}
    problems, most = own["scores"].shape
    found = {}
    for size in filter(lambda size: size <= most, CHAINS):
        groups = [slice(n * size, (n + 1) * size) for n in range(most // size)]
        votes = np.zeros((problems, len(groups)))
        for place, group in enumerate(groups):
            for problem, answers in enumerate(own["answers"][:, group].tolist()):
                winner = majority([None if answer < 0 else str(answer) for answer in answers])
                if winner is not None:
                    votes[problem, place] = own["answer_scores"][problem, group][winner]
        found[str(size)] = votes.mean(1).tolist()
    means = ("reads", "peak", "new_tokens", "ended")
    return {"of": found, **{name: own[name].mean(1).round(3).tolist() for name in means}}


def end_of(name: str) -> str:
    """The label of a training at its end."""
    training = TRAININGS[name]
    return Job("asking", training.model, name, f"{training.ratio:g}").label


def score(record: dict[str, Any]) -> Measured:
    """The score of a system with its error."""
    value, error = record["score"]
    return Measured(value, math.nan if error is None else error)


def vote_of(votes: np.ndarray) -> Measured:
    """The mean of votes with its error."""
    return mean_over_problems(votes[:, None])
