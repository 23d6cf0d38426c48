"""Dynamic Memory Compression (Nawrot et al., arXiv 2403.09636).

Each token either opens a new slot or is merged into the last one:

    alpha_t = 1[k_t[n] - c > 0],   c = 5                              (inference, algorithm 1)
    alpha_t = sigmoid((k_t[n] - c + g1 - g2) / tau),   g ~ Gumbel     (training, eq. 8)
    omega_t = sigmoid(mean_g q_t[n] + c) + epsilon
    z_t   = alpha_t z_{t-1} + omega_t
    k~_t  = (alpha_t z_{t-1} k~_{t-1} + omega_t k_t) / z_t            (eq. 9; v alike)
    score(i, j) += log(1 - alpha_{j+1})   for i > j                   (training, appendix F)

The decision is read from one neuron of the key, the importance from the same neuron of the group's
queries. Neither takes part in attention (both are zeroed before and after rotation). `merging`
computes the sums: accumulation at inference, partial accumulation in training.

Of the paper's ablations (appendix E), `per="layer"` is DMC-HardC and `importance="uniform"` is
uniform weighting; `FixedPooling` averages a fixed number of tokens.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.checks import Count, NotNegative, Positive, Traced
from dms_jax.policies.merging import Merging, partial_means
from dms_jax.policies.relaxation import log_keep, noisy_logits, straight_through
from dms_jax.policies.values import Chunk, Decisions, Relaxed, Retrofit, Tokens


@dataclasses.dataclass(frozen=True)
class DMC(Merging):
    """Learned merging of neighbouring tokens.

    Attributes:
      window: number of most recent tokens in the mean of a segment, in training and at inference,
        as in the released code; None for all tokens, as in the paper's algorithm 1.
      neuron: the borrowed dimension of keys and queries: the first in the paper, the last in the
        released code. The cost of losing it depends on the model: try both.
      per: whether each KV head decides, or the layer as a whole (DMC-HardC). The paper does not say
        how heads share a decision; here their neurons are averaged.
      importance: whether importance is read from the queries, or is the same for all tokens.
      offset: constant c of the decision (k[n] - c) and of the importance (q[n] + c).
      epsilon: constant added to the importance, as in the released code (bfloat16's epsilon).
      temperature: tau of the relaxation.
    """

    window: Annotated[Count | None, "give None to merge without one"] = 12
    neuron: Literal["first", "last"] = "last"
    per: Literal["head", "layer"] = "head"
    importance: Literal["learned", "uniform"] = "learned"
    offset: Annotated[float, Traced(float)] = 5.0
    epsilon: Annotated[NotNegative, Traced(float)] = 2.0**-7
    temperature: Annotated[Positive, Traced(float)] = 0.1

    @property
    def retrofit(self) -> Retrofit:
        """The borrowed neuron, the granularity of decisions, and the weighting of tokens."""
        return Retrofit(
            possible=True,
            decisions=f"DMC(neuron={self.neuron!r}, per={self.per!r}, "
            f"importance={self.importance!r})",
            borrowed_neurons=f"{self.neuron} dimension of every query and key",
        )

    @property
    def merge_window(self) -> int | None:
        """See `Merging.merge_window`: the policy's window."""
        return self.window

    @property
    def _index(self) -> int:
        return 0 if self.neuron == "first" else -1

    def decide(self, tokens: Tokens) -> Decisions:
        """Returns each token's decision (append or merge) and its importance.

        The first token of a sequence is always appended.
        """
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

    def borrowed(self, group: int, head_dim: int):
        """See `Policy.borrowed`: one dimension of every query and key."""
        return tuple((head, self._index % head_dim) for head in range(group + 1))

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Returns partially merged keys and values, and each key's bias: the next log(1 - alpha).

        The first token of a document is never merged, regardless of its logit, and does not count
        as compressed.
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
