"""Quantization to float8 (e4m3) with a power-of-two scale per slot, from its definition.

scale = the smallest 2^k with max |x| <= 448 * 2^k e4m3: 4 exponent bits (least normal 2^-6), 3
mantissa bits, ties to even Numbers that would round beyond the largest number of x's dtype round
towards zero.
"""

import ml_dtypes
import numpy as np


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounds numbers of at most 448 to the nearest e4m3 numbers."""
    _, exponent = np.frexp(np.abs(x))  # |x| in [2^(exponent - 1), 2^exponent)
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.round(x / step) * step  # NumPy rounds halves to even


def scale_of(x: np.ndarray) -> np.ndarray:
    """Returns the scale [...] of each slot [..., D]."""
    largest = np.abs(x).max(axis=-1)
    powers = 2.0 ** np.arange(-120, 127)
    return powers[(largest[..., None] <= 448 * powers).argmax(axis=-1)]


def snap(x) -> np.ndarray:
    """Quantizes and dequantizes x [..., D], as the cache does."""
    largest = float(ml_dtypes.finfo(x.dtype).max)
    x = np.asarray(x, np.float64)
    scale = scale_of(x)[..., None]
    rounded = round_to_e4m3(x / scale) * scale
    step = 2.0 ** (np.frexp(np.abs(x))[1] - 4)  # of 4 significant bits
    return np.where(np.abs(rounded) > largest, np.trunc(x / step) * step, rounded)
