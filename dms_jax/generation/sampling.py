"""Choosing the next token: temperature, top-k, top-p, min-p, and seeds that ignore the batch."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dms_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Filter:
    """The part of `Sampling` that shapes the distribution; static in compiled code."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when generation ends.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this.
      min_p: keep tokens at least this many times as likely as the most likely one.
      max_new_tokens: per request; the model's positions end it earlier.
      stop: strings that end a request; they are cut off the text.
      seed: one for all requests, or one each. The draws of a request depend on its seed, its
        positions, and on how many equal prompts stand before it in the call (so that copies of a
        prompt become different chains), not on what else is in the batch.
      logprobs: return the model's log-probability of each new token (before temperature and
        filters).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: Sequence[str] | str = ()
    seed: int | Sequence[int] = 0
    logprobs: bool = False

    def __post_init__(self):
        checks = (
            (self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature),
            (self.top_k >= 0, "top_k", "0 (all) or more", self.top_k),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p),
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens),
        )
        for holds, name, wanted, value in checks:
            if not holds:
                raise ConfigError(f"Sampling: {name} must be {wanted}, got {value}.")
        if not all(self.stop_strings):
            raise ConfigError("Sampling: a stop string must not be empty.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whether one or several were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def filter(self) -> Filter:
        """The static part."""
        return Filter(self.temperature, self.top_k, self.top_p, self.min_p)

    def seed_of(self, index: int) -> int:
        """The seed of a request."""
        return self.seed if isinstance(self.seed, int) else self.seed[index]


def sample(
    logits: Float[Array, "B V"],
    keys: PRNGKeyArray,
    positions: Int[Array, " B"],
    rule: Filter,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token a row.

    Args:
      logits: of the next token.
      keys: [B], one key per request.
      positions: of the token being drawn; each position has its own draw.
      rule: the filter.

    Returns:
      (tokens, their log-probability under the unfiltered distribution).
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if rule.temperature == 0:
        tokens = jnp.argmax(logits, -1)
    else:
        filtered = filter_logits(logits / rule.temperature, rule)
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        tokens = jax.vmap(jax.random.categorical)(keys, filtered)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return tokens.astype(jnp.int32), logprobs


def filter_logits(logits: Float[Array, "B V"], rule: Filter) -> Float[Array, "B V"]:
    """Sets the logits of excluded tokens to -inf: top-k, then top-p, then min-p."""
    if 0 < rule.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, rule.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if rule.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not reach top_p yet; the first always does.
        before = jnp.cumsum(probabilities, -1) - probabilities
        last = jnp.sum(before < rule.top_p, -1, keepdims=True) - 1
        smallest = jnp.take_along_axis(ordered, last, axis=-1)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if rule.min_p > 0:
        floor = logits.max(-1, keepdims=True) + jnp.log(rule.min_p)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return logits
