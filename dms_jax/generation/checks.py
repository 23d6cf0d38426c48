"""Checks of what a caller gives: each names the argument, what it may be, and what it was."""

import math
import numbers
import sys
from typing import Any, TypeGuard

from dms_jax.errors import ConfigError

MOST = 2**63 - 1  # of a number that only bounds something, such as `sys.maxsize`
MOST_ON_DEVICE = 2**31 - 1  # of a number that shapes arrays or is an element of one


def show(value: Any) -> str:
    """A value for a message, in few characters whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = f"a number of {value.bit_length()} bits" if is_whole(value) else "numbers too long"
    return text if len(text) <= 80 else text[:77] + "..."


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of any kind; a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """Returns a whole number from `least` to `most`.

    Raises:
      ConfigError: it is something else.
    """
    if not is_whole(value) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {show(value)}.")
    if value > most:
        raise ConfigError(f"{name} must be at most {most:,}, got {show(value)}.")
    return int(value)


def check_real(
    name: str,
    value: Any,
    least: float | int,
    most: float | int = math.inf,
    *,
    open_below: bool = False,
    hint: str = "",
) -> float:
    """Returns a finite number between `least` and `most`.

    Raises:
      ConfigError: it is something else.
    """
    if not (
        _is_real(value)
        and abs(value) <= sys.float_info.max  # also of integers that no float holds
        and (least < value if open_below else least <= value)
        and value <= most
    ):
        above = f"above {least:g}" if open_below else f"of at least {least:g}"
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise ConfigError(
            f"{name} must be a finite number {above}{limit}{hint}, got {show(value)}."
        )
    return float(value)
