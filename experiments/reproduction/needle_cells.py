"""Whether a needle is found, by the length of the context and its depth in it.

The needle in a haystack of Kamradt (2023) with the texts and the score of RULER. The problems of a
row differ in their needles; those of a column are the same but for the depth, so that depths are
compared on equal terms.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.evaluation import Result, evaluate, mean_over_problems
from dms_jax.evaluation.tasks.ruler import RULER
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

DEPTHS = (0, 25, 50, 75, 100)  # unless given, in percent


@dataclasses.dataclass(frozen=True)
class NeedleCell(RULER):
    """A needle at one depth of one length, which its name says."""

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The task, the length and the depth."""
        return f"{self.task} of {self.length} at {self.depth:g}%"


@dataclasses.dataclass(frozen=True)
class NeedleGrid:
    """The score of every length and depth.

    Attributes:
      lengths: tokens of a prompt and its answer.
      depths: percent of the haystack before the needle.
      scores: mean score of each depth (down) and length (across), from 0 to 1.
      errors: their standard errors over problems; NaN for a single problem.
      count: problems in each.
      peak: peak of live tokens of each length, averaged over layers, heads and problems.
      result: the evaluation.
    """

    lengths: tuple[int, ...]
    depths: tuple[float | int, ...]
    scores: Float[np.ndarray, "depths lengths"]
    errors: Float[np.ndarray, "depths lengths"]
    count: int
    peak: Float[np.ndarray, " lengths"]
    result: Result

    @property
    def accuracy(self) -> float:
        """The mean of all."""
        return float(self.scores.mean())

    def to_dict(self) -> dict[str, Any]:
        """Returns the grid as JSON data."""
        return {
            "policy": self.result.settings["policy"],
            "task": self.result.settings["task"][0]["task"],
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "count": self.count,
            "scores": self.scores.tolist(),
            "errors": [[None if np.isnan(each) else each for each in row] for row in self.errors],
            "accuracy": self.accuracy,
            "peak": self.peak.tolist(),
            "seconds": self.result.seconds,
        }


def needle_grid(
    model: LanguageModel,
    policy: Policy | None,
    *,
    lengths: Sequence[int],
    depths: Sequence[float | int] = DEPTHS,
    problems: int,
    task: RULER,
    **options: Any,
) -> NeedleGrid:
    """Looks for needles at every depth of contexts of every length.

    Args:
      model: a model with a tokenizer.
      policy: the checkpoint's own if None.
      lengths: tokens of a prompt and its longest answer (128 tokens).
      depths: percent of the haystack before the needle.
      problems: problems at each depth of each length.
      task: a task of RULER with a single needle, with its filling and seed.
      **options: further arguments of `evaluate`.

    Raises:
      ConfigError: an argument does not fit, or a length is too short.
    """
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    cells = [
        NeedleCell(**{**fields, "length": length, "depth": depth})
        for depth in depths
        for length in lengths
    ]
    result = evaluate(model, cells, policy=policy, problems=problems * len(cells), **options)
    shape = (problems, len(depths), len(lengths))
    scores = result.scores.reshape(shape)
    measured = [
        [mean_over_problems(scores[:, row, column][:, None]) for column in range(len(lengths))]
        for row in range(len(depths))
    ]
    return NeedleGrid(
        lengths=tuple(lengths),
        depths=tuple(depths),
        scores=np.array([[each.value for each in row] for row in measured]),
        errors=np.array([[each.error for each in row] for row in measured]),
        count=problems,
        peak=result.peak.reshape(shape).mean((0, 1)),
        result=result,
    )
