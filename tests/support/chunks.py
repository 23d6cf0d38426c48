"""Chunks of tokens as a model passes them to a policy; unused fields are empty."""

from typing import Any

import jax
import jax.numpy as jnp

from dms_jax.policies.values import CacheShape, Chunk, Decisions, Observation, Static, Tokens

# Without jit every small operation is a separate program.
write = jax.jit(lambda policy, state, chunk: policy.write(state, chunk))


@jax.jit
def read(policy, state, q, chunk, placement):
    """Returns the page table and the lengths that a query reads."""
    reading = policy.read(state, q, chunk, placement)
    return reading.page_table, reading.lengths


def tokens_of(k, *, q=None, v=None, positions=None, layer=0, adapter_logits=None) -> Tokens:
    """Returns the tokens of one layer; queries and values equal the keys if not given."""
    k = jnp.asarray(k)
    batch, num_tokens = k.shape[:2]
    positions = jnp.arange(num_tokens) if positions is None else jnp.asarray(positions)
    return Tokens(
        q=k if q is None else jnp.asarray(q),
        k=k,
        v=k if v is None else jnp.asarray(v),
        positions=jnp.broadcast_to(positions.astype(jnp.int32), (batch, num_tokens)),
        layer=jnp.asarray(layer),
        adapter_logits=adapter_logits,
    )


def chunk_of(
    tokens: Tokens | Any,
    *,
    decisions: Decisions | None = None,
    count=None,
    page_table=None,
    lengths=None,
    max_lengths=None,
    **static: Any,
) -> Chunk:
    """Returns a chunk of tokens, or of keys; rows are empty and have one page by default."""
    if not isinstance(tokens, Tokens):
        tokens = tokens_of(tokens)
    batch, num_tokens, num_kv_heads, head_dim = tokens.k.shape
    rows = batch, num_kv_heads
    angles = jnp.zeros((batch, num_tokens, head_dim // 2))
    return Chunk(
        tokens=tokens,
        decisions=Decisions() if decisions is None else decisions,
        rotation=(angles + 1, angles),
        count=jnp.asarray([num_tokens] * batch if count is None else count, jnp.int32),
        page_table=jnp.asarray(jnp.zeros((*rows, 1)) if page_table is None else page_table).astype(
            jnp.int32
        ),
        lengths=jnp.asarray(jnp.zeros(rows) if lengths is None else lengths).astype(jnp.int32),
        max_lengths=None if max_lengths is None else jnp.asarray(max_lengths, jnp.int32),
        static=Static(**static),
    )


def state_of(policy, num_sequences, num_kv_heads, head_dim, dtype=jnp.float32, **rest):
    """Returns a policy's state for empty rows and pages."""
    shape = CacheShape(num_sequences, num_kv_heads, head_dim, jnp.dtype(dtype), **rest)
    return policy.init_state(shape)


def observed(weights=None, *, q=None, rows=None) -> Observation:
    """Returns an observation of attention with the given weights, queries and rows."""
    q = jnp.zeros((1, 1, 1, 2)) if q is None else q
    return Observation(q=q, weights=weights, rows=lambda: rows)
