"""HumanEval: answers are functions, judged by running their tests in a sandbox.

Running must be allowed explicitly with `sandbox=Sandbox()`. The file is the published JSON lines,
compressed or not: {"task_id", "prompt", "entry_point", "canonical_solution", "test"}. A model that
was not tuned to follow instructions completes the prompt (`style="plain"`), and its text is cut
where Chen et al. (2021) stop it; a chat model answers in a block of code.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

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
class HumanEval(FileTask):
    """Functions to complete from their signature and docstring.

    A problem's only reference answer is its tests, as JSON.

    Attributes:
      path, few_shot, examples: see `FileTask`.
      sandbox: the limits of the programs. There is no default, because running model-written code
        must be a decision.
      style: "instruct" asks for a block of code; "plain" gives only the beginning of the function.
    """

    name: ClassVar[str] = "humaneval"

    sandbox: Sandbox | None = None
    style: Literal["instruct", "plain"] = "instruct"

    def __post_init__(self):
        super().__post_init__()
        if self.sandbox is None:
            raise ConfigError(
                "HumanEval judges answers by running them: code that a model wrote would run on "
                "this machine. Allow it, within limits, with sandbox=Sandbox() "
                "(dms_jax.evaluation.sandbox)."
            )
        self.sandbox.require()

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
        """The last block of code; in plain style, the completion up to the function's end."""
        if self.style == "plain":
            found = [_STOP.split(completion, maxsplit=1)[0].rstrip()]
        else:
            found = _BLOCK.findall(completion)
        return found[-1] if found and found[-1].strip() else None

    def score(self, problem: Problem, completion: str) -> float:
        answer = self.answer(completion)
        return 0.0 if answer is None else self.score_answer(problem, answer)

    def score_answer(self, problem: Problem, answer: str) -> float:
        key = problem.answers[0], answer
        if key not in self._verdicts:
            self._verdicts[key] = self.passes(json.loads(key[0]), answer)
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

    def passes(self, tests: dict[str, str], answer: str) -> bool:
        """Whether an answer passes the tests of its problem."""
        assert self.sandbox is not None
        prompt, entry = tests["prompt"], tests["entry"]
        whole = re.search(rf"^(?:async )?def {re.escape(entry)}\b", answer, re.MULTILINE)
        # A whole function is placed after the prompt, whose imports and other functions it may use.
        source = f"{prompt}\n\n{answer}\n" if whole else f"{prompt}{answer}\n"
        return not self.sandbox.run(f"{source}{tests['tests']}\n\ncheck({entry})\n")
