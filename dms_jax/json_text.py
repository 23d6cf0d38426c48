"""Figures as JSON text, with null for unknown numbers.

JSON has no NaN and infinity. Python writes them anyway, and other programs then reject the whole
file. So all figures are written with this module.
"""

import json
import math
from collections.abc import Callable
from typing import Any


def json_text(
    data: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None
) -> str:
    """Returns data as JSON text, with null for each number that is not finite.

    Args:
      data: dictionaries, lists, tuples, strings, numbers, truth values and None.
      indent: spaces of each level; everything on one line if None.
      default: converts other values to JSON data; None to refuse them.

    Raises:
      TypeError: there are other values and no `default`.
    """
    return json.dumps(_finite_or_none(data), indent=indent, default=default, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    # In: {"mean": 1.5, "error": nan}  Out: {"mean": 1.5, "error": None}
    if isinstance(value, dict):
        return {name: _finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
