"""Counter-based random numbers for tokens.

A number is a hash of (seed, layer, KV head, position), so it is the same in a prompt, in a decode
step, after preemption, in any batch and on any mesh.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def row_hashes(
    seed: int | UInt32[Array, ""], layer: Int[Array, ""], num_kv_heads: int
) -> UInt32[Array, "1 K 1"]:
    """Returns 32 bits for each KV head of a layer."""
    heads = jnp.arange(num_kv_heads, dtype=jnp.uint32)[None, :, None]
    return mix(mix(jnp.uint32(seed) ^ mix(layer.astype(jnp.uint32) + 1)) + heads)


def token_uniforms(
    rows: UInt32[Array, "1 K 1"], positions: Int[Array, "B T"]
) -> Float[Array, "B K T"]:
    """Returns a number in [0, 1) for each token of each row."""
    return uniform(mix(rows + mix(positions.astype(jnp.uint32)[:, None, :])))


def mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns a bijective integer hash with good avalanche (two multiply-xorshift rounds)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns hash bits as numbers in [0, 1)."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
