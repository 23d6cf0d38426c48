"""Heights of the names at the ends of lines, moved apart where they would lie on each other."""

import math
from collections.abc import Sequence

from dms_jax.checks import Number


def label_heights(ends: Sequence[tuple[Number, Number]], gap: Number, *, log: bool) -> list[Number]:
    """Returns the height of each line's label: its end, or lower where another is too close.

    Args:
      ends: (x, y) of the last point of each line.
      gap: the least distance between labels that begin near each other.
      log: whether x is drawn on a logarithmic axis; ends further apart than a factor of 3 do not
        collide. On a linear axis all do.

    # In: (5, 90), (5, 89), (1, 90), gap 5, log  Out: [90, 85, 90]
    """
    placed: list[tuple[Number, Number]] = []
    heights: list[Number] = [0.0] * len(ends)
    for index in sorted(range(len(ends)), key=lambda index: -ends[index][1]):
        x, y = ends[index]
        near = [other for at, other in placed if not log or abs(math.log(x / at)) < math.log(3)]
        heights[index] = min([y, *(other - gap for other in near)])
        placed.append((x, heights[index]))
    return heights
