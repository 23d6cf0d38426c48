"""Quantization to integers of 4 bits with a scale per group, after a rotation, as it is defined.

y = H x, block by block; H is orthogonal, Hadamard, as large as the power of two in the head dim
s = -e / 8 in bfloat16, e the number of largest magnitude of its group (the negative one of two);
    at most an eighth of the largest number of bfloat16
y ~ s c, c the integer from -8 to 7 nearest to y / s, ties to even
"""

import math

import ml_dtypes
import numpy as np

GROUP = 32


def hadamard(size: int) -> np.ndarray:
    """Returns the matrix by Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / math.sqrt(size)


def turn(x: np.ndarray) -> np.ndarray:
    """Rotates vectors [..., D]; twice gives x."""
    size = 1
    while x.shape[-1] % (2 * size) == 0:
        size *= 2
    blocks = x.reshape(*x.shape[:-1], -1, size)
    return np.einsum("ij,...j->...i", hadamard(size), blocks).reshape(x.shape)


def scale_of(group: np.ndarray) -> float:
    """Returns the scale of one group of numbers."""
    extreme = max(group, key=lambda number: (abs(number), -number))
    if abs(extreme) < 2.0**-117:
        return -(2.0**-120) if extreme > 0 else 2.0**-120
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) / 8
    return float(ml_dtypes.bfloat16(np.float32(np.clip(extreme / -8, -largest, largest))))


def quantize(x, *, group: int | None = GROUP, rotated: bool = True):
    """Returns (integers [..., D], scales [..., D / group]) of x [..., D]."""
    x = np.asarray(x, np.float64)
    head_dim = x.shape[-1]
    size = head_dim if group is None else math.gcd(group, head_dim)
    groups = (turn(x) if rotated else x).reshape(*x.shape[:-1], -1, size)
    scales = np.apply_along_axis(scale_of, -1, groups)
    codes = np.clip(np.round(groups / scales[..., None]), -8, 7)  # NumPy rounds halves to even
    return codes.astype(int).reshape(x.shape), scales


def read(codes, scales, *, rotated: bool = True) -> np.ndarray:
    """Returns the numbers that integers and their scales stand for."""
    groups = codes.reshape(*scales.shape, -1) * np.asarray(scales, np.float64)[..., None]
    numbers = groups.reshape(codes.shape)
    return turn(numbers) if rotated else numbers


def unpack(packed: np.ndarray) -> np.ndarray:
    """Returns the integers of bytes: the first half of a vector in their low four bits."""
    low, high = np.asarray(packed).astype(int) % 16, np.asarray(packed).astype(int) // 16
    return np.concatenate([low, high], -1) - 8


def snap(x, **options) -> np.ndarray:
    """Quantizes and dequantizes x [..., D], as the cache does."""
    codes, scales = quantize(x, **options)
    rotated = options.get("rotated", True)
    return read(codes, scales, rotated=rotated)
