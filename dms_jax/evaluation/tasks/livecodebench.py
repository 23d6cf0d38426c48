"""LiveCodeBench: contest problems, answered by a program or by a method of `class Solution`.

The file is the published JSON lines: {"question_content", "starter_code", "public_test_cases",
"private_test_cases", "metadata", ...}. Tests are lists of {"input", "output", "testtype"}, as JSON
or as a string with JSON. Programs ("stdin") read and print. The input of functions ("functional")
is one JSON value per line, one for each argument; metadata names the function.

Outputs are compared like in LiveCodeBench: line by line without surrounding space, and as decimal
numbers where lines differ. The prompt is LiveCodeBench's; the DMS paper, whose appendix G has the
prompts of other tasks, prints none for code.
"""

import dataclasses
import decimal
import json
from typing import Any, ClassVar

from dms_jax.checks import show
from dms_jax.data.tasks import Problem
from dms_jax.errors import ConfigError
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks.code import CodeTask

PROMPT = (
    "You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests.\n\nQuestion: {question}\n\n"
)
STARTER_PROMPT = (
    "You will use the following starter code to write the solution to the problem and enclose "
    "your code within delimiters.\n```python\n{starter}\n```\n\n"
)
STDIN_PROMPT = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
    "\n```python\n# YOUR CODE HERE\n```\n\n"
)
# Imports that contest sites provide.
_IMPORTED = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "builtins",
    "typing",
)
_HEADER = (
    "".join(f"from {name} import *\n" for name in _IMPORTED)
    + "".join(f"import {name}\n" for name in _IMPORTED)
    + "sys.setrecursionlimit(50000)\n"
)


@dataclasses.dataclass(frozen=True)
class LiveCodeBench(CodeTask):
    """Contest problems, tested through standard input or by calling a function.

    Attributes:
      path, sandbox: see `CodeTask`. There are no worked examples: the file has no solutions.
    """

    name: ClassVar[str] = "livecodebench"

    def __post_init__(self):
        super().__post_init__()
        if self.few_shot:
            raise ConfigError(
                "LiveCodeBench publishes no solutions, so that there are no worked examples: leave "
                "few_shot at 0."
            )

    def pose(self, record: Record, number: int) -> Problem:
        del number
        tests = [
            test
            for name in ("public_test_cases", "private_test_cases")
            for test in _read_tests(record, name)
        ]
        if not tests:
            raise record.error('there are no tests in "public_test_cases" or "private_test_cases".')
        function = None
        if any(test["testtype"] == "functional" for test in tests):
            function = _function(record)
        starter = str(record.fields.get("starter_code") or "").strip()
        prompt = PROMPT.format(question=record.text("question_content").strip())
        prompt += STARTER_PROMPT.format(starter=starter) if starter else STDIN_PROMPT
        judged = json.dumps({"function": function, "tests": tests})
        return Problem(prompt, "", (judged,), record.where)

    def passes(self, sandbox: Sandbox, tests: dict[str, Any], answer: str) -> bool:
        source = _HEADER + answer
        for test in tests["tests"]:
            if test["testtype"] == "stdin":
                run = sandbox.run(source, test["input"])
                same = same_output(run.output, test["output"])
            else:
                run = sandbox.call(source, tests["function"], _lines(test["input"]))
                same = run.output == json.loads(test["output"])
            if run.failure or not same:
                return False
        return True


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _read_tests(record: Record, name: str) -> list[dict[str, str]]:
    """The tests of a field; none if it is absent or empty."""
    value = record.fields.get(name) or []
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise record.error(
            f'"{name}" is not JSON. Private tests are published as compressed pickle, which is not '
            "read here, because loading a pickle can run any code. Unpack them once where you "
            'trust the file, and write them as a list of {"input", "output", "testtype"}.'
        ) from error
    if not isinstance(tests, list):
        raise record.error(f'"{name}" must be a list of tests, got {show(tests)}.')
    for place, test in enumerate(tests, 1):
        where = f'test {place} of "{name}"'
        if not isinstance(test, dict) or test.get("testtype") not in ("stdin", "functional"):
            raise record.error(f'{where} must have a "testtype", "stdin" or "functional".')
        if not all(isinstance(test.get(key), str) for key in ("input", "output")):
            raise record.error(f'{where} must have "input" and "output", both texts.')
        if test["testtype"] == "functional":
            try:
                _lines(test["input"])
                json.loads(test["output"])
            except (ValueError, RecursionError) as error:
                raise record.error(f"{where}: its values are not JSON: {error}.") from error
    return [{key: test[key] for key in ("input", "output", "testtype")} for test in tests]


def _function(record: Record) -> str:
    """The name of the function that the tests call."""
    metadata = record.value("metadata")
    try:
        name = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
    except (ValueError, TypeError, KeyError) as error:
        raise record.error('"metadata" must name the function that is tested: "func_name".') from (
            error
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise record.error(f'"func_name" must be a name, got {show(name)}.')
    return name


def same_output(output: str, expected: str) -> bool:
    """Whether a program printed the expected output."""
    mine, wanted = (text.strip().split("\n") for text in (output, expected))
    return len(mine) == len(wanted) and all(
        left.strip() == right.strip() or _same_numbers(left, right)
        for left, right in zip(mine, wanted, strict=True)
    )


def _same_numbers(left: str, right: str) -> bool:
    try:
        mine, wanted = ([decimal.Decimal(word) for word in line.split()] for line in (left, right))
        return mine == wanted
    except ArithmeticError:  # not numbers
        return False
