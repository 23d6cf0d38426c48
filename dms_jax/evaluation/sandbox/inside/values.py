"""Plain values as JSON, with what JSON does not have: tuples, sets, bytes, complex numbers.

What is read back holds plain values only, whoever wrote it: no object with a behaviour of its own,
such as an `__eq__` that is always true, comes through. Nor do keys that were made to have one hash:
a set or a dictionary compares each of those with each.

# In: (1, [2.0, None])  Out: ["tuple", 1, ["list", 2.0, null]]
"""

import collections
from collections.abc import Sequence
from typing import Any

_ALIKE = 100  # keys that may have the same hash
_SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def to_json(value: Any) -> Any:
    """Returns a value as JSON data.

    Raises:
      TypeError: it is, or holds, something else than plain data.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # subclasses lose what they add
        if isinstance(value, kind):
            return kind(value)
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *map(to_json, value)]
    if isinstance(value, dict):
        return ["dict", *([to_json(key), to_json(each)] for key, each in value.items())]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is no plain value")


def from_json(data: Any) -> Any:
    """Returns the value of JSON data.

    Raises:
      ValueError, TypeError, OverflowError: it is not what `to_json` writes.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no such value")
        return data
    name, *rest = data
    if name in ("set", "frozenset"):
        return _SEQUENCES[name](_apart([from_json(each) for each in rest]))
    if name in _SEQUENCES:
        return _SEQUENCES[name](map(from_json, rest))
    if name == "dict":
        keys = _apart([from_json(key) for key, _ in rest])
        return dict(zip(keys, [from_json(each) for _, each in rest], strict=True))
    if name == "bytes":
        return bytes.fromhex(*rest)
    if name == "complex":
        return complex(*rest)
    raise ValueError("no such value")


def _apart(keys: Sequence[Any]) -> Sequence[Any]:
    """Refuses keys of which too many have the same hash."""
    if max(collections.Counter(map(hash, keys)).values(), default=0) > _ALIKE:
        raise ValueError(f"more than {_ALIKE} keys of one hash")
    return keys
