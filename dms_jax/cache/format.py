"""Formats that store a pool's vectors in fewer bits."""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


class Format(abc.ABC):
    """A way to store keys and values: numbers and their scales.

    Formats are frozen dataclasses; a pool's format is a static field.
    """

    @abc.abstractmethod
    def quantize(self, x: Float[Array, "*slots D"]) -> tuple[Array, Array]:
        """Returns (stored numbers [..., n], scales [...] or [..., groups])."""

    @abc.abstractmethod
    def dequantize(self, values: Array, scales: Array, dtype: Any) -> Float[Array, "*slots D"]:
        """Returns the vectors, dequantized."""

    def rotate(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        """Rotates vectors into the frame of stored ones, in a dtype with enough range."""
        return x

    def rotate_back(self, x: Float[Array, "*slots D"], dtype: Any) -> Float[Array, "*slots D"]:
        """Rotates vectors in that frame back."""
        return x.astype(dtype)


def within(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Casts numbers to a dtype, clipped to its largest.

    Quantization may round beyond it: 65504 becomes 66000 in 4 bits, which is infinite in float16.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)
