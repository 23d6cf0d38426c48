"""RULER's needles in a haystack: `niah_single_1` to `niah_multiquery`."""

import dataclasses
import random
import re
import uuid
from collections.abc import Container, Sequence

from dms_jax.evaluation.tasks.ruler.filling import Words, sentences
from dms_jax.evaluation.tasks.ruler.formats import (
    NEEDLE,
    NEEDLES,
    NOISE,
    SINGULAR,
    Family,
    Filled,
    Kind,
    NeedleSettings,
)

DEPTHS = tuple(round(place * 100 / 39) for place in range(40))  # percent of the essay's sentences
_PATTERNS = {
    "numbers": re.compile(r"\d+"),
    "words": re.compile(r"[A-Za-z]+-[A-Za-z]+"),
    "uuids": re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
}


@dataclasses.dataclass(frozen=True)
class Needles(Family):
    """Needles in an essay, in repeated sentences, or among needles of other keys.

    Attributes:
      settings: kinds and numbers of needles, and the haystack.
      words: the words that keys are made of.
      essay: the words of the essay, repeated in longer contexts.
      seed: seed of the order of the needles, one for all problems as in RULER.
      depth: percent of the haystack before the needle; None for RULER's random depths.
    """

    format = NEEDLES

    settings: NeedleSettings
    words: Words
    essay: Sequence[str]
    seed: int
    depth: float | int | None

    @property
    def least(self) -> int:
        return self.settings.keys * self.settings.values

    @property
    def most(self) -> int | None:
        """Other needles use at most half of all keys."""
        if (self.settings.haystack, self.settings.key) != ("needle", "words"):
            return None
        return len(set(self.words.first)) * len(set(self.words.second)) // 2

    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        del number
        settings, known = self.settings, {}
        others = size if settings.haystack == "needle" else 0
        for _ in range(settings.keys + others):
            key = self._new_key(rng, known)
            known[key] = [_drawn(rng, settings.value, self.words) for _ in range(settings.values)]
        lines = [self._needle(key, value) for key, values in known.items() for value in values]
        hidden = settings.keys * settings.values
        needles, lines = lines[:hidden], lines[hidden:] or [NOISE] * size
        random.Random(self.seed).shuffle(needles)
        if settings.haystack == "essay":
            context = self._in_essay(rng, needles, size)
        else:
            context = self._among_lines(rng, needles, lines)
        asked = rng.sample(list(known)[: settings.keys], settings.queries)
        answers = tuple(value for key in asked for value in known[key])
        template, prefix, kind = self.format.template, self.format.answer_prefix, settings.value
        if len(answers) == 1:
            for plural, singular in SINGULAR:
                template = template.replace(plural, singular)
                prefix = prefix.replace(plural, singular)
            kind = kind.removesuffix("s")
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        return Filled(
            template.format(type_needle_v=kind, context=context, query=query),
            prefix.format(type_needle_v=kind, query=query),
            " " + ", ".join(answers),
            answers,
        )

    def found(self, completion: str) -> list[str]:
        return _PATTERNS[self.settings.value].findall(completion)

    def _new_key(self, rng: random.Random, known: Container[str]) -> str:
        """A new key. RULER's may repeat an old one, which makes a question ambiguous."""
        while (key := _drawn(rng, self.settings.key, self.words)) in known:
            pass
        return key

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.settings.value, key=key, value=value)

    def _in_essay(self, rng: random.Random, needles: list[str], size: int) -> str:
        """The first words of the essay, with a needle at each of several depths.

        Parts between needles may be empty; they are still joined by a space.
        """
        repeats = -(-size // len(self.essay))
        parts = sentences(" ".join((list(self.essay) * repeats)[:size]).strip())
        depths = rng.sample(DEPTHS, len(needles)) if self.depth is None else [self.depth]
        places = sorted(int(len(parts) * (depth / 100)) for depth in depths)
        joined, start = [], 0
        for place, needle in zip(places, needles, strict=True):
            joined += [" ".join(parts[start:place]), needle]
            start = place
        return " ".join([*joined, " ".join(parts[start:])])

    def _among_lines(self, rng: random.Random, needles: list[str], lines: list[str]) -> str:
        places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
        if self.depth is not None:
            places = [int(len(lines) * (self.depth / 100))]
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def _drawn(rng: random.Random, kind: Kind, words: Words) -> str:
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "words":
        return f"{rng.choice(words.first)}-{rng.choice(words.second)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
