"""Choosing the next token: temperature, top-k, top-p, min-p, and seeds that ignore the batch.

The draws never depend on the batch. The logits that they are applied to do, by rounding: what is
summed in another order differs in the last bit, and where two next tokens are nearly as likely the
answer goes another way from there. Of 24 greedy answers of 64 tokens to prompts of random tokens,
this many were others in batches of 4 and 24 than one at a time (shipped models; answers to tasks
never were; `experiments/results/batch`, `experiments.reproduction.batch_dependence` measures it):

    CPU, float32 and float64                   0
    CPU, bfloat16, against two lanes           0 to 4 (9 to 12 where XLA may leave out roundings)
    CPU, bfloat16, against an engine of one    8 to 13: single rows are summed in another order
    H200, float32 (products in TF32)           2 to 3
    H200, bfloat16                             12 to 18
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Key

from dms_jax.checks import Count, Number, Options, Range, Seed, Share, Whole, show
from dms_jax.errors import ConfigError

# Below it a device may compute with zero, also where it multiplies by the inverse of a number.
_SMALLEST = float(np.finfo(np.float32).tiny)


class Switches(NamedTuple):
    """Which filters are on."""

    greedy: bool
    top_p: bool
    min_p: bool


@struct.dataclass
class Filter:
    """The part of `Sampling` that shapes the distribution, in numbers that float32 holds.

    Compiled code depends on which filters are on and on `top_k`; the other values are its data, so
    that another temperature compiles nothing.

    Attributes:
      temperature: a number of float32 whose inverse is one too, whatever was asked.
      top_k: see `Sampling`.
      top_p: see `Sampling`; off where float32 makes one of it.
      log_min_p: logarithm of `min_p`, which float32 holds where it does not hold `min_p`.
      switches: which filters are on.
    """

    temperature: Any
    top_p: Any
    log_min_p: Any
    top_k: int = struct.field(pytree_node=False)
    switches: Switches = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Sampling(Options):
    """How tokens are drawn and when generation ends.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this.
      min_p: keep tokens at least this many times as likely as the most likely one.
      max_new_tokens: per request; the model's positions end it earlier.
      stop: strings that end a request; they are cut off the text. Special tokens are no text; those
        that end a sequence are the checkpoint's (generation_config.json).
      seed: one for all requests, or one each. The draws of a request depend on its seed, its
        positions, and on how many equal prompts stand before it in the call (so that copies of a
        prompt become different chains), not on what else is in the batch. The answer can,
        by rounding, in bfloat16 and on a GPU: the module says how often.
      logprobs: return the model's log-probability of each new token (before temperature and
        filters).
    """

    temperature: Annotated[Number, Range(0), "0 is greedy"] = 1.0
    top_k: Whole = 0
    top_p: Annotated[Number, Range(0, 1, above=True)] = 1.0
    min_p: Share = 0.0
    max_new_tokens: Count = 256
    stop: Sequence[str] | str = ()
    seed: Seed | Sequence[Seed] = 0
    logprobs: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not all(self.stop_strings):
            raise ConfigError(f"Sampling: no text of stop may be empty, got {show(self.stop)}.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whether one or several were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def seeds(self, count: int) -> list[int]:
        """The seed of each of `count` requests.

        Raises:
          ConfigError: a list of seeds has another length.
        """
        if isinstance(self.seed, Sequence):
            if len(self.seed) != count:
                raise ConfigError(
                    f"Sampling: {len(self.seed)} seeds for {count} prompts; give one seed, or one "
                    "for each prompt."
                )
            return list(self.seed)
        return [self.seed] * count

    @property
    def filter(self) -> Filter:
        """What shapes the distribution."""
        temperature, top_p, min_p = map(float, (self.temperature, self.top_p, self.min_p))
        return Filter(
            temperature=min(max(temperature, _SMALLEST), 1 / _SMALLEST),
            top_p=top_p,
            log_min_p=math.log(min_p) if min_p > 0 else -math.inf,
            top_k=int(self.top_k),
            switches=Switches(
                greedy=temperature == 0,
                top_p=bool(np.float32(top_p) < 1),
                min_p=min_p > 0,
            ),
        )


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
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
    if rule.switches.greedy:
        tokens = jnp.argmax(logits, -1)
    else:
        # Relative to the largest, so that no temperature is too small to divide by.
        relative = logits - logits.max(-1, keepdims=True)
        filtered = filter_logits(relative / rule.temperature, rule)
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
    if rule.switches.top_p:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not reach top_p yet; the first always does, also where
        # top_p is so small that it is computed with as zero.
        before = jnp.cumsum(probabilities, -1) - probabilities
        last = jnp.maximum(jnp.sum(before < rule.top_p, -1, keepdims=True), 1) - 1
        smallest = jnp.take_along_axis(ordered, last, axis=-1)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if rule.switches.min_p:
        floor = logits.max(-1, keepdims=True) + rule.log_min_p
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return logits
