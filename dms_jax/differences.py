"""Describe how the settings of a resumed run differ from its first ones, for a message."""

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_CHANGES = 4  # named in a message, for each setting
_LONGEST_VALUE = 24  # characters of a value in a message
_SCALAR = (bool, int, float, str, type(None))


def difference(saved: Mapping[str, Any], given: Mapping[str, Any], name: str) -> str:
    """Returns the name of a setting with its differences.

    # In: {"recipe": {"batch_size": 4}}, {"recipe": {"batch_size": 2}}, "recipe"
    # Out: "recipe (`batch_size` 4, not 2)"
    # In: {"seed": 0}, {"seed": 1}, "seed"      Out: "`seed` 0, not 1"
    """
    found = list(_changes(saved.get(name), given.get(name), name))
    if not found:  # a field that only one of them has, and is None there
        return f"`{name}`"
    if not all(isinstance(each.get(name), dict) for each in (saved, given)):
        return found[0]
    more = ", ..." if len(found) > _MOST_CHANGES else ""
    return f"{name} ({', '.join(found[:_MOST_CHANGES])}{more})"


def _changes(saved: Any, given: Any, name: str, where: str = "") -> Iterator[str]:
    """Yields the differences of a setting, by the innermost names."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted(saved.keys() | given.keys()):
            yield from _changes(saved.get(key), given.get(key), key, where)
    elif isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        for index, pair in enumerate(zip(saved, given, strict=True), 1):
            yield from _changes(*pair, name, f" of {name} {index}")
    elif saved != given:
        short = all(isinstance(each, _SCALAR) for each in (saved, given))
        short = short and max(len(str(saved)), len(str(given))) <= _LONGEST_VALUE
        yield f"`{name}`{where}" + (f" {saved}, not {given}" if short else "")
