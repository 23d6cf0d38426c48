"""Programming tasks: answers are programs, judged by running them in a sandbox.

Running must be allowed explicitly with `sandbox=Sandbox()`. HumanEval is the published JSON lines,
compressed or not: {"task_id", "prompt", "entry_point", "canonical_solution", "test"}. A model that
was not tuned to follow instructions completes the prompt (`style="plain"`), and its text is cut
where Chen et al. (2021) stop it; a chat model answers in a block of code.
"""

import abc
import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from dms_jax.data.tasks import Problem
from dms_jax.errors import ConfigError
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.sandbox import Sandbox, side_by_side
from dms_jax.evaluation.tasks.files import FileTask

HUMANEVAL_PROMPT = (
    "Write a solution to the following problem and make sure that it passes the tests. Answer "
    "with the completed function in a block of code.\n```python\n{prompt}\n```"
)
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
# Where a completion leaves the function (Chen et al., section 3.1).
_STOP = re.compile(r"\n(?:class|def|#|if|print)")


@dataclasses.dataclass(frozen=True)
class CodeTask(FileTask):
    """Problems whose answers are programs.

    A problem's only reference answer is its tests, as JSON.

    Attributes:
      path, few_shot, examples: see `FileTask`.
      sandbox: the limits of the programs. There is no default, because running model-written code
        must be a decision.
    """

    sandbox: Sandbox | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.sandbox is None:
            raise ConfigError(
                f"{type(self).__name__} judges answers by running them: code that a model wrote "
                "would run on this machine. Allow it, within limits, with sandbox=Sandbox() "
                "(dms_jax.evaluation.sandbox)."
            )
        self.sandbox.require()

    @abc.abstractmethod
    def passes(self, sandbox: Sandbox, tests: Any, answer: str) -> bool:
        """Whether an answer passes the tests of its problem."""

    def answer(self, completion: str) -> str | None:
        """The last block of code, without the surrounding text."""
        blocks = _BLOCK.findall(completion)
        return blocks[-1] if blocks and blocks[-1].strip() else None

    def score(self, problem: Problem, completion: str) -> float:
        answer = self.answer(completion)
        return 0.0 if answer is None else self.score_answer(problem, answer)

    def score_answer(self, problem: Problem, answer: str) -> float:
        key = problem.answers[0], answer
        if key not in self._verdicts:
            assert self.sandbox is not None
            self._verdicts[key] = self.passes(self.sandbox, json.loads(key[0]), answer)
        return float(self._verdicts[key])

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> list[float]:
        answers = [(problem, self.answer(completion)) for problem, completion in pairs]
        waiting = {
            (problem.answers[0], answer): functools.partial(self.score_answer, problem, answer)
            for problem, answer in answers
            if answer is not None
        }
        side_by_side(list(waiting.values()))
        return [
            0.0 if answer is None else self.score_answer(problem, answer)
            for problem, answer in answers
        ]

    @functools.cached_property
    def _verdicts(self) -> dict[tuple[str, str], bool]:
        """Cached verdicts by tests and answer, because judging is slow."""
        return {}


@dataclasses.dataclass(frozen=True)
class HumanEval(CodeTask):
    """Functions to complete from their signature and docstring.

    Attributes:
      path, few_shot, examples, sandbox: see `CodeTask`.
      style: "instruct" asks for a block of code; "plain" gives only the beginning of the function.
    """

    name: ClassVar[str] = "humaneval"

    style: Literal["instruct", "plain"] = "instruct"

    def pose(self, record: Record, number: int) -> Problem:
        del number
        prompt, solution = record.text("prompt"), record.text("canonical_solution")
        tests = {
            "prompt": prompt,
            "tests": record.text("test"),
            "entry": record.text("entry_point"),
        }
        if not tests["entry"].isidentifier():
            raise record.error(f'"entry_point" must be a name, got {tests["entry"]!r}.')
        if self.style == "instruct":
            solution = f"```python\n{prompt}{solution}\n```"
            prompt = HUMANEVAL_PROMPT.format(prompt=prompt.strip())
        return Problem(prompt, solution, (json.dumps(tests),), record.where)

    def answer(self, completion: str) -> str | None:
        if self.style == "instruct":
            return super().answer(completion)
        body = _STOP.split(completion, maxsplit=1)[0].rstrip()
        return body if body.strip() else None

    def passes(self, sandbox: Sandbox, tests: dict[str, str], answer: str) -> bool:
        prompt, entry = tests["prompt"], tests["entry"]
        whole = re.search(rf"^(?:async )?def {re.escape(entry)}\b", answer, re.MULTILINE)
        # A whole function is placed after the prompt, whose imports and other functions it may use.
        source = f"{prompt}\n\n{answer}\n" if whole else f"{prompt}{answer}\n"
        source += f"{tests['tests']}\n\ndef passed():\n    check({entry})\n    return True\n"
        return sandbox.call(source, "passed", []).output is True
