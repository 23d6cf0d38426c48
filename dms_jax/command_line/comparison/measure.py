"""One system at a time over the same text, and the same problems."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

import dms_jax
from dms_jax.command_line.comparison.systems import Share, System
from dms_jax.data.tasks import Task
from dms_jax.devices import out_of_memory
from dms_jax.evaluation import (
    Result,
    Serving,
    difference,
    evaluate,
    mean_over_problems,
    standard_error,
)
from dms_jax.policies import Policy

# What a system may come to: the library or a kernel does not serve it, or the device fails.
FAILURES = (dms_jax.DmsJaxError, jax.errors.JaxRuntimeError, NotImplementedError)


def gave_up(error: BaseException) -> bool:
    """Whether a device failed for good; one that is only too small goes on."""
    return isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory(error)


@dataclasses.dataclass(frozen=True)
class Text:
    """Sequences to decode.

    Attributes:
      sequences: token ids.
      starts: the first token of each that counts; those before it are given.
      kinds: what each one is.
    """

    sequences: list[list[int]]
    starts: list[int]
    kinds: list[str]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.asarray([len(sequence) for sequence in self.sequences])

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.lengths.sum() - sum(self.starts))


@dataclasses.dataclass(frozen=True)
class Occasion:
    """Problems of much the same length, which share a budget.

    Attributes:
      parts: tasks by the name under which their answers are counted.
    """

    parts: dict[str, tuple[Task, ...]]

    @property
    def tasks(self) -> list[Task]:
        """All of them."""
        return [task for tasks in self.parts.values() for task in tasks]


@dataclasses.dataclass(frozen=True)
class Questions:
    """The problems that every system answers.

    Attributes:
      occasions: by name.
      problems: of each task.
      sampling: of the answers.
      seed: of their draws.
      prefill_chunk: no less than a prompt, for few compiled shapes.
    """

    occasions: dict[str, Occasion]
    problems: int
    sampling: dms_jax.Sampling
    seed: int = 0
    prefill_chunk: int = 1152


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a system was seen to do.

    Tokens and reads are averages over layers and the KV heads of the original, so that half as many
    heads count as half as many tokens. A figure that is unknown, such as the error of a single
    sequence, is NaN.

    Attributes:
      label, ratio, policy, kv_dtype: what ran on the text, and its nominal ratio.
      nats, error: negative log-likelihood a token, a mean over sequences, and its standard error.
      increase, increase_error: against dense on the same tokens.
      kinds: the increase of each kind of text.
      live, peak: live tokens of a sequence at its end, and at most.
      reads: cache entries that the steps of a sequence read.
      bytes, peak_bytes: of pages and policy state of a sequence, at its end and at most; on the
        device, with `host_bytes` of values in host memory besides.
      answers: to each kind of question: `accuracy` and its `error`, its `change` against dense on
        the same problems and `change_error`, `peak`, `live`, `reads` and `peak_bytes` of a chain,
        `ended` (the share that ended by themselves), `new_tokens`, `tasks` (accuracy of each) and
        the `policy` that ran.
      seconds: of wall time, compilation included.
      failed: why it could not run, if it could not.
    """

    label: str
    ratio: float
    policy: dict[str, Any]
    kv_dtype: str | None
    nats: float = 0.0
    error: float = 0.0
    increase: float = 0.0
    increase_error: float = 0.0
    kinds: dict[str, float] = dataclasses.field(default_factory=dict)
    live: float = 0.0
    peak: float = 0.0
    reads: float = 0.0
    bytes: float = 0.0
    peak_bytes: float = 0.0
    host_bytes: float = 0.0
    answers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    failed: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measured":
        """A row of a report, where a figure that is unknown is null."""
        figures = [field.name for field in dataclasses.fields(cls) if field.type is float]
        row = _numbers(data, figures)
        row["answers"] = {name: _numbers(part, part) for name, part in data["answers"].items()}
        return cls(**row)

    @property
    def name(self) -> str:
        """Label and ratio."""
        return self.label if self.ratio == 1 else f"{self.label} at {self.ratio:g}"

    @property
    def summary(self) -> str:
        """A line for the log."""
        if self.failed is not None:
            return f"{self.name}: {self.failed}"
        solved = "".join(f", {name} {part['accuracy']:.1%}" for name, part in self.answers.items())
        return (
            f"{self.name}: {self.nats:.4f} nats ({self.increase:+.4f}), peak {self.peak:.0f}, "
            f"reads {self.reads:,.0f}{solved}, {self.seconds:.0f} s"
        )


def _numbers(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The same data, with NaN for each of the figures that is None."""
    return dict(data) | {name: math.nan for name in names if data.get(name, 0.0) is None}


class Bench:
    """The text and the problems that every system gets.

    Args:
      text: what is decoded.
      page_size: of the cache.
      questions: whose answers are scored; None for none.

    Attributes:
      lost: whether the device gave up, after which nothing runs in this process.
    """

    def __init__(self, text: Text, *, page_size: int, questions: Questions | None = None):
        self.text, self.page_size, self.questions = text, page_size, questions
        self.rows: list[Measured] = []
        self.lost = False
        # Of the first system, with which the others are compared.
        self._losses = np.zeros(len(text.sequences))
        self._scores: dict[str, np.ndarray] = {}
        self._lengths: dict[str, np.ndarray] = {}
        self._kv_heads = 1

    def run(self, system: System) -> Measured:
        """Measures a system; the first one is what the others are compared with."""
        start = time.perf_counter()
        if not self.rows:
            self._kv_heads = system.model.config.num_kv_heads
        fields: dict[str, Any] = {"policy": {}}
        try:
            fields |= self._decode(system)
            if self.questions is not None:
                fields["answers"] = self._answer(system, self.questions)
        except FAILURES as error:
            fields["failed"] = str(error)[:500]
            self.lost = gave_up(error)
        row = Measured(label=system.label, ratio=system.ratio, kv_dtype=system.kv_dtype, **fields)
        row = dataclasses.replace(row, seconds=time.perf_counter() - start)
        self.rows.append(row)
        return row

    @property
    def _table_width(self) -> int | None:
        """One program for all lengths where compiling takes longer than running."""
        if jax.default_backend() == "cpu":
            return None
        return -(-(int(self.text.lengths.max()) + 64) // self.page_size)

    def _heads(self, system: System) -> float:
        return system.model.config.num_kv_heads / self._kv_heads

    def _decode(self, system: System) -> dict[str, Any]:
        share = Share.of(self.text.lengths, system.ratio)
        policy = system.policy(share)
        scores = dms_jax.score(
            system.model,
            self.text.sequences,
            policy=policy,
            page_size=self.page_size,
            kv_dtype=system.kv_dtype,
            max_length=share.limit,
            table_width=self._table_width,
        )
        losses = np.array(
            [
                -score.logprobs[start - 1 :].mean()
                for score, start in zip(scores, self.text.starts, strict=True)
            ]
        )
        if not self.rows:
            self._losses = losses
        increase = losses - self._losses

        def mean(name: str) -> float:
            return float(np.mean([getattr(score.usage, name) for score in scores]))

        heads, kinds = self._heads(system), np.asarray(self.text.kinds)
        return dict(
            policy=as_data(policy, share),
            nats=float(losses.mean()),
            error=standard_error(losses),
            increase=float(increase.mean()),
            increase_error=standard_error(increase),
            kinds={kind: float(increase[kinds == kind].mean()) for kind in dict.fromkeys(kinds)},
            live=heads * mean("live_tokens"),
            peak=heads * mean("peak_tokens"),
            reads=heads * mean("kv_reads"),
            bytes=mean("cache_bytes"),
            peak_bytes=mean("peak_cache_bytes"),
            host_bytes=mean("host_bytes"),
        )

    def _answer(self, system: System, questions: Questions) -> dict[str, dict[str, Any]]:
        """Problems whose policy is the same are answered together: one program for all."""
        calls: dict[Policy, list[tuple[str, Share]]] = {}
        for name in questions.occasions:
            # Dense, which has no budget, is the first to run and tells the lengths.
            lengths = self._lengths.get(name, np.ones(1))
            share = Share.of(lengths, system.ratio)
            calls.setdefault(system.policy(share), []).append((name, share))
        answers: dict[str, dict[str, Any]] = {}
        for policy, group in calls.items():
            tasks = [questions.occasions[name].tasks for name, _ in group]
            given = [share.limit for (_, share), own in zip(group, tasks, strict=True) for _ in own]
            result = evaluate(
                system.model,
                [task for own in tasks for task in own],
                policy=policy,
                problems=questions.problems * len(given),
                sampling=questions.sampling,
                seed=questions.seed,
                serving=Serving(
                    page_size=self.page_size,
                    prefill_chunk=questions.prefill_chunk,
                    kv_dtype=system.kv_dtype,
                ),
                max_length=given,
            )
            for name, share in group:
                answers |= self._counted(system, questions, result, name, policy, share)
        return answers

    def _counted(
        self,
        system: System,
        questions: Questions,
        result: Result,
        occasion: str,
        policy: Policy,
        share: Share,
    ) -> dict[str, dict[str, Any]]:
        """The answers of an occasion, part by part."""
        heads, parts, lengths = self._heads(system), {}, []
        for name, tasks in questions.occasions[occasion].parts.items():
            own = np.isin(result.task_of, [result.tasks.index(task.name) for task in tasks])
            scores = result.scores[own]
            if not self.rows:
                self._scores[name] = scores
            lengths.append(result.peak[own].mean(1))
            accuracy = mean_over_problems(scores)
            change = difference(scores.T, self._scores[name].T)
            parts[name] = dict(
                accuracy=accuracy.value,
                error=accuracy.error,
                change=change.value,
                change_error=change.error,
                live=heads * float(result.live[own].mean()),
                peak=heads * float(result.peak[own].mean()),
                reads=heads * float(result.reads[own].mean()),
                peak_bytes=float(result.cache_bytes[own].mean()),
                ended=float(result.ended[own].mean()),
                new_tokens=float(result.new_tokens[own].mean()),
                problems=len(scores),
                tasks={task.name: result.of_task(task.name).accuracy.value for task in tasks},
                policy=as_data(policy, share),
            )
        if not self.rows:
            self._lengths[occasion] = np.concatenate(lengths)
        return parts


def as_data(policy: Policy, share: Share) -> dict[str, Any]:
    """A policy with its budget in tokens."""
    return policy.for_length(share.limit).to_dict()
