"""A cache of float8 (e4m3) numbers with a power-of-two scale a slot, digit by digit.

scale = the smallest 2^k with max |x| <= 448 * 2^k
e4m3: 4 exponent bits (least normal 2^-6), 3 mantissa bits, ties to even
"""

import numpy as np


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3 numbers of numbers of at most 448."""
    _, exponent = np.frexp(np.abs(x))  # |x| in [2^(exponent - 1), 2^exponent)
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.round(x / step) * step  # NumPy rounds halves to even


def scale_of(x: np.ndarray) -> np.ndarray:
    """[...]: the scale of each slot [..., D]."""
    largest = np.abs(x).max(axis=-1)
    powers = 2.0 ** np.arange(-120, 100)
    return powers[(largest[..., None] <= 448 * powers).argmax(axis=-1)]


def snap(x) -> np.ndarray:
    """What the cache gives back for x [..., D]."""
    x = np.asarray(x, np.float64)
    scale = scale_of(x)[..., None]
    return round_to_e4m3(x / scale) * scale
