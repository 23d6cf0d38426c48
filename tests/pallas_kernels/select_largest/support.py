"""Rows of scores of every kind, and their largest scores."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.select import cases

KINDS = ("distinct", "ties", "equal", "dead", "nothing", "extremes", "zeros")


def draw(case: cases.SelectCase, kind: str) -> np.ndarray:
    """Scores [R, S]; the rows of a case differ."""
    rng = np.random.default_rng(len(case.name))
    shape = (case.rows, case.width)
    if kind == "distinct":
        x = rng.normal(size=shape)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=shape)
    elif kind == "equal":
        x = np.repeat(rng.normal(size=(case.rows, 1)), case.width, 1)
    elif kind == "dead":  # like slots after a row's length, with a page that is always read
        x = np.where(
            np.arange(case.width) < rng.integers(1, case.width + 1), rng.normal(size=shape), -np.inf
        )
        x[:, rng.integers(case.width)] = np.inf
    elif kind == "nothing":
        x = np.full(shape, -np.inf)
    elif kind == "zeros":
        x = rng.choice([-0.0, 0.0], size=shape)
    else:
        tiny = np.array([1e-45, -1e-45, 3e-39, -3e-39])
        some = np.array([np.inf, -np.inf, 3e38, -3e38, 65504, -65504, 1e-7, -1e-7, 1, -1])
        x = rng.choice(np.concatenate([tiny, some]), size=shape)
    with np.errstate(over="ignore"):
        return x.astype(jnp.dtype(case.dtype))


def oracle(scores: np.ndarray, count: int) -> np.ndarray:
    """The largest by a stable sort of whole rows, in order of their places."""
    ranked = np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")
    return np.sort(ranked[:, :count], -1)
