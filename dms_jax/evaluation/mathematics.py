r"""Judging answers to mathematical problems, with Math-Verify (the extra `eval`).

An answer is looked for where the prompts request it (`\boxed{...}`, "the final answer is ..."), and
otherwise among the expressions of the text. Two answers are the same if they are the same number,
expression, set, interval or word, however they are written: 0.5 is \frac{1}{2}.
"""

import fractions
import re
import threading
from typing import Any

from dms_jax.evaluation.extras import import_extra

_SECONDS = 5  # limit for parsing and for comparing
_LARGEST = 10**100  # longer numbers stay as they are written
_LONGEST = 100  # characters of a decimal before its point
_DECIMAL = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d*))\.(\d*)")
_ROUNDED = 6  # decimals that Math-Verify compares; a number with so many may stand for a fraction
MAX_CHARACTERS = 20_000  # the end of a completion; an answer is short and comes last


def require_math_verify(task: str) -> None:
    """Raises ConfigError unless the answers of a task can be judged."""
    import_extra("math_verify", package="Math-Verify", purpose=f"Judging the answers of {task}")


def find_answer(completion: str) -> str | None:
    r"""The answer of a completion in a normal form, as LaTeX; None where there is none.

    # In: "... the final answer is: $\boxed{0.5}$."  Out: "\frac{1}{2}"
    # In: "... the final answer is $1,000.00"  Out: "1000"
    """
    found = _parse(completion[-MAX_CHARACTERS:])
    if not found:
        return None
    text = str(found[-1]).strip()
    number = _exact(found[0], text)
    if number is not None:
        top, bottom = abs(number.numerator), number.denominator
        if max(top, bottom) < _LARGEST:
            sign = "-" if number < 0 else ""
            return f"{sign}{top}" if bottom == 1 else f"{sign}\\frac{{{top}}}{{{bottom}}}"
    return text or None


def _exact(value: Any, text: str) -> fractions.Fraction | None:
    """The number that was written; None where it is no number, or perhaps a rounded one."""
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


def is_same(expected: str, answer: str) -> bool:
    """Whether an answer, in LaTeX, is the expected one."""
    gold, given = _parse(f"$\\boxed{{{expected}}}$"), _parse(f"$\\boxed{{{answer}}}$")
    if not gold or not given:
        return expected.strip() == answer.strip()
    library, failures = _math_verify()
    try:
        return bool(library.verify(gold, given, timeout_seconds=_time_limit()))
    except failures:  # sympy fails on some of what models write, and that is a wrong answer
        return False


def _parse(text: str) -> list[Any]:
    library, failures = _math_verify()
    try:
        return library.parse(text, parsing_timeout=_time_limit())
    except failures:  # as above: whatever stands there, it is no answer
        return []


def _math_verify() -> tuple[Any, tuple[type[BaseException], ...]]:
    """The library, and the exceptions it raises; its timeout does not derive from `Exception`."""
    library = import_extra("math_verify", package="Math-Verify", purpose="Judging an answer")
    errors = import_extra("math_verify.errors", package="Math-Verify", purpose="Judging an answer")
    return library, (Exception, errors.TimeoutException)


def _time_limit() -> int | None:
    """Math-Verify's timeout uses a signal, which works only in the main thread."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
