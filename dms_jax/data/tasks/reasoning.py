"""Problems with step-by-step solutions that end in "The final answer is ...".

`LinearEquation` has the format of the DMS paper's appendix C, taken from DeepMind's mathematics
dataset: "Solve 5*b - 2355 = -50*b - 2740 for b." `Arithmetic` reduces an expression one operation
at a time. `WordChain` is a chain of comparisons in any order, among distractors: the solution
traces it back from the question and then computes forward, so every step must look something up in
the prompt. Solutions have about 50 to 1500 tokens of the shipped tokenizer.
"""

import abc
import dataclasses
import random
import re
import unicodedata
from collections.abc import Callable
from typing import Annotated, ClassVar

from dms_jax.checks import Count, Number, Range
from dms_jax.data.tasks.base import Problem, Task
from dms_jax.data.tasks.words import NAMES, THINGS
from dms_jax.errors import ConfigError

_ANSWER = re.compile(r"[Tt]he final answer is (-?\d+)")
Slips = Annotated[Number, Range(0, 1, below=True)]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Reasoning(Task):
    """Problems whose answer is one integer at the end of the solution.

    Attributes:
      slips: probability that the result of a step is off by one in one digit, as after a lost
        carry. The solution continues with the wrong result; the reference answer is the true one. A
        model trained on such solutions makes random mistakes like a person, so its chains fail
        independently, and voting helps.
    """

    slips: Slips = dataclasses.field(default=0.0, kw_only=True)

    @abc.abstractmethod
    def work(self, rng: random.Random) -> tuple[str, list[str], int, int]:
        """Returns (question, lines of the solution, their result, the true answer)."""

    def draw(self, rng: random.Random) -> Problem:
        question, lines, result, answer = self.work(rng)
        return Problem(
            prompt=f"Problem: {question}\nSolution:\n",
            solution="\n".join([*lines, f"The final answer is {result}"]),
            answers=(str(answer),),
            identity=question,
        )

    def slip(self, rng: random.Random, value: int) -> int:
        """Returns the value or, with probability `slips`, the value off by one in one digit."""
        if not self.slips or rng.random() >= self.slips:
            return value
        return value + rng.choice((-1, 1)) * 10 ** rng.randrange(len(str(abs(value))))

    def answer(self, completion: str) -> str | None:
        found = _ANSWER.findall(completion)
        return _whole_number(found[-1]) if found else None

    def score(self, problem: Problem, completion: str) -> float:
        return float(self.answer(completion) == problem.answers[0])

    def score_answer(self, problem: Problem, answer: str) -> float:
        return float(answer == problem.answers[0])


def _whole_number(text: str) -> str:
    """Returns `str(int(text))` for any length and the digits of any script: "-007" is "-7"."""
    digits = "".join(str(unicodedata.decimal(digit)) for digit in text.removeprefix("-"))
    value = digits.lstrip("0") or "0"
    return f"-{value}" if text.startswith("-") and value != "0" else value


def _range(name: str, pair: tuple[int, int], least: int) -> None:
    if not (len(pair) == 2 and least <= pair[0] <= pair[1]):
        raise ConfigError(
            f"{name} must be (low, high), whole numbers with {least} <= low <= high, got {pair!r}."
        )


@dataclasses.dataclass(frozen=True)
class LinearEquation(Reasoning):
    """Linear equations in one variable, as in "Solve 5*b - 2355 = -50*b - 2740 for b".

    In a*x + b = c*x + d the answer x is whole. There are no slips: a long division could not
    continue from a wrong remainder.

    Attributes:
      coefficient: largest absolute value of a and c.
      constant: largest absolute value of b.
      solution: largest absolute value of the answer.
    """

    name: ClassVar[str] = "linear"

    coefficient: Count = 60
    constant: Count = 3000
    solution: Count = 99

    def __post_init__(self):
        super().__post_init__()
        if self.slips:
            raise ConfigError("Linear equations have no slips. Leave slips at 0.")

    def work(self, rng: random.Random) -> tuple[str, list[str], int, int]:
        x = rng.choice(_LETTERS)
        root = rng.randint(-self.solution, self.solution)
        a = b = c = d = 0
        while a == c or not (a or c):
            a, c = (rng.randint(-self.coefficient, self.coefficient) for _ in range(2))
        while not (b and d):
            b = rng.randint(-self.constant, self.constant)
            d = (a - c) * root + b
        question = f"Solve {_side(a, b, x, rng)} = {_side(c, d, x, rng)} for {x}."
        total, rest = a - c, d - b
        lines = [
            f"Collect {x}: {_term(a, x)} {_signed_term(-c, x)} = {d} {_signed(-b)}",
            f"{a} {_signed(-c)} = {total}",
            f"{d} {_signed(-b)} = {rest}",
            f"{_term(total, x)} = {rest}",
            *_division(rest, total),
            f"{x} = {root}",
        ]
        return question, lines, root, root


def _term(coefficient: int, x: str) -> str:
    if coefficient in (1, -1):
        return x if coefficient == 1 else f"-{x}"
    return f"{coefficient}*{x}" if coefficient else "0"


def _signed(value: int) -> str:
    return f"+ {value}" if value >= 0 else f"- {-value}"


def _signed_term(coefficient: int, x: str) -> str:
    sign = "-" if coefficient < 0 else "+"
    return f"{sign} {_term(abs(coefficient), x)}"


def _side(coefficient: int, constant: int, x: str, rng: random.Random) -> str:
    """Returns one side of an equation, with its two terms in either order."""
    if not coefficient:
        return str(constant)
    if rng.random() < 0.5:
        return f"{_term(coefficient, x)} {_signed(constant)}"
    return f"{constant} {_signed_term(coefficient, x)}"


def _division(dividend: int, divisor: int) -> list[str]:
    """Returns the lines of a long division without a remainder.

    # 2310 / 55   Out: 231 - 55*4 = 231 - 220 = 11 / 110 - 55*2 = 110 - 110 = 0
    """
    size, by = abs(dividend), abs(divisor)
    lines, carried = [f"Divide {size} by {by}"], 0
    for digit in str(size):
        carried = carried * 10 + int(digit)
        times = carried // by
        if times:
            left = carried - by * times
            lines.append(f"{carried} - {by}*{times} = {carried} - {by * times} = {left}")
            carried = left
    return lines


@dataclasses.dataclass(frozen=True)
class Arithmetic(Reasoning):
    """Nested sums, differences and products of whole numbers, one operation per line.

    Attributes:
      operations: fewest and most operations.
      numbers: largest number in the expression.
      largest: largest absolute value of intermediate results.
    """

    name: ClassVar[str] = "arithmetic"

    operations: tuple[int, int] = (4, 12)
    numbers: Count = 99
    largest: Count = 999

    def __post_init__(self):
        super().__post_init__()
        _range("operations", self.operations, 1)

    def work(self, rng: random.Random) -> tuple[str, list[str], int, int]:
        tree = self._tree(rng, rng.randint(*self.operations))
        question, answer = f"Compute {_show(tree)}.", _value(tree)
        lines = []
        while not isinstance(tree, int):
            tree, done = _reduce(tree, lambda value: self.slip(rng, value))
            lines.append(done if isinstance(tree, int) else f"{done}: {_show(tree)}")
        return question, lines, tree, answer

    def _tree(self, rng: random.Random, operations: int) -> "int | Operation":
        if not operations:
            return rng.randint(1, min(self.numbers, self.largest))
        left = rng.randint(0, operations - 1)
        a, b = self._tree(rng, left), self._tree(rng, operations - 1 - left)
        x, y = _value(a), _value(b)
        signs = [sign for sign in "+-*" if abs(_apply(sign, x, y)) <= self.largest]
        if "*" in signs and rng.random() < 0.5:
            signs.remove("*")
        return Operation(rng.choice(signs), a, b) if signs else self._tree(rng, operations)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: two expressions and the sign between them."""

    sign: str
    left: "int | Operation"
    right: "int | Operation"


Expression = int | Operation


def _apply(sign: str, x: int, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y, "/": x // (y or 1)}[sign]


def _value(tree: Expression) -> int:
    if isinstance(tree, int):
        return tree
    return _apply(tree.sign, _value(tree.left), _value(tree.right))


def _show(tree: Expression) -> str:
    """Returns an expression with brackets around every operation but the outermost."""
    if isinstance(tree, int):
        return str(tree)
    sides = (
        f"({_show(side)})" if isinstance(side, Operation) else str(side)
        for side in (tree.left, tree.right)
    )
    return f" {tree.sign} ".join(sides)


def _reduce(tree: Operation, slip: Callable[[int], int]) -> tuple[Expression, str]:
    """Computes the leftmost operation between two numbers, perhaps with a slip."""
    if isinstance(tree.left, Operation):
        left, done = _reduce(tree.left, slip)
        return dataclasses.replace(tree, left=left), done
    if isinstance(tree.right, Operation):
        right, done = _reduce(tree.right, slip)
        return dataclasses.replace(tree, right=right), done
    value = slip(_apply(tree.sign, tree.left, tree.right))
    return value, f"{tree.left} {tree.sign} {tree.right} = {value}"


@dataclasses.dataclass(frozen=True)
class WordChain(Reasoning):
    """Questions about how many things a person has, given a chain of comparisons in any order.

    Attributes:
      steps: fewest and most comparisons between the known number and the one in question.
      distractors: fewest and most people who are compared with the chain but do not matter.
      largest: largest number.
    """

    name: ClassVar[str] = "words"

    steps: tuple[int, int] = (3, 12)
    distractors: tuple[int, int] = (0, 6)
    largest: Annotated[int, Range(2), "a comparison needs room"] = 199

    def __post_init__(self):
        super().__post_init__()
        _range("steps", self.steps, 1)
        _range("distractors", self.distractors, 0)
        most = self.steps[1] + 1 + self.distractors[1]
        if most > len(NAMES):
            raise ConfigError(f"{most} people are too many: there are {len(NAMES)} names.")

    def work(self, rng: random.Random) -> tuple[str, list[str], int, int]:
        steps, others = rng.randint(*self.steps), rng.randint(*self.distractors)
        people, thing = rng.sample(NAMES, steps + 1 + others), rng.choice(THINGS)
        value = {people[0]: rng.randint(2, self.largest // 2 + 1)}
        told = {people[0]: f"{people[0]} has {value[people[0]]} {thing}."}
        compared: dict[str, tuple[str, int]] = {}
        for number, person in enumerate(people[1:], 1):
            other = people[number - 1] if number <= steps else rng.choice(people[: steps + 1])
            kind, by, value[person] = self._compare(rng, value[other])
            compared[person] = (kind, by)
            told[person] = f"{person} has {_SAID[kind].format(by)} {other}."
        asked = people[steps]
        statements = rng.sample(list(told.values()), len(told))
        question = f"{' '.join(statements)} How many {thing} does {asked} have?"
        chain = people[: steps + 1]
        lines = [told[person] for person in reversed(chain)]
        result = value[chain[0]]
        lines.append(f"{chain[0]}: {result}")
        for person in chain[1:]:
            sign, by = _SIGN[compared[person][0]], compared[person][1]
            worked = f"{result} {sign} {by}"
            result = self.slip(rng, _apply(sign, result, by))
            lines.append(f"{person}: {worked} = {result}")
        return question, lines, result, value[asked]

    def _compare(self, rng: random.Random, known: int) -> tuple[str, int, int]:
        """Draws a comparison with a person who has `known`: (kind, by how much, value)."""
        step = max(1, self.largest // 5)
        while True:
            kind = rng.choice(("more", "more", "fewer", "fewer", "times", "half"))
            by = rng.randint(1, step) if kind in ("more", "fewer") else rng.randint(2, 9)
            by = 2 if kind == "half" else by
            value = _apply(_SIGN[kind], known, by)
            if 1 <= value <= self.largest and (kind != "half" or known % 2 == 0):
                return kind, by, value


_SIGN = {"more": "+", "fewer": "-", "times": "*", "half": "/"}
_SAID = {
    "more": "{} more than",
    "fewer": "{} fewer than",
    "times": "{} times as many as",
    "half": "half as many as",
}
