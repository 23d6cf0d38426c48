"""Rotary position embedding of a vector's two halves (RoFormer, arXiv 2104.09864, eq. 34).

Plane i of a vector x [D] holds x[i] and x[i + D/2], and is rotated by its own angle.
"""

from jaxtyping import Array, Float


def rotate_halves(
    first: Float[Array, "*shape half"],
    second: Float[Array, "*shape half"],
    cos: Float[Array, "*angles half"],
    sin: Float[Array, "*angles half"],
) -> tuple[Float[Array, "*shape half"], Float[Array, "*shape half"]]:
    """Returns both halves of rotated vectors; arrays of angles are broadcast to the vectors."""
    return first * cos - second * sin, second * cos + first * sin
