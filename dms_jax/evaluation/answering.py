"""Decodes all prompts of an evaluation from one queue, and keeps each answer as it ends."""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Set
from typing import Any

from dms_jax.evaluation.aggregation import decided
from dms_jax.evaluation.asking import Judge, Questions
from dms_jax.evaluation.journal import Journal, model_mark
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.traces import Answer, Trace
from dms_jax.generation import Sampling, Update
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import (
    Completion,
    Request,
    completion_of,
    finished,
    record_usage,
)
from dms_jax.interrupts import keep_finished
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

OnAnswer = Callable[[int, Answer], Set[int]]


def answer(
    model: LanguageModel,
    policy: Policy,
    requests: list[Request],
    sampling: Sampling,
    serving: Serving,
    on_answer: OnAnswer | None = None,
    skipped: Set[int] = frozenset(),
    *,
    late: bool = False,
) -> None:
    """Runs requests to completion.

    They share one queue: a free lane takes the next request. Policies that run prompts token by
    token take as long for one prompt as for many, so they start a full set of lanes together, and
    the next set waits until every lane is free.

    Args:
      model: from `load` or `retrofit`.
      policy: the cache policy.
      requests: fresh requests, in the order in which they start.
      sampling: how all of them are sampled; the seeds are in the requests.
      serving: options of the cache.
      on_answer: called with the index and the answer of each request that has ended; it returns the
        indices of requests that need not start or go on any more.
      skipped: indices of requests that need not start.
      late: whether it is called while the next programs run, so that they wait for nothing that it
        does; what it ends goes on until they have ended.

    Raises:
      CapacityError: the memory does not hold a single sequence.
    """
    if not requests:
        return
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = serving.engine(model, policy, sequences=len(requests), max_tokens=longest)
    by_index = {request.index: request for request in requests}
    skip = set(skipped)

    def hand_out(update: Update) -> None:
        if update.finished and on_answer is not None:
            request = by_index[update.index]
            trace = Trace(request.meter.rows, request.prompt_peak, *request.totals())
            done = completion_of(request, logprobs=sampling.logprobs)
            needless = on_answer(update.index, Answer(done, trace))
            skip.update(needless)
            engine.cancel(needless)

    on_tokens = None if on_answer is None else hand_out
    together = len(requests) if policy.parallel != "never" else serving.lanes
    engine.check_room(requests)
    waiting = collections.deque(requests)
    while waiting:
        wave: list[Request] = []
        while waiting and len(wave) < together:
            request = waiting.popleft()
            if request.index in skip:
                request.finish_reason = "cancelled"
                record_usage(request, cached=0, live=0, cache_bytes=0, host_bytes=0)
                hand_out(Update(index=request.index, tokens=[], text="", finished=True))
            else:
                wave.append(request)
        if wave:
            engine.serve(Source(wave, sampling, on_tokens=on_tokens, streaming=False, late=late))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One system that answers all problems, once.

    Attributes:
      model, policy: the system.
      questions: the problems.
      sampling: how the answers are sampled; its seed is ignored.
      serving: options of the cache.
      chains: chains of each problem.
      seed: the seed that all draws are derived from.
      max_lengths: see `Questions.requests`.
      traced: whether the use of the cache is recorded step by step.
      stop_decided: whether chains stop when those that ended have decided the majority vote. After
        an interrupt the others of such a problem do not start again, and count as nothing used.
    """

    model: LanguageModel
    policy: Policy
    questions: Questions
    sampling: Sampling
    serving: Serving
    chains: int
    seed: int
    max_lengths: list[int | None]
    traced: bool = False
    stop_decided: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the answers, as JSON data."""
        names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop")
        return {
            **self.questions.to_dict(),
            "policy": self.policy.to_dict(),
            "seed": self.seed,
            "kv_dtype": self.serving.kv_dtype,
            "page_size": self.serving.page_size,
            "max_length": self.max_lengths,
            "sampling": {name: getattr(self.sampling, name) for name in names},
            **({"traced": True} if self.traced else {}),
            **({"stop_decided": self.chains} if self.stop_decided else {}),
        }

    def run(
        self, judge: Judge, out: str | pathlib.Path | None, *, bar: str | None
    ) -> dict[int, Answer]:
        """Answers the problems; chain c of problem i is i * chains + c, in this order.

        Args:
          judge: scores answers for the progress bar.
          out: a folder for the answers, see `Journal`; those that it holds are not asked again.
          bar: title of the progress bar; None for no bar.

        What interrupts it carries the completions that had ended, by index, in `error.finished`.
        """
        requests = self.questions.requests(
            self.model,
            self.sampling,
            chains=self.chains,
            seed=self.seed,
            max_lengths=self.max_lengths,
        )
        journal = None
        if out is not None:
            journal = Journal(out, {**self.settings, "model": model_mark(self.model)})
        known = {} if journal is None else journal.answers
        done = {
            problem * self.chains + chain: each
            for (problem, chain), each in known.items()
            if problem * self.chains < len(requests) and chain < self.chains
        }
        waiting = [request for request in requests if request.index not in done]
        vote = _Vote(judge, self.chains)

        def ended() -> dict[int, Completion]:
            completions = {index: each.completion for index, each in done.items()}
            return completions | finished(waiting, self.sampling)

        shown = progress_bar(len(requests), title=bar or "", shown=bar is not None)
        with shown as tick, keep_finished(ended):

            def keep(index: int, each: Answer) -> Set[int]:
                done[index] = each if self.traced else Answer(each.completion)
                place = divmod(index, self.chains)
                if journal is not None and place not in known:
                    journal.add(*place, done[index])
                if bar is not None:
                    tick(judge(place[0], each.completion.text))
                if self.stop_decided and each.completion.finish_reason != "cancelled":
                    return vote.add(*place, each.completion.text)
                return frozenset()

            try:
                needless = set().union(*(keep(*item) for item in list(done.items())))
                watched = self.traced or self.stop_decided or journal is not None or bar is not None
                answer(
                    self.model,
                    self.policy,
                    waiting,
                    self.sampling,
                    self.serving,
                    keep if watched else None,
                    needless,
                    late=not self.stop_decided,
                )
            finally:
                if journal is not None:
                    journal.close()
            for index, completion in finished(waiting, self.sampling).items():
                done.setdefault(index, Answer(completion))
            return {index: done[index] for index in range(len(requests))}


class _Vote:
    """The answers so far."""

    def __init__(self, judge: Judge, chains: int):
        self._judge, self._chains = judge, chains
        self._votes: dict[int, dict[int, str | None]] = collections.defaultdict(dict)

    def add(self, problem: int, chain: int, text: str) -> set[int]:
        """Counts an answer; returns the indices of the chains that can change nothing any more."""
        votes = self._votes[problem]
        votes[chain] = self._judge.answer(problem, text)
        if not decided(votes, self._chains):
            return set()
        return {problem * self._chains + c for c in range(self._chains) if c not in votes}
