"""Plain values as JSON, with what JSON does not have: tuples, sets, bytes, complex numbers.

What is read back holds plain values only, whoever wrote it: no object with a behaviour of its own,
such as an `__eq__` that is always true, comes through.

# In: (1, [2.0, None])  Out: ["tuple", 1, ["list", 2.0, null]]
"""

from typing import Any

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
      ValueError, TypeError: it is not what `to_json` writes.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no such value")
        return data
    name, *rest = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](map(from_json, rest))
    if name == "dict":
        return {from_json(key): from_json(each) for key, each in rest}
    if name == "bytes":
        return bytes.fromhex(*rest)
    if name == "complex":
        return complex(*rest)
    raise ValueError("no such value")
