"""Mathematical problems from files, with the prompts of the DMS paper, judged by Math-Verify.

GSM8K uses Meta's prompt, AIME and MATH-500 use Open-R1's (appendix G of the paper, where the chat
template adds the rest). `style="plain"` is for models that were not tuned to follow instructions:
only the problem, like in lm-evaluation-harness, usually after worked examples.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from dms_jax.data.tasks import Problem
from dms_jax.data.written_answers import expression, is_open, readable, stated, word
from dms_jax.evaluation.mathematics import (
    find_answer,
    is_same,
    require_math_verify,
    vote_of,
)
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.sandbox import side_by_side
from dms_jax.evaluation.tasks.files import FileTask

META_PROMPT = (
    "Given the following problem, reason and give a final answer to the problem.\n"
    "Problem: {problem}\n"
    'Your response should end with "The final answer is [answer]" where [answer] is the response '
    "to the problem."
)
QWEN_PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
OPEN_R1_PROMPT = (
    "Solve the following math problem efficiently and clearly. The last line of your response "
    "should be of the following format: 'Therefore, the final answer is: $\\boxed{{ANSWER}}$. I "
    "hope it is correct' (without quotes) where ANSWER is just the final number or expression that "
    "solves the problem. Think step by step before answering.\n\n{problem}"
)
_FINAL = re.compile(r"final answer[*_]*(?: is\b|(?= ?:))[*_]*:?[*_]*\s*", re.IGNORECASE)
_CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class Mathematics(FileTask):
    """Problems with an answer that can be computed: any file with fields "problem" and "answer".

    Attributes:
      path, few_shot, examples: see `FileTask`.
      style: "instruct" states the answer format; "boxed" states it like Qwen's model cards; "plain"
        gives only the problem.
    """

    name: ClassVar[str] = "mathematics"
    prompts: ClassVar[dict[str, str]] = {
        "instruct": META_PROMPT,
        "boxed": QWEN_PROMPT,
        "plain": "Question: {problem}\nAnswer:",
    }
    next_problem: ClassVar[str] = "\nQuestion:"  # where a model starts inventing a problem
    # Some models copy the prompt's brackets; with a comma inside they are an interval.
    bracketed: ClassVar[re.Pattern[str]] = re.compile(r"\[([^\[\],]+)\]")

    numeric: ClassVar[bool] = False  # whether answers are numbers ("28 or 29" is no answer)

    style: Literal["instruct", "boxed", "plain"] = "instruct"

    def __post_init__(self):
        super().__post_init__()
        require_math_verify(type(self).__name__)

    def pose(self, record: Record, number: int) -> Problem:
        del number
        problem = record.text("problem", "question", "Problem", "Question")
        working, answer = self.read_solution(record)
        prompt = self.prompts[self.style].format(problem=problem.strip())
        solution = f" {working}" if self.style == "plain" else self.finish(working, answer)
        return Problem(prompt, solution, (answer,), record.where)

    def read_solution(self, record: Record) -> tuple[str, str]:
        """The worked solution of a record (the answer if there is none), and the answer."""
        answer = record.text("answer", "Answer").strip()
        working = [name for name in ("solution", "Solution") if record.fields.get(name)]
        return (record.text(*working) if working else answer), answer

    def finish(self, working: str, answer: str) -> str:
        """A worked solution that ends in the format that the prompt requests."""
        if self.style == "boxed":
            return f"{working}\n\\boxed{{{answer}}}"
        return f"{working}\nThe final answer is {answer}"

    def answer(self, completion: str) -> str | None:
        text = completion.partition(self.next_problem)[0] if self.style == "plain" else completion
        final = collections.deque(_FINAL.finditer(text), maxlen=1)
        text = text[final[0].end() :] if final else text
        if self.style == "boxed":  # the last of several boxes is the answer
            text = text[max(text.rfind("\\boxed"), 0) :]
        text = readable(text)
        bracketed = self.bracketed.match(text)
        if bracketed and bracketed[1].lower() != "answer":
            text = bracketed[1]
        if not final:
            return find_answer(text)
        return self.stated_answer(text, bulleted="\n" in final[0][0])

    def stated_answer(self, text: str, *, bulleted: bool = False) -> str | None:
        """The answer that a text states at its beginning, otherwise anywhere.

        Args:
          text: the text after the announcement of the answer, made `readable`.
          bulleted: whether the announcement is a separate line.
        """
        # Later paragraphs are remarks, which may have other numbers.
        first = text.partition("\n\n")[0]
        answer = stated(first, bulleted=bulleted, numeric=self.numeric)
        if answer is not None:
            return find_answer(answer)
        if self.numeric and is_open(first):
            return None
        written = [expression(first), first, text, None if self.numeric else word(first)]
        found = (find_answer(each) for each in written if each is not None)
        return next((answer for answer in found if answer is not None), None)

    def vote(self, answer: str) -> str:
        return vote_of(answer)

    def score(self, problem: Problem, completion: str) -> float:
        answer = self.answer(completion)
        return 0.0 if answer is None else self.score_answer(problem, answer)

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> list[float]:
        def judged(problem: Problem, completion: str) -> float:
            answer = self.answer(completion)
            if answer is None:
                return 0.0
            self.vote(answer)  # fills the cache for later calls
            return self.score_answer(problem, answer)

        return side_by_side([functools.partial(judged, *pair) for pair in pairs])

    def score_answer(self, problem: Problem, answer: str) -> float:
        return float(is_same(problem.answers[0], answer))


@dataclasses.dataclass(frozen=True)
class GSM8K(Mathematics):
    """Grade-school word problems: {"question", "answer"}, whose answer ends in "#### 18".

    Attributes:
      path, few_shot, examples, style: see `Mathematics`.
    """

    name: ClassVar[str] = "gsm8k"
    numeric: ClassVar[bool] = True
    # Answers are numbers: a comma separates thousands.
    bracketed: ClassVar[re.Pattern[str]] = re.compile(
        r"\[((?:[^\[\],]|(?<=\d),(?=\d{3}(?!\d)))+)\]"
    )

    def read_solution(self, record: Record) -> tuple[str, str]:
        working, mark, answer = record.text("answer").rpartition("####")
        if not mark or not answer.strip():
            raise record.error('"answer" must end in "#### " and the number.')
        answer = answer.strip().replace(",", "")
        if self.style == "plain":
            return record.text("answer").strip(), answer
        return _CALCULATION.sub("", working).strip(), answer

    def answer(self, completion: str) -> str | None:
        if self.style == "plain":
            text = completion.partition(self.next_problem)[0]
            _, mark, last = text.rpartition("####")
            if mark:
                return self.stated_answer(readable(last).strip().partition("\n")[0])
        return super().answer(completion)


@dataclasses.dataclass(frozen=True)
class MATH500(Mathematics):
    """Competition problems: {"problem", "solution", "answer", ...}.

    Attributes:
      path, few_shot, examples, style: see `Mathematics`.
    """

    name: ClassVar[str] = "math500"
    prompts: ClassVar[dict[str, str]] = {
        "instruct": OPEN_R1_PROMPT,
        "boxed": QWEN_PROMPT,
        "plain": "Problem:\n{problem}\n\nSolution:",
    }
    next_problem: ClassVar[str] = "\nProblem:"

    def finish(self, working: str, answer: str) -> str:
        last = f"Therefore, the final answer is: $\\boxed{{{answer}}}$. I hope it is correct"
        return f"{working}\n{last}"


@dataclasses.dataclass(frozen=True)
class AIME(MATH500):
    """Problems of the AIME, whose answers are whole numbers from 0 to 999.

    Attributes:
      path, few_shot, examples, style: see `Mathematics`.
    """

    name: ClassVar[str] = "aime"
    numeric: ClassVar[bool] = True

    def read_solution(self, record: Record) -> tuple[str, str]:
        working, answer = super().read_solution(record)
        if not answer.isdecimal() or int(answer) > 999:
            raise record.error(f'"answer" must be a whole number from 0 to 999, got {answer!r}.')
        return working, str(int(answer))  # published as "033"
