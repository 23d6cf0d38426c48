"""`evaluate_choices`: questions answered by the likelihood of their options, from the real cache.

Two scores, as in lm-evaluation-harness: **acc**, how often the right option is the most likely, and
**acc_norm**, how often it has the largest log-probability per character. Unlike the harness's own
tasks (`harness`), it reads the publishers' files without the extra `eval` or the hub, and counts
the cache tokens of each question.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dms_jax.checks import Count, check
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.likelihood import encode_pair, likelihoods
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.statistics import Measured, mean_over_problems
from dms_jax.evaluation.tasks.choices import ChoiceTask
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class ChoiceResult:
    """The log-probabilities that a model gives the options of questions.

    Attributes:
      settings: task and policy, as JSON data.
      logprobs: log-probabilities of the options of each question, in nats.
      lengths: characters of the options.
      gold: index of the right option.
      peak: peak of live tokens of each question.
      seconds: wall time, compilation included.
    """

    settings: Mapping[str, Any]
    logprobs: tuple[Float[np.ndarray, " options"], ...]
    lengths: tuple[Int[np.ndarray, " options"], ...]
    gold: Int[np.ndarray, " questions"]
    peak: Float[np.ndarray, " questions"]
    seconds: float

    @property
    def chosen(self) -> Int[np.ndarray, " questions"]:
        """The most likely option of each question."""
        return np.asarray([int(np.argmax(each)) for each in self.logprobs])

    @property
    def chosen_norm(self) -> Int[np.ndarray, " questions"]:
        """The option of each question with the largest log-probability per character."""
        pairs = zip(self.logprobs, self.lengths, strict=True)
        return np.asarray([int(np.argmax(nats / length)) for nats, length in pairs])

    @property
    def accuracy(self) -> Measured:
        """acc: how often the right option is the most likely."""
        return mean_over_problems((self.chosen == self.gold).astype(np.float64)[:, None])

    @property
    def accuracy_norm(self) -> Measured:
        """acc_norm: how often it has the largest log-probability per character."""
        return mean_over_problems((self.chosen_norm == self.gold).astype(np.float64)[:, None])

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON data, with the chosen option of each question."""
        return {
            **self.settings,
            "questions": len(self.gold),
            "acc": self.accuracy.to_list(),
            "acc_norm": self.accuracy_norm.to_list(),
            "peak": float(self.peak.mean()),
            "seconds": self.seconds,
            "per_question": {
                "chosen": self.chosen.tolist(),
                "chosen_norm": self.chosen_norm.tolist(),
                "gold": self.gold.tolist(),
            },
        }


def evaluate_choices(
    model: LanguageModel,
    task: ChoiceTask,
    *,
    policy: Policy | str | None = None,
    problems: int | None = None,
    serving: Serving | None = None,
    progress: bool = False,
) -> ChoiceResult:
    """Answers questions by the likelihood of their options after the question.

    Args:
      model: a model with a tokenizer.
      task: one of `dms_jax.evaluation.tasks` that is answered by likelihood.
      policy: the cache policy; the checkpoint's if None.
      problems: number of questions; all of the file if None.
      serving: options of the cache; `Serving()` if None.
      progress: whether to show a progress bar on standard error.

    Raises:
      ConfigError: an argument or the policy does not fit.
      DataError: the file has too few questions, one of them is malformed, or does not fit the
        model's positions.
      CapacityError: the memory does not hold a single question.
    """
    check_model(model)
    if not isinstance(task, ChoiceTask):
        raise ConfigError(
            f"evaluate_choices wants a task that is answered by likelihood, got {task!r}; "
            "`evaluate` runs those that are answered in words."
        )
    problems = check("evaluate_choices: problems", problems, Count | None)
    policy = model.resolve_policy(policy)
    if model.tokenizer is None:
        raise DataError("evaluate_choices needs a tokenizer, and this model came without one.")
    count = len(task.records) if problems is None else problems
    questions = [task.choices(index) for index in range(count)]
    begin = time.perf_counter()
    pairs = [
        encode_pair(model, context, f" {continuation}")
        for question in questions
        for context, continuation in zip(question.contexts, question.continuations, strict=True)
    ]
    with progress_bar(len(pairs), title="Options", shown=progress) as tick:
        done = likelihoods(model, pairs, policy=policy, serving=serving, on_done=tick)
    found = iter(done)
    answers = [[next(found) for _ in question.continuations] for question in questions]
    return ChoiceResult(
        settings={"task": task.to_dict(), "policy": policy.to_dict()},
        logprobs=tuple(np.asarray([each.logprob for each in own]) for own in answers),
        lengths=tuple(np.asarray(list(map(len, each.continuations))) for each in questions),
        gold=np.asarray([question.gold for question in questions]),
        peak=np.asarray([max(each.peak_tokens for each in own) for own in answers]),
        seconds=time.perf_counter() - begin,
    )
