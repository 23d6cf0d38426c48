"""Other seeds for the same tests, with `--reseed N`.

A test that passes with one seed may pass by chance. For each N, `np.random.default_rng(s)` and
`jax.random.key(s)` draw from another stream if a file of this checkout calls them, in tests and in
the library, so that a test which repeats a draw of the library still agrees. Calls by other
packages, and N = 0, are unchanged. Hypothesis draws other examples.

A test that expects the exact numbers of a seed has the marker `own_seeds(reason)`.
"""

import numbers
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# Files of the checkout whose draws must reproduce a committed file.
KEPT = CHECKOUT / "tests" / "golden"
# Large steps, because the seeds of tests are 0, 1, 2 ...
STRIDE = 1_000_003


class Reseeding:
    """Replaces the two functions; `active` is False during a test marked `own_seeds`."""

    def __init__(self, number: int):
        self.number = number
        self.active = True

    def install(self) -> None:
        import jax  # after tests/conftest.py has set up jax
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
        """Returns the replacement for a seed: a number, an array, or a list of numbers."""
        if seed is None:
            return None
        if isinstance(seed, (list, tuple)):
            return [*seed, self.number]
        if isinstance(seed, numbers.Integral):
            return (int(seed) + STRIDE * self.number) % 2**32
        return seed + STRIDE * self.number
