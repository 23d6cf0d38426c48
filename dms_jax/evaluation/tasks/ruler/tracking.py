"""RULER's variable tracking, `vt`: variables assigned to each other, among repeated sentences."""

import dataclasses
import itertools
import random
import re
import string
from collections.abc import Callable

from dms_jax.evaluation.tasks.ruler.formats import NOISE, TRACKING, Family, Filled

EXAMPLE_TOKENS = 500  # the most tokens of the worked example
_EXAMPLE_HOPS = 10  # the most in the worked example
_VARIABLE, _EXAMPLE_VARIABLE = 5, 3  # letters per name


@dataclasses.dataclass(frozen=True)
class Tracking(Family):
    """Chains of assignments; the question asks for all variables with the value of the first chain.

    Attributes:
      chains: chains in the text.
      hops: assignments of one variable to another per chain.
      seed: seed of the positions in the worked example, one for all problems as in RULER.
      example: function that returns the repetitions of noise in the worked example; None without
        one.
    """

    format = TRACKING

    chains: int
    hops: int
    seed: int
    example: Callable[[], int] | None

    @property
    def least(self) -> int:
        return self.hops + 1

    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        del number
        asked = self._build(rng, rng, size, self.hops, _VARIABLE)
        if self.example is None:
            return asked
        shown = self.worked(rng, self.example())
        return dataclasses.replace(asked, prompt=f"{shown}\n\n{asked.prompt}")

    def worked(self, rng: random.Random, size: int) -> str:
        """A worked example: the seed fixes where its lines stand; names and values are drawn."""
        hops, places = min(self.hops, _EXAMPLE_HOPS), random.Random(f"vt example {self.seed}")
        shown = self._build(rng, places, size, hops, _EXAMPLE_VARIABLE)
        return f"{shown.prompt}{shown.answer_prefix} {shown.solution}"

    def found(self, completion: str) -> list[str]:
        return re.findall(rf"\b[A-Z]{{{_VARIABLE}}}\b", completion)

    def _build(
        self, rng: random.Random, places: random.Random, size: int, hops: int, letters: int
    ) -> Filled:
        count = hops + 1
        names: dict[str, None] = {}
        while len(names) < self.chains * count:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        values = rng.sample(range(10_000, 99_999), self.chains)  # RULER's may repeat
        lines = [NOISE] * size
        for value, members in zip(values, itertools.batched(names, count), strict=True):
            chain = [f"VAR {members[0]} = {value}"]
            chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(members)]
            before = sorted(places.sample(range(len(lines)), count))
            for already, (place, line) in enumerate(zip(before, chain, strict=True)):
                lines.insert(place + already, line)
        answers = tuple(itertools.islice(names, count))
        return Filled(
            self.format.template.format(context="\n".join(lines), query=values[0]),
            self.format.answer_prefix.format(num_v=count, query=values[0]),
            " ".join(answers),
            answers,
        )
