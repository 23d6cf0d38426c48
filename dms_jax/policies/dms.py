"""Dynamic Memory Sparsification (Lancucki et al., arXiv 2506.05345).

A pretrained model learns, per KV head and token, whether to evict the token once it has left a
window of recent tokens:

    a_t = raw_t * alpha_scale - alpha_offset,   d_t = 1[a_t > 0]                     (inference)
    alpha_t = sigmoid((a_t + g1 - g2) / tau),   g1, g2 ~ Gumbel(0, 1)       (training, eq. 1)
    score(i, j) += log(1 - alpha_{j + shift})   for i - j > window          (training, M_alpha)

    key j is visible to query i  iff  i - j <= window  or  d_{j + shift} = 0        (inference)

`raw` is read from a borrowed query neuron (the last dimension of the first query head of each
group, after the q-norm and before rotation; the neuron is zeroed before and after rotation, so
that it takes no part in attention) or from an adapter on the residual stream. The defaults are
those of NVIDIA's released code and checkpoints, where the next token decides about a token (shift
1); in the paper's text a token decides about itself (shift 0).

At inference the decision may also be sampled, d_t ~ Bernoulli(sigmoid(a_t)), as in training, where
P(alpha_t > 1/2) = sigmoid(a_t) for any tau.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dms_jax.checks import Positive, Seed, Traced, Whole, require
from dms_jax.policies import draws
from dms_jax.policies.delayed_eviction import DelayedEviction, shift_left
from dms_jax.policies.importance import SINKS
from dms_jax.policies.relaxation import log_keep, noisy_logits, straight_through
from dms_jax.policies.values import (
    AdapterShape,
    Chunk,
    Decisions,
    FutureAttention,
    Relaxed,
    Retrofit,
    Tokens,
)


@dataclasses.dataclass(frozen=True)
class DMS(DelayedEviction):
    """Learned delayed eviction.

    Attributes:
      window: distance up to which a marked key stays visible to queries.
      source: whether the logit is read from a borrowed query neuron or from an adapter.
      shift: token t + shift decides about key t. 1 as in the released code, 0 as in the paper's
        text; `shift=window` decides when the key leaves the window ("immediate", Table 6).
      per: whether each KV head decides, or head 0 for the whole layer.
      alpha_scale, alpha_offset: logit = raw * alpha_scale - alpha_offset.
      temperature: tau of the relaxation.
      decisions: whether inference takes the sign of the logit, or samples with its probability.
      seed: random seed of the samples, which otherwise depend on layer, KV head and position only.
    """

    window: Whole = 512
    source: Literal["query_neuron", "adapter"] = "query_neuron"
    shift: Whole = 1
    per: Literal["head", "layer"] = "head"
    alpha_scale: Annotated[float, Traced(float)] = 100.0
    alpha_offset: Annotated[float, Traced(float)] = 5.0
    temperature: Annotated[Positive, Traced(float)] = 0.1
    decisions: Literal["threshold", "bernoulli"] = "threshold"
    seed: Annotated[Seed, Traced(np.uint32)] = 0

    def __post_init__(self):
        super().__post_init__()
        require(
            self.shift <= self.window + 1,
            f"DMS: shift must lie between 0 and window + 1 = {self.window + 1}, got "
            f"{self.shift}: a later decision would come after the key has left the window.",
        )

    @property
    def retrofit(self) -> Retrofit:
        """The source, shift and granularity of the decisions.

        The borrowed neuron is the last dimension of the first query head of each group.
        """
        neuron = "last dimension of each group's first query head"
        return Retrofit(
            possible=True,
            decisions=f"DMS(source={self.source!r}, shift={self.shift}, per={self.per!r})",
            borrowed_neurons=None if self.source == "adapter" else neuron,
            adapter=AdapterShape() if self.source == "adapter" else None,
            supervision=FutureAttention(self.window, "least_important", sinks=SINKS)
            if self.source == "adapter"
            else None,
        )

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`: the policy's window."""
        return self.window

    @property
    def mark_shift(self) -> int:
        """See `DelayedEviction.mark_shift`: the policy's shift."""
        return self.shift

    def decide(self, tokens: Tokens) -> Decisions:
        """Returns the logits a_t in at least float32, and the decisions (strictly above 0)."""
        if self.source == "adapter":
            assert tokens.adapter_logits is not None
            raw = tokens.adapter_logits
        else:
            group = tokens.q.shape[2] // tokens.k.shape[2]
            raw = jnp.swapaxes(tokens.q[:, :, ::group, -1], 1, 2)
        raw = raw.astype(jnp.promote_types(raw.dtype, jnp.float32))
        if self.per == "layer":
            raw = jnp.broadcast_to(raw[:, :1], raw.shape)
        logits = raw * self.alpha_scale - self.alpha_offset
        if self.decisions == "threshold":
            return Decisions(logits=logits, marks=logits > 0)
        rows = draws.row_hashes(self.seed, tokens.layer, raw.shape[1])
        drawn = draws.token_uniforms(rows, tokens.positions)
        if self.per == "layer":
            drawn = drawn[:, :1]
        return Decisions(logits=logits, marks=drawn < jax.nn.sigmoid(logits))

    def predictions(self, decisions: Decisions) -> Float[Array, "B K T"]:
        """Returns the logit of each key's eviction, which may come from a later token."""
        assert decisions.logits is not None
        return shift_left(decisions.logits, self.shift)

    def borrowed(self, group: int, head_dim: int):
        """See `Policy.borrowed`: the last dimension of the first query head of each group."""
        return () if self.source == "adapter" else ((0, head_dim - 1),)

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Returns each key's bias: log(1 - alpha) of the token that decides about it."""
        assert chunk.decisions.logits is not None
        if self.per == "layer":  # one decision, so one noise sample
            noise = jnp.broadcast_to(noise[:, :1], noise.shape)
        noisy = noisy_logits(chunk.decisions.logits, noise, self.temperature)
        bias = shift_left(log_keep(noisy), self.shift)
        return Relaxed(
            k=chunk.tokens.k, v=chunk.tokens.v, bias=bias, decisions=straight_through(noisy)
        )
