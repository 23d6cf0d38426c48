"""How a pool stores vectors in fewer bits than they are computed in."""

import abc
from typing import Any

from jaxtyping import Array, Float


class Format(abc.ABC):
    """A way to store keys and values: numbers and their scales.

    Formats are frozen dataclasses: a pool carries its own as a static field.
    """

    @abc.abstractmethod
    def quantize(self, x: Float[Array, "*slots D"]) -> tuple[Array, Array]:
        """Returns (stored numbers [..., n], scales [...] or [..., groups])."""

    @abc.abstractmethod
    def dequantize(self, values: Array, scales: Array, dtype: Any) -> Float[Array, "*slots D"]:
        """Returns the vectors that stored ones stand for."""

    def rotate(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        """Returns vectors in the frame of what is stored, or those of that frame in their own."""
        return x
