"""Dynamic Memory Compression (Nawrot et al., arXiv 2403.09636).

Each token either opens a new slot or is merged into the last one:

    alpha_t = 1[k_t[n] - c > 0],   c = 5                              (inference, algorithm 1)
    alpha_t = sigmoid((k_t[n] - c + g1 - g2) / tau),   g ~ Gumbel     (training, eq. 8)
    omega_t = sigmoid(mean_g q_t[n] + c) + epsilon
    z_t   = alpha_t z_{t-1} + omega_t
    k~_t  = (alpha_t z_{t-1} k~_{t-1} + omega_t k_t) / z_t            (eq. 9; v alike)
    score(i, j) += log(1 - alpha_{j+1})   for i > j                   (training, appendix F)

The decision comes from a neuron of the key, the importance from the same neuron of the queries of
the group; both neurons take no part in attention (zeroed before and after rotation). `merging` has
the sums.

Of the paper's ablations (appendix E), `per="layer"` is DMC-HardC and `importance="uniform"` uniform
weighting; averaging a fixed number of tokens is `FixedPooling`; DMC-C, the local prior and
DMC-immediate are matters of the recipe (`dms_jax.recipes.dmc_paper`).
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.checks import Count, NotNegative, Positive
from dms_jax.policies.merging import Merging, partial_means
from dms_jax.policies.relaxation import log_keep, noisy_logits, straight_through
from dms_jax.policies.values import Chunk, Decisions, Relaxed, Retrofit, Tokens


@dataclasses.dataclass(frozen=True)
class DMC(Merging):
    """Learned merging of neighbouring tokens.

    Attributes:
      window: the last tokens of a segment that count in its mean, in training and at inference
        alike, as in the released code; None for all of them, as in the paper's algorithm 1.
      neuron: the borrowed dimension of keys and queries; the paper says the first, the released
        code takes the last. What its loss costs depends on the model: try both.
      per: every KV head decides for itself, or the layer as one (DMC-HardC). How the paper's
        heads share is not said; ours take the mean of their neurons.
      importance: read from the queries, or the same for all tokens.
      offset: constant c of the decision (k[n] - c) and of the importance (q[n] + c).
      epsilon: added to the importance, as in the released code (that of bfloat16).
      temperature: tau of the relaxation.
    """

    window: Annotated[Count | None, "give None to merge without one"] = 12
    neuron: Literal["first", "last"] = "last"
    per: Literal["head", "layer"] = "head"
    importance: Literal["learned", "uniform"] = "learned"
    offset: float = 5.0
    epsilon: NotNegative = 2.0**-7
    temperature: Positive = 0.1

    @property
    def retrofit(self) -> Retrofit:
        """The borrowed neuron, and how it is read and tokens are weighted."""
        return Retrofit(
            possible=True,
            decisions=f"DMC(neuron={self.neuron!r}, per={self.per!r}, "
            f"importance={self.importance!r})",
            borrowed_neurons=f"{self.neuron} dimension of every query and key",
        )

    @property
    def merge_window(self) -> int | None:
        """The window."""
        return self.window

    @property
    def _index(self) -> int:
        return 0 if self.neuron == "first" else -1

    def decide(self, tokens: Tokens) -> Decisions:
        """Append or accumulate, and the token's importance; the first token appends."""
        k, q = tokens.k[..., self._index], tokens.q[..., self._index]
        wide = jnp.promote_types(k.dtype, jnp.float32)
        k, q = k.astype(wide), q.astype(wide).reshape(*k.shape, -1).mean(-1)  # [B, T, K]
        if self.per == "layer":
            k, q = (jnp.broadcast_to(x.mean(-1, keepdims=True), x.shape) for x in (k, q))
        logits = jnp.swapaxes(k, 1, 2) - self.offset
        if self.importance == "uniform":
            omega = jnp.ones_like(logits)
        else:
            omega = jnp.swapaxes(jax.nn.sigmoid(q + self.offset), 1, 2) + self.epsilon
        return Decisions(
            logits=logits,
            marks=(logits > 0) & (tokens.positions > 0)[:, None],
            importance=omega,
        )

    def clear_borrowed(self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale=0.0):
        """Scales the borrowed neuron of every query and key."""
        index = self._index
        return (
            q.at[..., index].multiply(jnp.asarray(scale, q.dtype)),
            k.at[..., index].multiply(jnp.asarray(scale, k.dtype)),
        )

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Partly merged keys and values, and log(1 - alpha) of the next token as each key's bias.

        The first token of a document merges into nothing, whatever its neuron says, and does not
        count as compressed.
        """
        decisions = chunk.decisions
        assert decisions.logits is not None
        assert decisions.importance is not None
        first = (chunk.tokens.positions == 0)[:, None]
        if self.per == "layer":  # one decision, so one draw
            noise = jnp.broadcast_to(noise[:, :1], noise.shape)
        noisy = noisy_logits(decisions.logits, noise, self.temperature)
        alpha, numbers, keep = (
            jnp.where(first, 0, form(noisy))
            for form in (jax.nn.sigmoid, straight_through, log_keep)
        )
        k, v = partial_means(
            chunk.tokens.k, chunk.tokens.v, alpha, decisions.importance, self.window
        )
        bias = jnp.pad(keep[..., 1:], ((0, 0), (0, 0), (0, 1)))
        return Relaxed(k=k, v=v, bias=bias, decisions=numbers)
