"""RULER's aggregation: common words of a numbered list (`cwe`), frequent coded words (`fwe`)."""

import dataclasses
import math
import random
import re
import string
from collections.abc import Sequence

from dms_jax.errors import ConfigError
from dms_jax.evaluation.tasks.ruler.formats import COMMON_WORDS, FREQUENT_WORDS, Family, Filled

COMMON = 10  # words to find in a list
SHORT = 4096  # lists of shorter contexts repeat words less often
_CODE_LETTERS = 6
_TOKENS_A_CODE = 50  # context tokens per different coded word
_ZETA = math.pi**2 / 6  # of RULER's alpha = 2


@dataclasses.dataclass(frozen=True)
class CommonWords(Family):
    """A numbered list in which ten words occur more often than the others, after a worked example.

    The size is the number of different words.

    Attributes:
      words: the words to draw from.
      length: tokens of prompt and answer, which decide how often words repeat.
      seed: seed of the list's order, one for all problems as in RULER.
    """

    format = COMMON_WORDS

    words: Sequence[str]
    length: int
    seed: int

    @property
    def least(self) -> int:
        return COMMON

    @property
    def most(self) -> int:
        return len(self.words)

    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        del number
        short = self.length < SHORT
        shown, known = self._numbered(rng, 20 if short else 40, *((3, 1) if short else (10, 3)))
        listed, common = self._numbered(rng, size, *((6, 1) if short else (30, 3)))
        template, prefix = self.format.template, self.format.answer_prefix
        example = f"{template.format(context=shown)}{prefix} {_enumerated(known)}"
        return Filled(
            f"{example}\n{template.format(context=listed)}",
            prefix,
            f" {_enumerated(common)}",
            tuple(common),
        )

    def found(self, completion: str) -> list[str]:
        return re.findall(r"[a-z][a-z'-]+", completion.lower())

    def _numbered(
        self, rng: random.Random, size: int, often: int, seldom: int
    ) -> tuple[str, list[str]]:
        drawn = rng.sample(self.words, size)
        listed = drawn[:COMMON] * often + drawn[COMMON:] * seldom
        random.Random(self.seed).shuffle(listed)
        return _enumerated(listed), drawn[:COMMON]


@dataclasses.dataclass(frozen=True)
class FrequentWords(Family):
    """Coded words with zeta-distributed frequencies; the most frequent one is noise, "...".

    The size is the nominal number of words: the word of rank k occurs int(size * k^-2 / zeta(2))
    times.

    Attributes:
      codes: number of different coded words.
      seed: seed of the ranks and of the order, one for all problems as in RULER.
    """

    format = FREQUENT_WORDS

    codes: int
    seed: int

    @classmethod
    def of_length(cls, length: int, seed: int) -> "FrequentWords":
        """The task of `length` tokens.

        Raises:
          ConfigError: the length is too small for four coded words.
        """
        codes = (length - cls.format.answer_tokens) // _TOKENS_A_CODE
        if codes < 4:
            raise ConfigError(
                f"RULER: fwe needs a length of at least {cls.format.answer_tokens + 200} tokens, "
                f"got {length}."
            )
        return cls(codes, seed)

    @property
    def least(self) -> int:
        return 60  # the fourth rank occurs once, and less often than the third

    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        del number
        drawn: set[str] = set()
        while len(drawn) < self.codes:
            drawn.add("".join(rng.choices(string.ascii_lowercase, k=_CODE_LETTERS)))
        ranked = sorted(drawn)
        random.Random(self.seed).shuffle(ranked)
        ranked[0] = "..."
        text = [
            word
            for rank, word in enumerate(ranked, 1)
            for _ in range(int(size * float(rank) ** -2 / _ZETA))
        ]
        random.Random(self.seed).shuffle(text)
        answers = tuple(ranked[1:4])
        return Filled(
            self.format.template.format(context=" ".join(text)),
            self.format.answer_prefix,
            f" {' '.join(answers)}",
            answers,
        )

    def found(self, completion: str) -> list[str]:
        return re.findall(rf"\b[a-z]{{{_CODE_LETTERS}}}\b", completion)


def _enumerated(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
