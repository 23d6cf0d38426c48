"""Quantization to float8 (e4m3) with a power-of-two scale per slot, from its definition.

scale = the smallest 2^k with max |x| <= 448 * 2^k
e4m3: 4 exponent bits (least normal 2^-6), 3 mantissa bits, ties to even
"""

import numpy as np


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounds numbers of at most 448 to the nearest e4m3 numbers."""
    _, exponent = np.frexp(np.abs(x))  # |x| in [2^(exponent - 1), 2^exponent)
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.round(x / step) * step  # NumPy rounds halves to even


def scale_of(x: np.ndarray) -> np.ndarray:
    """Returns the scale [...] of each slot [..., D]."""
    largest = np.abs(x).max(axis=-1)
    powers = 2.0 ** np.arange(-120, 100)
    return powers[(largest[..., None] <= 448 * powers).argmax(axis=-1)]


def snap(x) -> np.ndarray:
    """Quantizes and dequantizes x [..., D], as the cache does."""
    x = np.asarray(x, np.float64)
    scale = scale_of(x)[..., None]
    return round_to_e4m3(x / scale) * scale
