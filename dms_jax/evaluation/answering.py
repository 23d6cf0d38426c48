"""Decode all prompts of an evaluation from one queue, and store each answer when it ends."""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

from dms_jax.evaluation.journal import Journal, model_mark
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.questions import Judge, Questions
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.traces import Answer, Trace
from dms_jax.generation import Sampling
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
    serving: Serving,
    on_answer: OnAnswer,
) -> None:
    """Runs requests to completion.

    They share one queue: a free lane takes the next request. If the policy runs prompts token by
    token, one prompt takes as long as many, so a full set of lanes starts together, and the next
    set waits until every lane is free.

    Args:
      model: from `load` or `retrofit`.
      policy: the cache policy.
      requests: fresh requests, in the order in which they start; they share one sampling, except
        for seeds.
      serving: options of the cache.
      on_answer: called with the index and the answer of each finished request, while the device
        runs the next programs.

    Raises:
      CapacityError: the memory does not hold a single sequence.
    """
    if not requests:
        return
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = serving.engine(model, policy, sequences=len(requests), max_tokens=longest)

    def hand_out(request: Request) -> None:
        trace = Trace(request.meter.rows, request.prompt_peak, *request.totals())
        on_answer(request.index, Answer(completion_of(request), trace))

    together = len(requests) if policy.parallel != "never" else serving.lanes
    engine.check_room(requests)
    for wave in itertools.batched(requests, together):
        engine.serve(Source(wave, on_end=hand_out))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One system that answers all problems once.

    Attributes:
      model, policy: the system.
      questions: the problems.
      sampling: how the answers are sampled; its seed is ignored.
      serving: options of the cache.
      chains: chains of each problem.
      seed: the seed that all draws are derived from.
      traced: whether the use of the cache is recorded step by step.
    """

    model: LanguageModel
    policy: Policy
    questions: Questions
    sampling: Sampling
    serving: Serving
    chains: int
    seed: int
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
            "sampling": {name: getattr(self.sampling, name) for name in names},
        }

    def run(
        self, judge: Judge, out: str | pathlib.Path | None, *, bar: str | None
    ) -> dict[int, Answer]:
        """Answers the problems; chain c of problem i is i * chains + c, in this order.

        Args:
          judge: scores answers for the progress bar.
          out: a folder for the answers, see `Journal`; answers in it are not computed again.
          bar: title of the progress bar; None for no bar.

        An exception that interrupts it carries the finished completions by index:
        `error.finished`.
        """
        requests = self.questions.requests(
            self.model, self.sampling, chains=self.chains, seed=self.seed
        )
        journal = None
        if out is not None:
            more = {"traced": self.traced, "model": model_mark(self.model)}
            journal = Journal(out, {**self.settings, **more})
        done = {
            problem * self.chains + chain: each
            for (problem, chain), each in (journal.answers if journal else {}).items()
            if problem * self.chains < len(requests) and chain < self.chains
        }
        waiting = [request for request in requests if request.index not in done]

        def ended() -> dict[int, Completion]:
            completions = {index: each.completion for index, each in done.items()}
            return completions | finished(waiting)

        shown = progress_bar(len(requests), title=bar or "", shown=bar is not None)
        with contextlib.ExitStack() as open_files, shown as tick, keep_finished(ended):
            if journal is not None:
                open_files.callback(journal.close)

            def count(index: int, each: Answer) -> None:
                if bar is not None:
                    tick(judge(index // self.chains, each.completion.text))

            def keep(index: int, each: Answer) -> None:
                done[index] = each if self.traced else Answer(each.completion)
                if journal is not None:
                    journal.add(*divmod(index, self.chains), done[index])
                count(index, each)

            for index, each in done.items():
                count(index, each)
            answer(self.model, self.policy, waiting, self.serving, keep)
            return {index: done[index] for index in range(len(requests))}
