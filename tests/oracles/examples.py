"""Small random inputs shared by the tests of the oracles."""

import numpy as np


def tensors(seed, length=13, query_heads=4, kv_heads=2, dim=6):
    """Returns random q [T, H, D], k and v [T, K, D]."""
    random = np.random.default_rng(seed)
    shapes = [(length, query_heads, dim), (length, kv_heads, dim), (length, kv_heads, dim)]
    return [random.normal(size=shape) for shape in shapes]
