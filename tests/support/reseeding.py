"""Other seeds for the same tests: what `--reseed N` does.

A verdict that rests on one seed is a coin that was tossed once. `np.random.default_rng(s)` and
`jax.random.key(s)` draw from another stream for each N, wherever a file of this checkout calls
them: in tests and in the library alike, so that a test which repeats a draw of the library still
meets it. Calls by other packages, and N = 0, stay as they are. Hypothesis draws other examples.

A test that expects the very numbers of a seed says so with the marker `own_seeds(reason)`.
"""

import numbers
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# Files of the checkout whose draws are part of a file that is kept.
KEPT = CHECKOUT / "tests" / "golden"
# Far from 0, 1, 2 ..., which are the seeds that tests differ by.
STRIDE = 1_000_003


class Reseeding:
    """Replaces the two functions; `active` is turned off while a test runs that has own seeds."""

    def __init__(self, number: int):
        self.number = number
        self.active = True

    def install(self) -> None:
        import jax  # not at the top: its environment is set first
        import numpy as np

        np.random.default_rng = self._reseeded(np.random.default_rng)
        jax.random.key = self._reseeded(jax.random.key)

    def _reseeded(self, function):
        def draw(seed=None, *args, **kwargs):
            caller = Path(sys._getframe(1).f_code.co_filename)
            ours = caller.is_relative_to(CHECKOUT) and not caller.is_relative_to(KEPT)
            if self.active and ours and "site-packages" not in caller.parts:
                seed = self.shifted(seed)
            return function(seed, *args, **kwargs)

        return draw

    def shifted(self, seed):
        """What stands for a seed that is written: a number, an array, or a list of numbers."""
        if seed is None:
            return None
        if isinstance(seed, (list, tuple)):
            return [*seed, self.number]
        if isinstance(seed, numbers.Integral):
            return (int(seed) + STRIDE * self.number) % 2**32
        return seed + STRIDE * self.number
