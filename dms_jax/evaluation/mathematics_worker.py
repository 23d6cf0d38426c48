r"""The worker program that parses and compares mathematical answers; `mathematics.py` starts it.

Math-Verify limits its time with a signal, which works only in the main thread of a process; this
process has no other thread. This file imports nothing from the library, so that it starts quickly.

    {"find": "... $\\boxed{0.5}$"}      ->  {"find": "\\frac{1}{2}"}  or  {"find": null}
    {"same": ["\\frac{1}{2}", "0.5"]}   ->  {"same": true}
    {"vote": "\\pi/2"}                  ->  {"vote": "Mul(Rational(1, 2), pi)"}

After a timeout the reply has "late".
"""

import fractions
import json
import re
import sys
import time
from typing import Any

import math_verify
import sympy
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy.logic.boolalg import BooleanAtom

_LARGEST = 10**100  # larger numbers keep their notation
_LONGEST = 100  # the most characters before the point of a decimal
_DECIMAL = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d*))\.(\d*)")
# decimals that Math-Verify compares; with this many a number may be a rounded fraction
_ROUNDED = 6


def find(completion: str, seconds: int) -> str | None:
    """Returns the last answer of a completion, numbers exact; None if there is none."""
    found = _parse(completion, seconds)
    if not found:
        return None
    text = str(found[-1]).strip()
    number = _exact(found[0], text)
    return (None if number is None else _written(number)) or text or None


def same(expected: str, answer: str, seconds: int) -> bool:
    """Whether an answer is the expected one, in any notation."""
    gold, given = (_parse(_boxed(each), seconds) for each in (expected, answer))
    if not gold or not given:
        return expected.strip() == answer.strip()
    return bool(math_verify.verify(gold, given, timeout_seconds=seconds))


def vote(answer: str, seconds: int) -> str:
    """Returns a text that equal answers have in common; the answer itself if it is a word."""
    value: Any = next(iter(_parse(_boxed(answer), seconds)), answer)
    # A number votes as written, rounded or exact; letters are a word, not a product.
    number = isinstance(value, sympy.Number) or "%" in answer
    if number or isinstance(value, str) or answer.isalpha():
        return answer
    value = timeout(seconds)(_computed)(value)
    if isinstance(value, BooleanAtom):  # "x \in (0, 1)" parses as a false equation
        return answer
    exact = _exact(value, answer)
    return (None if exact is None else _written(exact)) or sympy.srepr(value)


def _computed(value: Any) -> Any:
    """An expression with decimals as fractions, computed and expanded."""
    if isinstance(value, sympy.MatrixBase):
        value = sympy.ImmutableMatrix(value)
    decimals = {each: sympy.Rational(str(each)) for each in value.atoms(sympy.Float)}
    value = value.xreplace(decimals).doit()
    return value.expand() if isinstance(value, sympy.Expr) else value


def _exact(value: Any, text: str) -> fractions.Fraction | None:
    """The exact number as written; None for other expressions and possibly rounded numbers."""
    if "%" in text:
        return None
    if getattr(value, "is_Rational", False):
        return fractions.Fraction(int(value.p), int(value.q))
    written = _DECIMAL.fullmatch(text) if getattr(value, "is_Float", False) else None
    if written is None:
        return None
    whole, decimals = written[1].replace(",", ""), written[2].rstrip("0")
    if len(decimals) >= _ROUNDED or len(whole) > _LONGEST:
        return None
    return fractions.Fraction(f"{whole}.{decimals}")


def _written(number: fractions.Fraction) -> str | None:
    """A number in LaTeX; None if it is too long."""
    top, bottom = abs(number.numerator), number.denominator
    if max(top, bottom) >= _LARGEST:
        return None
    sign = "-" if number < 0 else ""
    return f"{sign}{top}" if bottom == 1 else f"{sign}\\frac{{{top}}}{{{bottom}}}"


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


def _parse(text: str, seconds: int) -> list[Any]:
    try:
        return math_verify.parse(text, parsing_timeout=seconds)
    except (Exception, TimeoutException):  # unparsable text is no answer
        return []


def reply(line: bytes, seconds: int) -> dict[str, Any]:
    """Answers a question; never raises, whatever sympy does with model output."""
    ((what, given),) = json.loads(line).items()
    ask, nothing = {"find": (find, None), "same": (same, False), "vote": (vote, given)}[what]
    start = time.monotonic()
    try:
        result = ask(*given, seconds) if what == "same" else ask(given, seconds)
    except (Exception, TimeoutException):  # sympy fails on some model output
        result = nothing
    late = result == nothing and time.monotonic() - start >= seconds
    return {what: result} | ({"late": True} if late else {})


def main() -> None:
    """Serves requests until standard input ends."""
    seconds, output = int(sys.argv[1]), sys.stdout.buffer
    output.write(b"ready\n")
    output.flush()
    for line in sys.stdin.buffer:
        output.write(json.dumps(reply(line, seconds)).encode("ascii") + b"\n")
        output.flush()


if __name__ == "__main__":
    main()
