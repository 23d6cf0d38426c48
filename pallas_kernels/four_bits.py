"""4-bit integers, two per byte: number i of D in the low half of byte i, i + D/2 in the high.

    byte[i] = (code[i] + 8) | (code[i + D/2] + 8) << 4          codes from -8 to 7

The halves of a vector share bytes, not neighbours, so unpacking is two masks and a concatenation.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

PACKED = jnp.dtype(jnp.uint8)


def pack(codes: Int[Array, "*slots D"]) -> UInt8[Array, "*slots half"]:
    """Packs integers from -8 to 7, two per byte; D is even."""
    low, high = jnp.split((codes + 8).astype(PACKED), 2, axis=-1)
    return low | high << 4


def unpack(packed: UInt8[Array, "*slots half"]) -> Int[Array, "*slots D"]:
    """Returns the integers of packed bytes, from -8 to 7."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.int8) - 8


def scaled(
    packed: UInt8[Array, "*slots half"], scales: Float[Array, "*slots groups"], dtype
) -> Float[Array, "*slots D"]:
    """Returns codes times the scale of their group; a group is D / groups numbers in a row."""
    codes = unpack(packed)
    by_group = codes.reshape(*scales.shape, -1).astype(dtype)
    return (by_group * scales[..., None].astype(dtype)).reshape(codes.shape)
