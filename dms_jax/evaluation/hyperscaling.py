"""`hyperscale`: accuracy against budget, when a small cache pays for longer or more answers.

Inference-time hyper-scaling (DMS paper, section 5): answers of at most L tokens, W chains of each
problem, compression ratio CR. Systems are compared over all L-W-CR configurations at equal reads
and at equal peak.

Every system answers once, with the largest number of chains W; a point of w chains is the mean of
their W // w groups. Shorter lengths reuse the first tokens of the longest answers, unless the
policy's budget is a share of the longest answer (`traces`); then every length has its own run.

Every system has a point of one greedy chain at every length: a vote of sampled chains that does not
beat it has gained nothing, and many models answer better greedily than sampled. Gains are measured
against the other system's best result at a budget, greedy or sampled.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from dms_jax.checks import Count, NotNegative, Options, Ratio, Whole, check, show
from dms_jax.data.tasks import Split, Task
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.answering import Evaluation
from dms_jax.evaluation.evaluating import SAMPLING
from dms_jax.evaluation.hyperscaling_result import Hyperscaling, Point, point_label
from dms_jax.evaluation.journal import model_mark, write_files
from dms_jax.evaluation.prompting import Chat, answer_limit
from dms_jax.evaluation.questions import Judge, PerChain, Questions
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.statistics import METHODS, Method, pass_at, vote_scores
from dms_jax.evaluation.traces import Answer, Chain, cut, depends_on_length
from dms_jax.generation import Sampling
from dms_jax.generation.requests import check_call
from dms_jax.interrupts import keep_finished
from dms_jax.json_text import json_text
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy, Vanilla


@dataclasses.dataclass(frozen=True)
class System(Options):
    """One line of the comparison, at one compression ratio.

    Attributes:
      name: name of the line; systems of one name, at different ratios, share a frontier.
      policy: the cache policy; None for the one that the checkpoint declares.
      model: the checkpoint; None for the model of the call. DMS at another ratio is another
        checkpoint.
      compression_ratio: the nominal ratio, used as a label; None for the policy's, if it has one.
    """

    name: str
    policy: Policy | str | None = None
    model: LanguageModel | None = None
    compression_ratio: Ratio | None = None


def hyperscale(
    model: LanguageModel,
    task: Task | Sequence[Task],
    systems: Sequence[System],
    *,
    lengths: Sequence[int],
    chains: Sequence[int],
    problems: int | None = None,
    split: Split = "test",
    seeds: Sequence[int] = (0,),
    sampling: Sampling | None = None,
    temperatures: Sequence[float] | None = None,
    chat: Chat | None = None,
    serving: Serving | None = None,
    out: str | pathlib.Path | None = None,
    progress: bool = False,
) -> Hyperscaling:
    """Compares systems over lengths and numbers of chains, at equal reads and equal peak.

    Args:
      model: a model with a tokenizer.
      task: one task, or several whose problems alternate; see `evaluate`.
      systems: cache policies or checkpoints, with names.
      lengths: L, the most new tokens of an answer.
      chains: W, the number of independent answers to each problem, which vote.
      problems, split, chat, serving: see `evaluate`.
      seeds: each seed draws new chains for the same problems.
      sampling: see `evaluate`; its seed and max_new_tokens are ignored.
      temperatures: sampling temperatures, each with the full grid of lengths and chains; by default
        that of `sampling`. Temperature 0 with one chain is always included.
      out: a folder for the answers of each run (as `evaluate` writes them), `results.json` and
        `table.md`. The same call resumes after the stored answers.
      progress: whether to show a progress bar for each run on standard error.

    Raises:
      ConfigError: an argument or a policy does not fit, or the longest answers exceed a model's
        positions.
      DataError: a prompt leaves no room for an answer, there are too few problems, or `out` cannot
        be written or holds answers of other settings.
      CapacityError: the memory does not hold a single sequence.

    An exception that interrupts it, KeyboardInterrupt too, carries the finished points:
    `error.finished` is a `Hyperscaling`, whose files are in `out` as well.
    """
    check_model(model)
    given = check_call(SAMPLING if sampling is None else sampling, None)
    questions = Questions.given(
        "hyperscale", model, task, count=problems, split=split, start=0, chat=chat
    )
    plan = Plan(
        questions=questions,
        systems=_resolved(systems, model, questions),
        lengths=_numbers("lengths", lengths, Count),
        chains=_numbers("chains", chains, Count),
        seeds=_numbers("seeds", seeds, Whole),
        sampling=given,
        temperatures=_numbers(
            "temperatures",
            (given.temperature,) if temperatures is None else temperatures,
            NotNegative,
        ),
        serving=Serving.given("hyperscale", serving),
        out=None
        if out is None
        else pathlib.Path(check("hyperscale: out", out, str | pathlib.Path)),
        progress=check("hyperscale: progress", progress, bool),
    )
    plan.check_lengths()
    points: list[Point] = []
    with keep_finished(lambda: plan.result(points)):
        try:
            for system in plan.systems:
                for point in plan.points(system):
                    points.append(point)
        except BaseException:
            with contextlib.suppress(DataError):  # the interrupting exception matters more
                plan.write(plan.result(points))
            raise
        result = plan.result(points)
        plan.write(result)
    return result  # the written one, which has computed its gains


_CHAIN_DTYPES = {
    "new_tokens": np.int64,
    "reads": np.float64,
    "peak": np.float64,
    "ended": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """The chains of all problems from one seed, at one length.

    Attributes:
      answers: the answer of each chain; None if it gave none.
      scores, answer_scores: see `Result`.
      new_tokens, reads, peak, ended: see `traces.Chain`.
    """

    answers: list[list[str | None]]
    scores: PerChain
    answer_scores: PerChain
    new_tokens: Int[np.ndarray, "problems chains"]
    reads: PerChain
    peak: PerChain
    ended: Bool[np.ndarray, "problems chains"]

    @classmethod
    def of(cls, cuts: Sequence[Sequence[Chain]], judge: Judge) -> "Sample":
        """Returns the sample of judged chains."""
        answers, scores, answer_scores = judge.chains([[each.text for each in own] for own in cuts])
        return cls(
            answers=answers,
            scores=scores,
            answer_scores=answer_scores,
            **{
                name: np.asarray([[getattr(each, name) for each in own] for own in cuts], dtype)
                for name, dtype in _CHAIN_DTYPES.items()
            },
        )

    def score(self, method: Method, chains: int, groups: int = 1) -> Float[np.ndarray, " problems"]:
        """Score of each problem with `chains` chains, averaged over the first `groups` groups.

        pass@W is estimated from all chains.
        """
        if method == "pass":
            return pass_at(self.scores, chains)
        if method == "single":
            return self.scores[:, : groups * chains].mean(1)
        parts = [slice(first, first + chains) for first in range(0, groups * chains, chains)]
        votes = [
            vote_scores([own[part] for own in self.answers], self.answer_scores[:, part])
            for part in parts
        ]
        return np.mean(votes, axis=0)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A system with its model, judge, policy and ratio."""

    name: str
    model: LanguageModel
    judge: Judge
    policy: Policy
    compression_ratio: float | int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of a call, resolved."""

    questions: Questions
    systems: tuple[Resolved, ...]
    lengths: tuple[int, ...]
    chains: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    temperatures: tuple[float | int, ...]
    serving: Serving
    out: pathlib.Path | None
    progress: bool

    def check_lengths(self) -> None:
        """Checks that no answer is cut off at the end of a model's positions.

        Raises:
          ConfigError: the longest answers do not fit beside the longest prompt.
        """
        longest = self.lengths[-1]
        sampling = dataclasses.replace(self.sampling, max_new_tokens=longest)
        for model in {id(system.model): system.model for system in self.systems}.values():
            requests = self.questions.requests(model, sampling, chains=1, seed=0)
            pairs = zip(requests, self.questions.problems, strict=True)
            positions = model.config.max_position_embeddings
            if any(each.max_new_tokens < answer_limit(own, longest) for each, own in pairs):
                prompt = max(len(request.prompt) for request in requests)
                raise ConfigError(
                    f"hyperscale: answers of {longest} tokens do not fit beside a prompt of "
                    f"{prompt} into a model's {positions} positions, and would be cut off. Give "
                    f"lengths of at most {positions - prompt}."
                )

    def points(self, system: Resolved) -> Iterator[Point]:
        """Runs a system and yields its points as they finish, the greedy ones first."""
        yield from self.points_at(system, 0.0, (1,), self.seeds[:1])
        for temperature in filter(None, self.temperatures):
            yield from self.points_at(system, temperature, self.chains, self.seeds)

    def points_at(
        self, system: Resolved, temperature: float, chains: Sequence[int], seeds: Sequence[int]
    ) -> Iterator[Point]:
        """Runs a system at one temperature; at 0 a single seed stands for all."""
        runs = [self.lengths]
        if depends_on_length(system.policy):
            runs = [(length,) for length in self.lengths]
        for run in runs:
            samples: dict[int, list[Sample]] = {length: [] for length in run}
            for seed in seeds:
                answers = self.run(
                    system, seed, length=run[-1], chains=chains[-1], temperature=temperature
                )
                for length in run:
                    samples[length].append(self.sample(system, answers, length))
            for length in run:
                own = samples[length] * (len(self.seeds) // len(seeds))
                for count in chains:
                    yield _point(system, length, count, chains[-1] // count, temperature, own)

    def run(
        self,
        system: Resolved,
        seed: int,
        *,
        length: int,
        chains: int,
        temperature: float,
    ) -> list[Answer]:
        """Answers all problems, or reads the answers from the folder."""
        folder = None
        if self.out is not None:
            folder = self.out / _slug(system) / f"{temperature:g}" / f"{length}" / f"seed{seed}"
        evaluation = Evaluation(
            model=system.model,
            policy=system.policy,
            questions=self.questions,
            sampling=dataclasses.replace(
                self.sampling, max_new_tokens=length, temperature=temperature
            ),
            serving=self.serving,
            chains=chains,
            seed=seed,
            traced=True,
        )
        title = None
        if self.progress:
            title = f"{system.name} {point_label(length, chains, None, temperature)}"
        return list(evaluation.run(system.judge, folder, bar=title).values())

    def sample(self, system: Resolved, answers: list[Answer], length: int) -> Sample:
        """The chains with answers of at most `length` tokens."""
        cuts = [cut(answer, length, system.model.tokenizer) for answer in answers]
        count = len(self.questions.problems)
        chains = len(cuts) // count
        return Sample.of([cuts[i * chains : (i + 1) * chains] for i in range(count)], system.judge)

    def result(self, points: Sequence[Point]) -> Hyperscaling:
        """The result so far."""
        names = ("top_k", "top_p", "min_p", "stop")
        settings = {
            **self.questions.to_dict(),
            "problems": len(self.questions.problems),
            "lengths": list(self.lengths),
            "chains": list(self.chains),
            "seeds": list(self.seeds),
            "temperatures": list(self.temperatures),
            "kv_dtype": self.serving.kv_dtype,
            "page_size": self.serving.page_size,
            "sampling": {name: getattr(self.sampling, name) for name in names},
        }
        return Hyperscaling(settings, tuple(points))

    def write(self, result: Hyperscaling) -> None:
        """Writes a result into the folder, if there is one and the result has points.

        Raises:
          DataError: a file cannot be written.
        """
        if self.out is None or not result.points:
            return
        contents = {
            "results.json": json_text(result.to_dict(), indent=1),
            "table.md": "\n\n".join([result.table(), result.gains_table()]),
        }
        write_files(self.out, contents)


def _point(
    system: Resolved,
    length: int,
    chains: int,
    groups: int,
    temperature: float,
    samples: list[Sample],
) -> Point:
    used = groups * chains

    def mean(name: str) -> float:
        return float(np.mean([getattr(sample, name)[:, :used] for sample in samples]))

    def total(name: str) -> Float[np.ndarray, "seeds problems"]:
        """The sum over the chains of a group, averaged over groups."""
        return np.stack([getattr(each, name)[:, :used].sum(1) for each in samples]) / groups

    return Point(
        system=system.name,
        compression_ratio=system.compression_ratio,
        length=length,
        chains=chains,
        temperature=temperature,
        policy=system.policy.to_dict(),
        scores={
            method: np.stack([sample.score(method, chains, groups) for sample in samples])
            for method in METHODS
        },
        reads=total("reads"),
        peak=total("peak"),
        new_tokens=mean("new_tokens"),
        ended=mean("ended"),
    )


def _resolved(systems: Any, model: LanguageModel, questions: Questions) -> tuple[Resolved, ...]:
    """The systems of a call, with the call's model if they have none.

    Raises:
      ConfigError: an item is no System, or two have the same name and ratio.
    """
    given = list(systems) if isinstance(systems, Iterable) else [systems]
    if not given or not all(isinstance(each, System) for each in given):
        raise ConfigError(
            "hyperscale needs systems of dms_jax.evaluation.System, such as "
            f"[System('TOVA', dms_jax.TOVA(compression_ratio=4))], got {show(systems)}."
        )
    resolved: dict[tuple[str, float | int | None], Resolved] = {}
    judged: dict[int, tuple[LanguageModel, Judge]] = {}
    for system in given:
        own = model if system.model is None else system.model
        if id(own) not in judged:
            shown = questions.shown(own)
            judged[id(own)] = shown, Judge(questions, shown.tokenizer)
        own, judge = judged[id(own)]
        policy = own.resolve_policy(system.policy)
        ratio = system.compression_ratio
        if ratio is None:
            ratio = 1 if policy == Vanilla() else getattr(policy, "compression_ratio", None)
        if (system.name, ratio) in resolved:
            raise ConfigError(
                f"hyperscale: {system.name!r} appears twice with compression_ratio={ratio}. Give "
                "each System of one name another compression_ratio, or another name."
            )
        resolved[system.name, ratio] = Resolved(system.name, own, judge, policy, ratio)
    return tuple(resolved.values())


def _numbers(name: str, values: Any, kind: Any) -> tuple[Any, ...]:
    """The distinct numbers in increasing order.

    Raises:
      ConfigError: the list is empty, or holds other values.
    """
    numbers = check(f"hyperscale: {name}", values, Sequence[kind])
    if not numbers:
        raise ConfigError(f"hyperscale: {name} is empty.")
    return tuple(sorted(set(numbers)))


def _slug(system: Resolved) -> str:
    """The name of a system's folder, unique per policy and checkpoint.

    # Out: "DMS-x8-5f0c1a2b"
    """
    mark = [system.policy.to_dict(), system.compression_ratio, model_mark(system.model)]
    digest = hashlib.blake2b(json.dumps(mark).encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', system.name).strip('-')}-{digest}"
