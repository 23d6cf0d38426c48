"""Problems whose answer begins with words that the model is given: a prefilled assistant turn."""

import dataclasses

from dms_jax.data.tasks import Problem


@dataclasses.dataclass(frozen=True)
class PrefilledProblem(Problem):
    """A problem with the beginning of its answer.

    Attributes:
      answer_prefix: follows the prompt in plain text, and begins the assistant's turn in a chat.
        The solution starts where it ends.
      answer_tokens: the most new tokens of an answer; None for those of the sampling.
    """

    answer_prefix: str = ""
    answer_tokens: int | None = None
