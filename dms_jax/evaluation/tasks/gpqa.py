"""GPQA: four options, shuffled from a seed, answered by a letter.

The prompt is Open-R1's, as the DMS paper asks it (appendix G). The file is the published CSV:
"Question", "Correct Answer", "Incorrect Answer 1" ... "Incorrect Answer 3".
"""

import dataclasses
import random
import re
from typing import ClassVar

from dms_jax.data.tasks import Problem
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.tasks.files import FileTask

LETTERS = "ABCD"
PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)
# "Answer: C", "**Answer**: $C$", "answer: \boxed{C}", "Answer: \(C\)"
_ANSWER = re.compile(
    r"answer[\s*_]*:(?:[\s*_$`(]|\\[a-z]*[({\[])*([A-D])(?![A-Za-z])", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class GPQA(FileTask):
    """Graduate-level questions with four options each.

    Attributes:
      path, few_shot, examples: see `FileTask`.
      seed: decides the order of the options; every question has its own order.
    """

    name: ClassVar[str] = "gpqa"

    def pose(self, record: Record, number: int) -> Problem:
        question = record.text("Question").strip()
        right = record.text("Correct Answer").strip()
        wrong = [record.text(f"Incorrect Answer {i}").strip() for i in (1, 2, 3)]
        order = random.Random(f"{self.seed} {number} {question}").sample(range(4), 4)
        options = [[right, *wrong][place] for place in order]
        letter = LETTERS[order.index(0)]
        prompt = PROMPT.format(question=question, **dict(zip(LETTERS, options, strict=True)))
        return Problem(prompt, f"Answer: {letter}", (letter,), record.where)

    def answer(self, completion: str) -> str | None:
        found = _ANSWER.findall(completion)
        return found[-1].upper() if found else None

    def score(self, problem: Problem, completion: str) -> float:
        return float(self.answer(completion) == problem.answers[0])

    def score_answer(self, problem: Problem, answer: str) -> float:
        return float(answer == problem.answers[0])
