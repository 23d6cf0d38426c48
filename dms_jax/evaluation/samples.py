"""The chains of an evaluation as arrays, and the score of each problem by each method."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from dms_jax.evaluation.questions import Judge, PerChain
from dms_jax.evaluation.statistics import Method, majority, pass_at
from dms_jax.evaluation.traces import Chain

_DTYPES = {
    "new_tokens": np.int64,
    "reads": np.float64,
    "peak": np.float64,
    "ended": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """The chains of all problems from one seed, at one length.

    Attributes:
      answers: the answer of each chain; None if it gave none.
      scores, answer_scores: see `Result`.
      new_tokens, reads, peak, ended: see `traces.Chain`.
    """

    answers: list[list[str | None]]
    scores: PerChain
    answer_scores: PerChain
    new_tokens: Int[np.ndarray, "problems chains"]
    reads: PerChain
    peak: PerChain
    ended: Bool[np.ndarray, "problems chains"]

    @classmethod
    def of(cls, cuts: Sequence[Sequence[Chain]], judge: Judge) -> "Sample":
        """Judges the chains."""
        answers, scores, answer_scores = judge.chains([[each.text for each in own] for own in cuts])
        return cls(
            answers=answers,
            scores=scores,
            answer_scores=answer_scores,
            **{
                name: np.asarray([[getattr(each, name) for each in own] for own in cuts], dtype)
                for name, dtype in _DTYPES.items()
            },
        )

    def score(self, method: Method, chains: int, groups: int = 1) -> Float[np.ndarray, " problems"]:
        """Score of each problem with `chains` chains, averaged over the first `groups` groups.

        pass@W is estimated from all chains.
        """
        if method == "pass":
            return pass_at(self.scores, chains)
        if method == "single":
            return self.scores[:, : groups * chains].mean(1)
        total = np.zeros(len(self.answers))
        for first in range(0, groups * chains, chains):
            for problem, answers in enumerate(self.answers):
                winner = majority(answers[first : first + chains])
                if winner is not None:
                    total[problem] += self.answer_scores[problem, first + winner]
        return total / groups
