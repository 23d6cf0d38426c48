"""Synthetic tasks: problems drawn from seeds, worked solutions, exact scores.

A task is a frozen dataclass of difficulty and length. `task.problem(split, index)` is a pure
function of the task's fields, the split and the index, so data needs no files and a run can resume
anywhere. Splits are disjoint by construction: the `identity` of a problem (the equation) is hashed,
and the hash determines the split; problems of another split are drawn again.

    0 test, 1 validation, 2..15 train   of sixteen
"""

import abc
import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from dms_jax.checks import Options
from dms_jax.errors import ConfigError

Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_SHARES = 16
_DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem with its worked solution.

    Attributes:
      prompt: the text that the model reads.
      solution: the continuation of the prompt: the steps, if any, and the answer. An end token
        follows it.
      answers: the reference answers.
      identity: key that makes the problem unique; no two splits share one.
      examples: worked examples before it, as (question, answer).
      answer_prefix: the given beginning of the answer: it follows the prompt in plain text and
        begins the assistant's turn in a chat. The solution continues it.
      answer_tokens: the most new tokens of an answer; None for the sampling's limit.
    """

    prompt: str
    solution: str
    answers: tuple[str, ...]
    identity: str
    examples: tuple[tuple[str, str], ...] = ()
    answer_prefix: str = ""
    answer_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Task(Options, abc.ABC):
    """A family of problems of one difficulty and length.

    Attributes:
      seed: seed of the problems; another seed gives other problems of the same splits.
    """

    name: ClassVar[str]

    seed: int = dataclasses.field(default=0, kw_only=True)

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Draws one problem of any split."""

    @abc.abstractmethod
    def answer(self, completion: str) -> str | None:
        """Returns the answer of a completion in a normal form, for voting; None if it has none.

        A completion is arbitrary model output; parsing it never raises.
        """

    def vote(self, answer: str) -> str:
        """Returns the key under which an answer is counted in a vote; equal answers share it."""
        return answer

    @abc.abstractmethod
    def score(self, problem: Problem, completion: str) -> float:
        """Returns the exact score of a completion, from 0 to 1."""

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> list[float]:
        """Returns the scores of completions, (problem, completion) each; in order.

        Tasks with slow judging override it to judge in parallel.
        """
        return [self.score(problem, completion) for problem, completion in pairs]

    def score_answer(self, problem: Problem, answer: str) -> float:
        """Returns the score of an answer found by `answer`, without the rest of the completion.

        A vote gets the score of the chosen answer. By default an answer is scored like a completion
        with the same text.
        """
        return self.score(problem, answer)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split, deterministically.

        Raises:
          ConfigError: the split is unknown, or the task has no problem in it.
        """
        if split not in SPLITS:
            raise ConfigError(f"There is no split {split!r}; there are {', '.join(SPLITS)}.")
        fields = ",".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        rng = random.Random(f"{self.name}({fields}) {split} {index}")
        for _ in range(_DRAWS):
            problem = self.draw(rng)
            if split_of(problem.identity) == split:
                return problem
        raise ConfigError(f"{self} has no problem in the {split} split. Make the task more varied.")

    def problems(self, split: Split, count: int, start: int = 0) -> list[Problem]:
        """Returns problems start .. start + count - 1 of a split."""
        return [self.problem(split, index) for index in range(start, start + count)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON data: its name and every field."""
        return {"name": self.name, **dataclasses.asdict(self)}


def split_of(identity: str) -> Split:
    """Returns the split that an identity belongs to."""
    share = hashlib.blake2b(identity.encode(), digest_size=8).digest()[0] % _SHARES
    return "test" if share == 0 else "validation" if share == 1 else "train"
