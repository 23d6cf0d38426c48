"""Marks: the gate runs one or a few instances of a parametrised test, the others are `nightly`.

If every shape, layout or row of a test compiles a separate program, the gate runs its cheapest
instance, and nightly tests run all:

    @pytest.mark.parametrize("lanes", [1, *further(3, 4)])
    @pytest.mark.parametrize("name", nightly_but({"vanilla", "dms"}, POLICIES))
    @pytest.mark.parametrize("row", first_of_each(ROWS, by=lambda row: row.policy.name))

Values of several such parameters combine: an instance is nightly if any of its values is.
"""

from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import pytest


def further(*values: Any) -> list:
    """Returns values of a parameter, marked `nightly`; a tuple has one value per parameter."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for value in values
    ]


def nightly_but(quick: Container, values: Iterable) -> list:
    """Returns values in order, marked `nightly` unless they are in `quick`."""
    return [value if value in quick else further(value)[0] for value in values]


def first_of_each(
    values: Iterable,
    *,
    by: Callable[[Any], Hashable],
    cost: Callable[[Any], Any] = lambda value: 0,
) -> list:
    """Returns values in order, marked `nightly` except one of each kind.

    Args:
      values: instances, distinguishable by `==`.
      by: returns the kind of an instance.
      cost: of each kind, the first of the cheapest stays in the gate.
    """
    values, chosen = list(values), {}
    for value in sorted(values, key=cost):
        chosen.setdefault(by(value), value)
    return nightly_but(list(chosen.values()), values)
