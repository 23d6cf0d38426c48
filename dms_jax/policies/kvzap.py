"""KVzap (Jegou and Jeblick, arXiv 2601.07891): a scorer predicts a token's importance.

    log s_j = 10 scorer(x_j) - 6     d_j = 1[log s_j < threshold]
    key j is visible to query i  iff  i - j <= window  or  d_j = 0  or  j < sinks

The factor and the constant are our choice: with them Adam reaches the level of the scores in a few
steps. The scorer reads the residual stream like DMS's adapter: one linear map per layer, or two
layers with GELU between them. It is regressed (squared error) on the logarithm of the importance
from attention (`importance.py`, "max"), while the model is frozen and nothing is evicted. The
threshold sets the number of kept tokens, which differs between heads, as with DMS, and one training
serves every ratio. `dms_jax.calibrate` finds the threshold that keeps a given share of the tokens
of held-out text.

Differences from the publication: KVzip+ uses the attention of all queries of a repetition of the
text, here the text's own queries beyond the window (`importance.py`). The publication trains
outside the model, on sampled tokens. `sinks` are our addition. Our scorer has its own RMS norm and
the tanh form of GELU; the publication's reads the hidden states after the layer's norm, with the
exact GELU. Its checkpoints cannot be loaded.

The first tokens (sinks) are always kept. They get much attention although their values are tiny, so
their importance, weight times norm of the value, is low; but a model that loses them writes
nonsense. They are excluded from training too.

In training under its own decisions, which the publication does not have, the relaxation is DMS's
with the logit `threshold - log s_j`.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dms_jax.checks import Number, Positive, Traced, Whole
from dms_jax.policies.budget import Sinks
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.importance import LEVEL, SINKS, predicted
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

NEVER = -1e30  # logit of tokens that are never evicted


@dataclasses.dataclass(frozen=True)
class KVzap(DelayedEviction):
    """Evicts the tokens beyond the window whose predicted importance is below a threshold.

    Attributes:
      window: distance up to which every key stays visible to queries.
      threshold: smallest log-importance of a token that is kept.
      hidden: hidden units of the scorer; 0 for a linear one.
      temperature: tau of the relaxation.
      sinks: number of first tokens that are never evicted.
    """

    window: Whole = 128
    threshold: Annotated[Number, Traced(float)] = LEVEL
    hidden: Whole = 64
    temperature: Annotated[Positive, Traced(float)] = 0.1
    sinks: Sinks = SINKS

    @property
    def retrofit(self) -> Retrofit:
        """The scorer. Window, threshold and sinks may change after training."""
        return Retrofit(
            possible=True,
            decisions=f"KVzap(hidden={self.hidden})",
            adapter=AdapterShape(hidden=self.hidden, bias=True),
            supervision=FutureAttention(self.window, sinks=self.sinks),
        )

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`: the policy's window."""
        return self.window

    @property
    def always_kept(self) -> int:
        """See `DelayedEviction.always_kept`: the sinks too."""
        return self.window + 1 + self.sinks

    def decide(self, tokens: Tokens) -> Decisions:
        """Returns the logits, threshold - log s, and the decisions: above 0 and not of a sink."""
        assert tokens.adapter_logits is not None
        logits = self.threshold - predicted(tokens.adapter_logits)
        return Decisions(logits=logits, marks=(logits > 0) & self._evictable(tokens))

    def predictions(self, decisions: Decisions) -> Float[Array, "B K T"]:
        """Returns the predicted logarithm of the importance of each key."""
        assert decisions.logits is not None
        return self.threshold - decisions.logits

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Returns each key's bias, log(1 - alpha)."""
        assert chunk.decisions.logits is not None
        noisy = noisy_logits(chunk.decisions.logits, noise, self.temperature)
        noisy = jnp.where(self._evictable(chunk.tokens), noisy, NEVER)
        return Relaxed(
            k=chunk.tokens.k,
            v=chunk.tokens.v,
            bias=log_keep(noisy),
            decisions=straight_through(noisy),
        )

    def _evictable(self, tokens: Tokens) -> Bool[Array, "B 1 T"]:
        """Returns which tokens are not sinks."""
        return (tokens.positions >= self.sinks)[:, None]
