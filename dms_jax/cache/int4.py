"""Keys and values in 4 bits: integers with a scale for each group of numbers, after a rotation.

    y = H x                              H: Hadamard matrix over sqrt(its size), H H = 1
    s = bf16(-e / 8)                     e: the number of largest magnitude in its group of y
    y ~ s c,  c = round(y / s), -8 to 7

The sign of the scale puts the extreme number of a group at -8, so that all 16 integers are used.
The error is at most |s| / 2, or |s| (1 + 2^-5) if a number of the other sign exceeds 7.5 |s|. A
rotated number may be sqrt(D) times the largest one; it is clipped to bfloat16's maximum (3.4e38),
so that s c is finite in float32. Infinities and NaN in x are read as NaN.

A few dimensions of keys are far larger than the others, and would use up the range of their group.
The rotation spreads them over the vector, whose numbers are then nearly Gaussian (QuaRot,
arXiv:2404.00456; HIGGS, arXiv:2411.17525). It does not change attention: q.k = (H q).(H k), and the
weighted sum of values is H times the sum of rotated values. So keys and values stay rotated in the
cache, and a step rotates its queries and rotates its outputs back.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dms_jax.cache.format import Format, within
from pallas_kernels.four_bits import pack, scaled

_LEAST_SCALE = 2.0**-120  # scales stay normal numbers
_LARGEST_SCALE = float(jnp.finfo(jnp.bfloat16).max) / 8
# Sums of numbers above the first limit may overflow float32; such vectors are rotated in the second
# unit.
_LARGE, _UNIT = 2.0**96, 2.0**16


@dataclasses.dataclass(frozen=True)
class Int4(Format):
    """A cache of 4-bit integers.

    Attributes:
      group: numbers that share a scale; if it does not divide the head dim, their greatest common
        divisor. None for the whole vector of a head.
      rotated: whether vectors are rotated before they are quantized.
    """

    group: int | None = 32
    rotated: bool = True

    def quantize(self, x: Float[Array, "*slots D"]) -> tuple[Array, Array]:
        """Returns (packed integers [..., D / 2], bfloat16 scales [..., D / group])."""
        head_dim = x.shape[-1]
        wide, unit = self._turn_in_units(x)
        size = head_dim if self.group is None else math.gcd(self.group, head_dim)
        groups = wide.reshape(*x.shape[:-1], -1, size)
        low, high = groups.min(-1), groups.max(-1)
        extreme = jnp.where(-low >= high, low, high)
        largest = _LARGEST_SCALE / unit
        scales = jnp.clip(extreme / -8, -largest, largest) * unit
        scales = jnp.where(jnp.isinf(extreme), extreme, scales)
        least = jnp.where(extreme > 0, -_LEAST_SCALE, _LEAST_SCALE)
        scales = jnp.where(jnp.abs(scales) < _LEAST_SCALE, least, scales)
        scales = scales.astype(jnp.float32).astype(jnp.bfloat16)
        codes = jnp.round(groups / scales[..., None].astype(wide.dtype) * unit[..., None])
        return pack(jnp.clip(codes, -8, 7).astype(jnp.int8).reshape(x.shape)), scales

    def dequantize(self, values: Array, scales: Array, dtype: Any) -> Float[Array, "*slots D"]:
        """Returns the dequantized numbers of slots, rotated back."""
        wide = scaled(values, scales, jnp.promote_types(dtype, jnp.float32))
        return self.rotate_back(wide, dtype)

    def rotate(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        """Rotates vectors into the frame of the pages.

        float16 becomes float32, because a rotated number may be sqrt(D) times the largest one. Such
        queries make attention compute in float32, which the equally large keys and values need.
        """
        turned = self._turn(x)
        return turned if x.dtype == jnp.float16 else turned.astype(x.dtype)

    def rotate_back(self, x: Float[Array, "*slots D"], dtype: Any) -> Float[Array, "*slots D"]:
        """Rotates vectors in the frame of the pages back."""
        return within(self._turn(x), dtype)

    def _turn(self, x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
        """Returns rotated vectors, in at least float32; the rotation is its own inverse."""
        turned, unit = self._turn_in_units(x)
        return turned * unit

    def _turn_in_units(
        self, x: Float[Array, "*slots D"]
    ) -> tuple[Float[Array, "*slots D"], Float[Array, "*slots 1"]]:
        """Like `_turn`, in units of a power of two in which no sum overflows; returns them too."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        large = jnp.abs(x).max(-1, keepdims=True) > _LARGE
        unit = jnp.where(large, _UNIT, 1.0).astype(x.dtype)
        if not self.rotated:
            return x / unit, unit
        size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides D
        blocks = (x / unit).reshape(*x.shape[:-1], -1, size)
        matrix = hadamard(size).astype(x.dtype)
        turned = jnp.matmul(blocks, matrix, precision=jax.lax.Precision.HIGHEST)
        return turned.reshape(x.shape), unit


@functools.cache
def hadamard(size: int) -> Float[np.ndarray, "n n"]:
    """Returns the orthogonal, symmetric Hadamard matrix of a power of two."""
    index = np.arange(size)
    ones = np.bitwise_count(index[:, None] & index) & 1
    return (1 - 2.0 * ones) / math.sqrt(size)
