"""What the families of RULER's tasks have in common."""

import abc
import dataclasses
import random
import re
from typing import ClassVar

from dms_jax.evaluation.tasks.ruler.formats import Format

_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclasses.dataclass(frozen=True)
class Filled:
    """A template that was filled.

    Attributes:
      prompt: the question.
      answer_prefix: the beginning of the answer.
      solution: what follows it.
      answers: the references.
    """

    prompt: str
    answer_prefix: str
    solution: str
    answers: tuple[str, ...]


class Family(abc.ABC):
    """Fills the template of a task to a given size."""

    format: ClassVar[Format]

    @property
    @abc.abstractmethod
    def least(self) -> int:
        """The smallest size of a problem that the family can make."""

    @property
    def most(self) -> int | None:
        """The largest size, if there is one."""
        return None

    @abc.abstractmethod
    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        """Returns problem `number` with a context of `size` units.

        Units are words of an essay, repetitions of noise, other needles, different words or
        documents.
        """

    @abc.abstractmethod
    def found(self, completion: str) -> list[str]:
        """What could be answers in a completion, in order."""

    def score(self, completion: str, answers: tuple[str, ...]) -> float:
        """RULER's `string_match_all`: the share of the references that occur, ignoring case."""
        return sum(occurrences(completion, answers)) / len(answers)


def occurrences(completion: str, answers: tuple[str, ...]) -> list[bool]:
    """Whether each reference occurs in a completion, as RULER looks for it."""
    text = _CONTROL.sub("\n", completion.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]
