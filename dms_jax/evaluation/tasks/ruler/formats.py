"""The texts and settings of RULER's 13 tasks, and the classes that fill them (`Family`).

The templates, answer prefixes, needle, noise and settings below are those of RULER (Hsieh et al.,
arXiv 2404.06654; github.com/NVIDIA/RULER at c3f5e3b: `scripts/data/synthetic/constants.py`, `niah.py`,
`variable_tracking.py`, `qa.py` and `scripts/synthetic.yaml`), byte for byte:

    Copyright (c) 2024, NVIDIA CORPORATION. All rights reserved.
    Licensed under the Apache License, Version 2.0; you may obtain a copy of the License at
    http://www.apache.org/licenses/LICENSE-2.0. Distributed on an "AS IS" basis, without warranties
    or conditions of any kind, either express or implied.
"""

# ruff: noqa: E501 - texts as published

import abc
import dataclasses
import random
import re
from typing import ClassVar, Literal, get_args

RulerName = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
]
RULER_TASKS: tuple[RulerName, ...] = get_args(RulerName)


@dataclasses.dataclass(frozen=True)
class Format:
    """The texts of a family of tasks.

    Attributes:
      template: the question.
      answer_prefix: the beginning of the answer, after the chat template.
      answer_tokens: the most tokens to generate.
    """

    template: str
    answer_prefix: str
    answer_tokens: int


NEEDLES = Format(
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    128,
)
# If one value is asked for, words of both texts are replaced in this order.
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

TRACKING = Format(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: ",
    30,
)
COMMON_WORDS = Format(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FREQUENT_WORDS = Format(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QUESTIONS = Format(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}",
    " Answer:",
    32,
)
DOCUMENT = "Document {i}:\n{document}"

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]


@dataclasses.dataclass(frozen=True)
class NeedleSettings:
    """The needles, their haystack, and the question.

    Attributes:
      haystack: repeated sentences, an essay, or other needles.
      key, value: kinds of key and value (words, numbers, UUIDs).
      keys, values, queries: number of keys, of values per key, and of keys in the question.
    """

    haystack: Haystack
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLE_TASKS: dict[str, NeedleSettings] = {
    "niah_single_1": NeedleSettings("noise"),
    "niah_single_2": NeedleSettings("essay"),
    "niah_single_3": NeedleSettings("essay", value="uuids"),
    "niah_multikey_1": NeedleSettings("essay", keys=4),
    "niah_multikey_2": NeedleSettings("needle"),
    "niah_multikey_3": NeedleSettings("needle", key="uuids", value="uuids"),
    "niah_multivalue": NeedleSettings("essay", values=4),
    "niah_multiquery": NeedleSettings("essay", keys=4, queries=4),
}

_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclasses.dataclass(frozen=True)
class Filled:
    """A filled template.

    Attributes:
      prompt: the question.
      answer_prefix: the beginning of the answer.
      solution: the text that completes it.
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
        """Candidate answers in a completion, in order."""

    def score(self, completion: str, answers: tuple[str, ...]) -> float:
        """RULER's `string_match_all`: the share of the references that occur, ignoring case."""
        return sum(occurrences(completion, answers)) / len(answers)


def occurrences(completion: str, answers: tuple[str, ...]) -> list[bool]:
    """Whether each reference occurs in a completion, as RULER looks for it."""
    text = _CONTROL.sub("\n", completion.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]
