"""Covering arrays: few rows that contain every pair of values of different factors.

Items of one kind (options of policies that share a mechanism) are interchangeable: each item has a
row, and each kind has every value of every factor in a row of one of its items.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence


def pairs(kind: Hashable, values: Mapping[str, Hashable]) -> Iterator[frozenset]:
    """Returns the pairs of values in a row; the kind counts as a value."""
    return map(frozenset, itertools.combinations([("kind", kind), *values.items()], 2))


def covering[Item](
    items: Sequence[tuple[Hashable, Item]], factors: Mapping[str, Sequence]
) -> list[tuple[Item, dict]]:
    """Returns (item, values) for every item, and further rows until every pair occurs.

    Each row takes the values that add the most new pairs; among equals the least used ones. Nothing
    is random: the rows are the same in every process.

    Args:
      items: the kind of each item, and the item.
      factors: the values of each factor.
    """
    choices = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    kinds = dict.fromkeys(kind for kind, _ in items)
    missing = {pair for kind in kinds for values in choices for pair in pairs(kind, values)}
    rows, had = [], Counter()
    turns = {kind: itertools.cycle([x for own, x in items if own == kind]) for kind in kinds}
    waiting = [kind for kind, _ in items]
    while waiting or missing:
        # When every item has a row, the kind that lacks the most pairs.
        lacks = Counter(value for pair in missing for name, value in pair if name == "kind")
        kind = waiting.pop(0) if waiting else max(kinds, key=lacks.__getitem__)
        values = max(choices, key=functools.partial(gain, missing, had, kind))
        missing -= set(pairs(kind, values))
        had.update(values.items())
        rows.append((next(turns[kind]), values))
    return rows


def gain(missing: set, had: Counter, kind: Hashable, values: Mapping) -> tuple[int, int]:
    """Returns the number of new pairs in a row, and how rarely its values were used."""
    new = sum(pair in missing for pair in pairs(kind, values))
    return new, -sum(had[value] for value in values.items())
