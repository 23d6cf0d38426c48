"""RULER's single needle and variable tracking, in its exact wording.

Source: RULER (Hsieh et al., arXiv 2404.06654), `niah` and `variable_tracking` of its generators:
templates, needles, noise, depths (40 places from 0 to 100%), 7-digit numbers, 5-letter variables,
and the score: the share of references that occur in the completion, ignoring case.

Differences, because nothing is downloaded: the essays are public-domain novels, cut at sentences; a
regular expression splits sentences, and drops a closing quotation mark; adjectives and nouns come
from our lists; a needle may follow the last line of noise; several chains are spread over the noise
independently; and there is no worked example before the question (zero-shot).

`evaluation.tasks.ruler` is RULER itself, for comparing models. These problems serve training too:
their sizes are in words, so they need neither a tokenizer nor a search for a length, and each essay
starts at another place of the split's books (RULER's is the same text each time).
"""

import bisect
import dataclasses
import functools
import itertools
import random
import re
import string
from typing import ClassVar, Literal

from dms_jax import assets
from dms_jax.checks import Count, Whole
from dms_jax.data.tasks.base import Problem, Task, split_of
from dms_jax.data.tasks.words import ADJECTIVES, NOUNS
from dms_jax.errors import ConfigError

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = tuple(round(place * 100 / 39) for place in range(40))
_SENTENCE_END = re.compile(r"(?<=[.!?])['\")\]]?\s+(?=[A-Z\"'(\[])")


@dataclasses.dataclass(frozen=True)
class Retrieval(Task):
    """Tasks to find something in a long text.

    Attributes:
      size: length of the haystack, in words of an essay or repetitions of the noise.
    """

    size: Count = 600

    def score(self, problem: Problem, completion: str) -> float:
        text = completion.strip().lower()
        return sum(answer.lower() in text for answer in problem.answers) / len(problem.answers)


@dataclasses.dataclass(frozen=True)
class Needle(Retrieval):
    """RULER's single needle: one number for one key, somewhere in a long text.

    Attributes:
      haystack: "essay" (niah_single_2) or "noise" (niah_single_1).
      needles: number of needles; the question is for one of them. 1 is the single needle, more
        are niah_multikey, with the wording of the single needle.
    """

    name: ClassVar[str] = "needle"

    haystack: Literal["essay", "noise"] = "essay"
    needles: Count = 1

    def draw(self, rng: random.Random) -> Problem:
        keys: dict[str, int] = {}
        while len(keys) < self.needles:
            key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
            keys[key] = rng.randint(1_000_000, 9_999_999)
        asked, value = next(iter(keys.items()))
        needles = [
            f"One of the special magic numbers for {key} is: {number}."
            for key, number in keys.items()
        ]
        identity = f"{asked} {value}"
        context = self._context(rng, needles, identity)
        prompt = (
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the number afterwards.\n{context}\nWhat is the special magic "
            f"number for {asked} mentioned in the provided text? The special magic number for "
            f"{asked} mentioned in the provided text is"
        )
        return Problem(prompt, f" {value}", (str(value),), identity)

    def _context(self, rng: random.Random, needles: list[str], identity: str) -> str:
        if self.haystack == "noise":
            sentences, joint = [_NOISE] * self.size, "\n"
            places = sorted(rng.sample(range(len(sentences) + 1), min(len(needles), self.size + 1)))
            places += [len(sentences)] * (len(needles) - len(places))
        else:
            sentences, joint = _essay(rng, self.size, split_of(identity)), " "
            depths = (_DEPTHS[rng.randrange(len(_DEPTHS))] for _ in needles)
            places = sorted(int(len(sentences) * depth / 100) for depth in depths)
        needles = rng.sample(needles, len(needles))
        return joint.join(_inserted(sentences, list(zip(places, needles, strict=True))))

    def answer(self, completion: str) -> str | None:
        found = re.search(r"\d+", completion)
        return found.group() if found else None

    def score_answer(self, problem: Problem, answer: str) -> float:
        return float(answer in problem.answers)


@dataclasses.dataclass(frozen=True)
class VariableTracking(Retrieval):
    """RULER's variable tracking: all variables that hold a value, directly or through a chain.

    Attributes:
      size: repetitions of the noise.
      chains: chains of assignments in the text; the question is for the first.
      hops: assignments of one variable to another in each chain.
    """

    name: ClassVar[str] = "tracking"

    size: Count = 30
    chains: Count = 1
    hops: Whole = 4

    def draw(self, rng: random.Random) -> Problem:
        count = self.hops + 1
        names: list[str] = []
        while len(names) < self.chains * count:
            name = "".join(rng.choices(string.ascii_uppercase, k=5))
            if name not in names:
                names.append(name)
        values = rng.sample(range(10_000, 100_000), self.chains)
        inserted: list[tuple[int, str]] = []
        for chain, value in enumerate(values):
            members = names[chain * count : (chain + 1) * count]
            lines = [f"VAR {members[0]} = {value}"]
            lines += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(members)]
            fits = len(lines) <= self.size
            places = sorted((rng.sample if fits else rng.choices)(range(self.size), k=len(lines)))
            inserted += zip(places, lines, strict=True)
        inserted.sort(key=lambda item: item[0])  # stable: the order within a chain stays
        context = "\n".join(_inserted([_NOISE] * self.size, inserted))
        asked, answers = values[0], tuple(names[:count])
        prompt = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{context}\nQuestion: Find all variables that are assigned the value {asked} in "
            "the text above. Answer: According to the chain(s) of variable assignment in the text "
            f"above, {count} variables are assigned the value {asked}, they are: "
        )
        return Problem(prompt, " ".join(answers), answers, f"{asked} {' '.join(answers)}")

    def answer(self, completion: str) -> str | None:
        found = sorted(set(re.findall(r"[A-Z]{5}", completion)))
        return " ".join(found) if found else None

    def score_answer(self, problem: Problem, answer: str) -> float:
        found = set(answer.split())
        return sum(name in found for name in problem.answers) / len(problem.answers)


def _inserted(sentences: list[str], extra: list[tuple[int, str]]) -> list[str]:
    """Returns sentences with others inserted at the given places, which are in order."""
    result, start = [], 0
    for place, text in extra:
        result += sentences[start:place]
        result.append(text)
        start = place
    return result + sentences[start:]


def _essay(rng: random.Random, words: int, split: str) -> list[str]:
    """Returns sentences of about `words` words, from a random place in the split's books.

    Raises:
      ConfigError: the books of the split are shorter.
    """
    sentences, ends = _sentences(split)
    last = bisect.bisect_left(ends, ends[-1] - words)
    if not 0 < words < ends[-1]:
        raise ConfigError(
            f"A haystack of {words} words is longer than the text of {ends[-1]} words."
        )
    start = rng.randrange(max(1, last))
    before = ends[start - 1] if start else 0
    end = bisect.bisect_left(ends, before + words)
    return sentences[start : end + 1]


@functools.cache
def _sentences(split: str) -> tuple[list[str], list[int]]:
    """Returns the sentences of a split's books, and the number of words up to the end of each."""
    sentences = _SENTENCE_END.split(" ".join(" ".join(assets.books(split)).split()))
    ends, total = [], 0
    for sentence in sentences:
        total += sentence.count(" ") + 1
        ends.append(total)
    return sentences, ends
