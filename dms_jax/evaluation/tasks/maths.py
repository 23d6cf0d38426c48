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
from dms_jax.evaluation.mathematics import (
    find_answer,
    is_same,
    readable,
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
_FINAL = re.compile(
    r"final answer[*_]*(?: is\b|(?= ?:))[*_]*:?[*_]*\s*(?:(?<=\n)[-*\u2022]\s+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<sign>(?:- ?|negative |minus )?)[$€£(\[{<]{0,3} ?(?P<inner>-?) ?"
    r"(?P<number>\d{1,3}(?:[,' ]\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<below>\d+)(?!\d|\.\d))?"
)
# "30 - 1", but not "29 (30 - 1"
_SUM = re.compile(
    r"[^\d(]*+\(?[^\d(]*+\d[\d.,]*+[^\d(]{0,20}?(?:[-+*/x\u00d7\u00f7]|\\times|\\cdot) ?\$?\d"
)
_OPEN = re.compile(r"\s*(?:(?:or|and|to|x|[-+*^])\s*[\d(]|\u00b2|:\d)")  # "28 or 29", "29^2"
_COMMAND = re.compile(r"\\(?!text)[A-Za-z]")
_MATH = re.compile(r"\$\$?[^$]+\$\$?(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_CLAUSE = re.compile(r"(?:[^.\n;]|\.(?=\d))*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class Mathematics(FileTask):
    """Problems with an answer that can be computed: any file with fields "problem" and "answer".

    Attributes:
      path, few_shot, examples: see `FromFile`.
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
        return self.stated_answer(text) if final else find_answer(text)

    def stated_answer(self, text: str) -> str | None:
        r"""The answer that a text states at its beginning, otherwise anywhere.

        # In: "29 (3 * 10 - 1)."  Out: "29"    "$18$ per day for 30 days."  "18"
        # In: "30 - 1 = 29."      Out: "29"    "3\sqrt{2}."                "3\sqrt{2}"

        Args:
          text: the text after the announcement of the answer, made `readable`.
        """
        # Later paragraphs are remarks, which may have other numbers.
        first = text.strip().partition("\n\n")[0]
        if self.numeric and not _COMMAND.search(first):
            value = _value(first)
            if number := _NUMBER.search(value):
                return None if _OPEN.match(value, number.end()) else find_answer(_written(number))
        clause = _CLAUSE.match(first)
        said = "" if clause is None else clause[0].strip()
        written = [first, text]
        if math := _MATH.match(first):
            written.insert(0, math[0])
        elif said and "$" not in said and "\\boxed" not in said and not _WORD.search(said):
            written.insert(0, f"$\\boxed{{{said}}}$")
        elif said.isalpha():
            written.append(f"$\\boxed{{{said}}}$")
        found = (find_answer(each) for each in written)
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


def _value(text: str) -> str:
    """Returns a text without the sum before a value.

    # In: "30 - 1 = 29 minutes"  Out: " 29 minutes"        "29 minutes = 1740 seconds"  the same
    """
    before, equals, after = text.partition("=")
    while equals and _SUM.match(before):
        text = after
        before, equals, after = text.partition("=")
    return text


def _written(found: re.Match[str]) -> str:
    """Returns a number that `_NUMBER` found, as LaTeX."""
    negative = bool(found["sign"]) != bool(found["inner"])
    number = re.sub("[,' ]", "", found["number"])
    value = f"\\frac{{{number}}}{{{found['below']}}}" if found["below"] else number
    return f"${'-' if negative else ''}{value}$"


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
