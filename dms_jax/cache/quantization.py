"""Keys and values in 8 bits: float8 (e4m3) numbers and one scale per slot.

    scale = 2^k, the smallest with max_d |x_d| <= 448 scale        x ~ scale * e4m3(x / scale)

448 is the largest e4m3 number. A floating-point format gains no precision from a scale that fills
its range exactly, so the scale is a power of two: the dequantized x' is exact in bfloat16, and
quantizing x' again gives x'. With three bits of mantissa the error is at most 1/16 of a number, and
2^-10 scale near zero.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.errors import ConfigError

FLOAT8 = jnp.float8_e4m3fn
_LARGEST = 448.0  # 0.875 * 2^9
_LEAST_EXPONENT = -120  # scales stay normal float32 numbers

KV_DTYPES = {"float8_e4m3": FLOAT8}


def storage_dtype(kv_dtype: str | None, dtype: Any) -> Any:
    """Returns the dtype of the pool: the model's unless another is named.

    Raises:
      ConfigError: the cache does not support that dtype.
    """
    if kv_dtype is None:
        return jnp.dtype(dtype)
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype must be None (the model's own) or {' or '.join(map(repr, KV_DTYPES))}, got "
            f"{kv_dtype!r:.80}."
        )
    return jnp.dtype(KV_DTYPES[kv_dtype])


def is_quantized(dtype: Any) -> bool:
    """Whether a pool of this dtype has scales."""
    return jnp.dtype(dtype) == FLOAT8


def quantize(x: Float[Array, "*slots D"]) -> tuple[Float[Array, "*slots D"], Array]:
    """Returns (e4m3 numbers, float32 scale of each slot)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mantissa, exponent = jnp.frexp(jnp.abs(wide).max(-1))  # mantissa in [1/2, 1)
    exponent = exponent - 9 + (mantissa > _LARGEST / 2**9)
    scales = jnp.ldexp(jnp.ones((), jnp.float32), jnp.maximum(exponent, _LEAST_EXPONENT))
    return (wide / scales[..., None]).astype(FLOAT8), scales


def dequantize(
    values: Float[Array, "*slots D"], scales: Float[Array, "*slots"], dtype: Any
) -> Float[Array, "*slots D"]:
    """Returns the numbers that quantized slots stand for."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (values.astype(wide) * scales[..., None].astype(wide)).astype(dtype)


def fake_quantize(x: Float[Array, "*slots D"]) -> Float[Array, "*slots D"]:
    """Returns x quantized to 8 bits and dequantized again, in its own dtype."""
    return dequantize(*quantize(x), x.dtype)
