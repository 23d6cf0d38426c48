"""The size of a context that fits a length in tokens, in few counts: counting is what takes time.

Tokens grow about in proportion to the size, so the next size is where a line through the two
nearest known ones meets the length; every fourth lies in the middle, in case the line misleads.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

CLOSE = 200  # a context is large enough within this part of the length


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The sizes that are looked at.

    Attributes:
      length: the most tokens.
      least: the smallest size.
      most: the largest, if there is one.
    """

    length: int
    least: int
    most: int | None = None

    def clipped(self, size: int) -> int:
        """The nearest size within the bounds."""
        return max(self.least, size if self.most is None else min(size, self.most))


def largest_size(count: Callable[[int], int], bounds: Bounds, start: int) -> int | None:
    """Returns a size that fits: the largest, or one within half a percent of the length.

    Args:
      count: function that returns the tokens of a size.
      bounds: the length, and the sizes to look at.
      start: the size to begin with.

    Returns:
      The size, or None if not even the smallest fits.
    """
    length = bounds.length
    below: list[tuple[int, int]] = []  # sizes that fit and their tokens, growing
    above: list[tuple[int, int]] = []  # sizes that do not fit, shrinking
    size = bounds.clipped(start)
    for turn in itertools.count():
        tokens = count(size)
        (below if tokens <= length else above).append((size, tokens))
        if tokens <= length and (size == bounds.most or length - tokens <= length // CLOSE):
            return size
        if tokens > length and size == bounds.least:
            return None
        if below and above:
            (low, fewer), (high, more) = below[-1], above[-1]
            if high - low == 1:
                return low
            size = low + (length - fewer) * (high - low) // max(1, more - fewer)
            size = (low + high) // 2 if turn % 4 == 3 else size
            size = min(max(size, low + 1), high - 1)
        elif below:
            low, fewer = below[-1]
            before, fewest = below[-2] if len(below) > 1 else (0, 0)
            growth = (low - before) / max(1, fewer - fewest)
            size = bounds.clipped(low + max(1, int((length - fewer) * growth)))
        else:  # what does not depend on the size makes the line too steep: twice as far
            high, more = above[-1]
            size = bounds.clipped(high - 2 * math.ceil(high * (more - length) / more))
    raise AssertionError
