"""Recipes for scorers that learn the importance of tokens from attention, on frozen weights."""

import math

from dms_jax.checks import Count, Number, check
from dms_jax.training.recipe import Recipe, Stage


def kvzap(
    *,
    tokens: int = 238 * 65536,
    learning_rate: Number = 1e-3,
    sequence_length: int = 2048,
    batch_size: int = 32,
) -> Recipe:
    """A scorer for `KVzap`, regressed on the importance that attention gives; frozen weights.

    Then `dms_jax.calibrate` sets the threshold for a compression ratio. The rate and the number of
    tokens are ours; the publication takes 1.2M tokens of about 2,400 texts, several times each.

    Args:
      tokens: tokens of the whole run, padding included; they determine the number of steps.
      learning_rate: of the scorer; it falls to zero along a half-cosine.
      sequence_length: T, tokens per packed sequence; longer than the window by as much as is to
        count as the future.
      batch_size: sequences per step.

    Raises:
      ConfigError: a number is out of range.
    """
    return _scorer("kvzap", tokens, learning_rate, sequence_length, batch_size)


def kvpop(
    *,
    tokens: int = 238 * 65536,
    learning_rate: Number = 1e-3,
    sequence_length: int = 2048,
    batch_size: int = 32,
) -> Recipe:
    """A scorer for `KVpop`, regressed on the mean attention of later queries; frozen weights.

    The publication trains all weights on 2B tokens.

    Args:
      tokens, learning_rate, sequence_length, batch_size: as for `kvzap`.

    Raises:
      ConfigError: a number is out of range.
    """
    return _scorer("kvpop", tokens, learning_rate, sequence_length, batch_size)


def _scorer(
    name: str, tokens: int, learning_rate: Number, sequence_length: int, batch_size: int
) -> Recipe:
    tokens = check(f"{name}: tokens", tokens, Count)
    batch_size = check(f"{name}: batch_size", batch_size, Count)
    sequence_length = check(f"{name}: sequence_length", sequence_length, Count)
    steps = max(1, round(tokens / (batch_size * sequence_length)))
    stage = Stage(
        "supervise",
        steps,
        learning_rate,
        warmup_steps=min(10, steps // 10),
        final_learning_rate=0.0,
    )
    return Recipe(
        name=name,
        stages=(stage,),
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=math.gcd(batch_size, 8),
        trainable="adapter",
        loss="language_modeling",
        packing="first_fit",
    )
