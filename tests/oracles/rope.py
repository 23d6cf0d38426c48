"""Rotary position embedding in the half-split form: dim i turns with dim i + D/2.

out[i]       = x[i] cos(t f_i) - x[i + D/2] sin(t f_i)
out[i + D/2] = x[i + D/2] cos(t f_i) + x[i] sin(t f_i),     f_i = base^(-2 i / D)
"""

import numpy as np


def angles(positions, dim: int, base: float = 10000.0):
    """cos and sin, each [T, D/2], of `positions` [T]."""
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.cos(turns), np.sin(turns)


def rotate(x, cos, sin):
    """Rotate x [..., D] by cos and sin [..., D/2], which broadcast over the leading axes."""
    low, high = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rotate_tokens(x, cos, sin):
    """Rotate x [T, H, D], token t by row t of cos and sin [T, D/2]."""
    return rotate(x, cos[:, None], sin[:, None])
