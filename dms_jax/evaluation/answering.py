"""Decodes all prompts of an evaluation from one queue, and keeps each answer as it ends."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

from dms_jax.evaluation.asking import Judge, Questions
from dms_jax.evaluation.journal import Journal, model_mark
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.traces import Answer, Trace
from dms_jax.generation import Sampling, Update
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import Completion, Request, completion_of, finished
from dms_jax.interrupts import keep_finished
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

OnAnswer = Callable[[int, Answer], None]


def answer(
    model: LanguageModel,
    policy: Policy,
    requests: list[Request],
    sampling: Sampling,
    serving: Serving,
    on_answer: OnAnswer | None = None,
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
      on_answer: called with the index and the answer of each request that has ended, while the next
        programs run.

    Raises:
      CapacityError: the memory does not hold a single sequence.
    """
    if not requests:
        return
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = serving.engine(model, policy, sequences=len(requests), max_tokens=longest)
    by_index = {request.index: request for request in requests}

    def hand_out(update: Update) -> None:
        if update.finished and on_answer is not None:
            request = by_index[update.index]
            trace = Trace(request.meter.rows, request.prompt_peak, *request.totals())
            done = completion_of(request, logprobs=sampling.logprobs)
            on_answer(update.index, Answer(done, trace))

    on_tokens = None if on_answer is None else hand_out
    together = len(requests) if policy.parallel != "never" else serving.lanes
    engine.check_room(requests)
    for wave in itertools.batched(requests, together):
        engine.serve(Source(list(wave), sampling, on_tokens=on_tokens, streaming=False, late=True))


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

        def ended() -> dict[int, Completion]:
            completions = {index: each.completion for index, each in done.items()}
            return completions | finished(waiting, self.sampling)

        shown = progress_bar(len(requests), title=bar or "", shown=bar is not None)
        with shown as tick, keep_finished(ended):

            def keep(index: int, each: Answer) -> None:
                done[index] = each if self.traced else Answer(each.completion)
                place = divmod(index, self.chains)
                if journal is not None and place not in known:
                    journal.add(*place, done[index])
                if bar is not None:
                    tick(judge(place[0], each.completion.text))

            try:
                for index, each in list(done.items()):
                    keep(index, each)
                watched = self.traced or journal is not None or bar is not None
                answer(
                    self.model,
                    self.policy,
                    waiting,
                    self.sampling,
                    self.serving,
                    keep if watched else None,
                )
            finally:
                if journal is not None:
                    journal.close()
            for index, completion in finished(waiting, self.sampling).items():
                done.setdefault(index, Answer(completion))
            return {index: done[index] for index in range(len(requests))}
