"""Keys and values in 8 bits.

8 bits are float8 (e4m3) numbers and one scale per slot:

    scale = 2^k, the smallest with max_d |x_d| <= 448 scale        x ~ scale * e4m3(x / scale)

448 is the largest e4m3 number. A floating-point format gains no precision from a scale that fills
its range exactly, so the scale is a power of two: the dequantized x' is exact in bfloat16, and
quantizing x' again gives x'. With three bits of mantissa the error is at most 1/16 of a number, and
2^-10 scale near zero. A dtype's largest numbers, which would be rounded beyond it (65504 to 65536),
become the largest number with 4 significant bits (61440).

The error of a key grows with its length, and biases make keys long: in the first layer of
Qwen2.5-Coder-1.5B they reach 354. But a constant that is subtracted from all keys of a head changes
none of its softmax weights (SageAttention, arXiv 2410.02367). So keys are stored without a center
(`Transformer.key_centers`): their biases, rotated as on average over the first positions, in the
planes that hardly turn. There lie the longest biases of that model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.errors import ConfigError

FLOAT8 = jnp.float8_e4m3fn
_LARGEST = 448.0  # 0.875 * 2^9
_LEAST_EXPONENT = -120  # scales stay normal float32 numbers


KV_DTYPES = ("float8_e4m3",)


def quantize(x: Float[Array, "*slots D"]) -> tuple[Float[Array, "*slots D"], Array]:
    """Returns (e4m3 numbers, float32 scale of each slot)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # The largest number of x's dtype with the significant bits of an e4m3 number.
    largest = 1.875 * 2.0 ** (jnp.finfo(x.dtype).maxexp - 1)
    wide = jnp.where(jnp.isinf(wide), wide, jnp.clip(wide, -largest, largest))
    mantissa, exponent = jnp.frexp(jnp.abs(wide).max(-1))  # mantissa in [1/2, 1)
    exponent = exponent - 9 + (mantissa > _LARGEST / 2**9)
    scales = jnp.ldexp(jnp.ones((), jnp.float32), jnp.maximum(exponent, _LEAST_EXPONENT))
    return (wide / scales[..., None]).astype(FLOAT8), scales


def dequantize(
    values: Float[Array, "*slots D"], scales: Float[Array, "*slots"], dtype: Any
) -> Float[Array, "*slots D"]:
    """Returns the dequantized numbers of slots."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (values.astype(wide) * scales[..., None].astype(wide)).astype(dtype)


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Raises ConfigError unless the cache supports the dtype; None is the model's own."""
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype must be None (the model's own) or {' or '.join(map(repr, KV_DTYPES))}, got "
            f"{kv_dtype!r:.80}."
        )


def stored_vector(head_dim: int, dtype: Any, kv_dtype: str | None) -> tuple[Any, Any]:
    """Returns the shapes and dtypes of a stored key or value, and of its scale if it has one.

    Raises:
      ConfigError: see `check_kv_dtype`.
    """
    check_kv_dtype(kv_dtype)
    vector = jax.ShapeDtypeStruct((head_dim,), dtype)
    return (vector, None) if kv_dtype is None else jax.eval_shape(quantize, vector)
