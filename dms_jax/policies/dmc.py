"""Dynamic Memory Compression (Nawrot et al., arXiv 2403.09636), at inference.

Each token either opens a new slot or is merged into the last one (Algorithm 1):

    alpha_t = 1[k_t[n] - 5 > 0]     omega_t = sigmoid(mean_g q_t[n] + 5) + epsilon
    z_t   = alpha_t z_{t-1} + omega_t
    k~_t  = (alpha_t z_{t-1} k~_{t-1} + omega_t k_t) / z_t          (eq. 9; v alike)

The decision comes from a neuron of the key, the importance from the same neuron of the queries of
the group; both neurons take no part in attention (zeroed before and after rotation). Keys are
merged before rotation, and the merged key is rotated to the position of the newest token, so a
merge rewrites its slot.

On this spine a merge is an eviction with window 0: the previous token's slot is taken by the
newcomer, which carries the weighted mean of the whole segment.
"""

import dataclasses
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dms_jax.policies.base import (
    Chunk,
    Decisions,
    PolicyState,
    Projections,
    hard_marks,
    is_finite,
    require,
)
from dms_jax.policies.delayed_eviction import DelayedEviction, Ring


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class MergeState:
    """A row's ring (of one token) and the running sums of its open segment, unrotated."""

    ring: Ring
    sums: Float[Array, "*rows sums"]  # sum of omega * (k, v), then of omega: 2 D + 1 numbers


@dataclasses.dataclass(frozen=True)
class DMC(DelayedEviction):
    """Learned merging of neighbouring tokens.

    Attributes:
      neuron: the borrowed dimension of keys and queries; the paper says the first, the released
        code takes the last.
      offset: constant c of the decision (k[n] - c) and of the importance (q[n] + c).
      epsilon: added to the importance, as in the released code (that of bfloat16).
    """

    neuron: Literal["first", "last"] = "last"
    offset: float = 5.0
    epsilon: float = 2.0**-7

    learned = True

    def __post_init__(self):
        require(
            self.neuron in ("first", "last"),
            f"DMC: neuron must be 'first' or 'last', got {self.neuron!r}.",
        )
        require(
            is_finite(self.offset), f"DMC: offset must be a finite number, got {self.offset!r}."
        )
        require(
            is_finite(self.epsilon) and self.epsilon >= 0,
            f"DMC: epsilon must be a finite number >= 0, got {self.epsilon!r}.",
        )

    @property
    def borrowed_neurons(self) -> str:
        """One dimension of every query and key."""
        return f"{self.neuron} dimension of every query and key"

    @property
    def mark_shift(self) -> int:
        """A merging token takes the slot of the one before it."""
        return 1

    @property
    def _index(self) -> int:
        return 0 if self.neuron == "first" else -1

    def decide(self, projections: Projections) -> Decisions:
        """Append or accumulate, and the token's importance; the first token appends."""
        k, q = projections.k[..., self._index], projections.q[..., self._index]
        wide = jnp.promote_types(k.dtype, jnp.float32)
        q = q.astype(wide).reshape(*k.shape, -1).mean(-1)
        logits = jnp.swapaxes(k.astype(wide), 1, 2) - self.offset
        return Decisions(
            logits=logits,
            marks=(logits > 0) & (projections.positions > 0)[:, None],
            importance=jnp.swapaxes(jax.nn.sigmoid(q + self.offset), 1, 2) + self.epsilon,
        )

    def clear_borrowed(self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale=0.0):
        """Scales the borrowed neuron of every query and key."""
        index = self._index
        return (
            q.at[..., index].multiply(jnp.asarray(scale, q.dtype)),
            k.at[..., index].multiply(jnp.asarray(scale, k.dtype)),
        )

    def init_rows(self, num_sequences, num_kv_heads, head_dim, dtype) -> MergeState:
        """Returns empty sums; accumulated in at least float32."""
        wide = jnp.promote_types(dtype, jnp.float32)
        return MergeState(
            ring=super().init_rows(num_sequences, num_kv_heads, head_dim, dtype),
            sums=jnp.zeros((num_sequences, num_kv_heads, 2 * head_dim + 1), wide),
        )

    def transform(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Replaces keys and values by the running means of their segments."""
        rows: MergeState = state.rows
        wide, head_dim = rows.sums.dtype, chunk.k.shape[-1]
        assert chunk.decisions.importance is not None
        omega = jnp.swapaxes(chunk.decisions.importance, 1, 2)[..., None].astype(wide)  # [B,T,K,1]
        alpha = jnp.swapaxes(hard_marks(chunk.decisions), 1, 2)[..., None]
        new = jnp.concatenate([chunk.k.astype(wide), chunk.v.astype(wide)], -1) * omega
        new = jnp.concatenate([new, omega], -1)
        # s_t = alpha_t s_{t-1} + new_t, a linear recurrence: associative over (alpha, s).
        new = new.at[:, 0].add(jnp.where(alpha[:, 0], rows.sums, 0))
        _, sums = jax.lax.associative_scan(
            lambda a, b: (a[0] & b[0], jnp.where(b[0], a[1], 0) + b[1]), (alpha, new), axis=1
        )
        mean = sums[..., :-1] / sums[..., -1:]
        k = jnp.where(alpha, mean[..., :head_dim].astype(chunk.k.dtype), chunk.k)
        v = jnp.where(alpha, mean[..., head_dim:].astype(chunk.v.dtype), chunk.v)
        last = jnp.maximum(chunk.count - 1, 0)[:, None, None, None]
        end = jnp.take_along_axis(sums, last, axis=1)[:, 0]
        end = jnp.where((chunk.count > 0)[:, None, None], end, rows.sums)
        return dataclasses.replace(
            state, rows=dataclasses.replace(rows, sums=end)
        ), dataclasses.replace(chunk, k=k, v=v)

    def ring_of(self, rows: MergeState) -> Ring:
        """The ring beside the sums."""
        return rows.ring

    def with_ring(self, rows: MergeState, ring: Ring) -> MergeState:
        """The same sums, another ring."""
        return dataclasses.replace(rows, ring=ring)
