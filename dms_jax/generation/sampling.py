"""How tokens are chosen: temperature, top-k, top-p, min-p, and seeds that ignore the batch.

The draws never depend on the batch. The logits do, through rounding: a sum in another order
differs in the last bit, and where two next tokens are nearly equally likely the answer diverges
from there. Of 24 greedy answers of 64 tokens to prompts of random tokens, this many differed
between batches of 4 or 24 and one prompt at a time (shipped models, measured at commit cc4babdd;
answers to tasks never did):

    CPU, float32 and float64                   0
    CPU, bfloat16, against two lanes           0 to 4 (9 to 12 if XLA may leave out roundings)
    CPU, bfloat16, against an engine of one    8 to 13: single rows are summed in another order
    H200, float32 (products in TF32)           2 to 3
    H200, bfloat16                             12 to 18

Tokens are sampled without sorting, each quantity in one pass over the vocabulary:

    the largest logit  ->  sums of blocks, from which tokens are drawn  ->  which of them are kept

With a large top-p few draws are rejected, and no threshold is needed. If few tokens may be kept, a
search finds the least likely of them.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from dms_jax import sharding
from dms_jax.checks import Count, Number, Options, Range, Seed, Share, Whole, show
from dms_jax.errors import ConfigError
from dms_jax.generation.grammar import BITS, Grammar, Opening
from dms_jax.ranking import least_kept, sums_of_some

# The smallest normal number. A device may flush smaller ones to zero, also the inverse with which
# it replaces a division.
SMALLEST = float(np.finfo(np.float32).tiny)
# Larger than any vocabulary.
_ALL = 2**31 - 1
# The smallest top-p for which `try_tokens` needs few trials.
_LEAST_TRIED = 0.75


class Switches(NamedTuple):
    """Which filters are on, and whether the tokens that they keep are searched for."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    search: bool


@struct.dataclass
class Filter:
    """The part of `Sampling` that shapes the distribution, as numbers that fit float32.

    Compiled code depends on which filters are on, on whether tokens are searched for (top-k, and
    top-p below 0.75), and on the requested results; the values are inputs, so another temperature
    compiles nothing. Each value is a number for all lanes, or an array [B, 1].

    Attributes:
      temperature: clipped so that it and its inverse are normal float32 numbers.
      top_k: see `Sampling`; a number larger than any vocabulary if it is off.
      top_p: see `Sampling`; infinite if it is off or rounds to 1 in float32.
      log_min_p: logarithm of `min_p`, which float32 can represent even where `min_p` underflows.
      greedy: Bool[B], lanes that take the most likely token while others draw; None if all lanes do
        the same.
      searched: Bool[B], lanes whose tokens are searched for; None if all lanes do the same.
      switches: which filters are on.
      logprobs: whether programs return log-probabilities.
      allowed: Int[B, words], the tokens that grammars allow: bit i of word w is token 32 w + i
        (`grammar.masks_of`); None if no lane has a grammar.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    log_min_p: Any
    greedy: Any
    searched: Any
    switches: Switches = struct.field(pytree_node=False)
    logprobs: bool = struct.field(pytree_node=False)
    allowed: Any = None


@struct.dataclass
class Given:
    """Tokens that are given and scored, not drawn under a `Filter`.

    Attributes:
      tokens: Int[n, B], the next tokens of each lane.
    """

    tokens: Any


@dataclasses.dataclass(frozen=True)
class Sampling(Options):
    """How tokens are drawn and when generation ends.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this.
      min_p: keep tokens at least this many times as likely as the most likely one.
      max_new_tokens: the most new tokens per request; the model's last position may end it earlier.
      stop: strings that end a request; they are cut off the text. Special tokens are not text; the
        end tokens are those of the checkpoint (generation_config.json).
      seed: one seed for all requests, or one for each. The draws of a request depend on its seed,
        its positions, and the number of equal prompts before it in the call (so that copies of a
        prompt become different chains), not on the rest of the batch. The answer can depend on it
        through rounding, in bfloat16 and on a GPU: the module docstring says how often.
      logprobs: return the model's log-probability of each new token (before temperature, filters
        and grammar).
      grammar: the grammar that the answer must match, or the tokens it must begin with
        (`dms_jax.generation.grammar`); other tokens are excluded before the other filters.
      ignore_eos: whether end tokens are tokens like any other and do not end the answer, for
        benchmarks that want answers of one length. Not with a grammar, which needs an end token.
    """

    temperature: Annotated[Number, Range(0), "0 is greedy"] = 1.0
    top_k: Whole = 0
    top_p: Annotated[Number, Range(0, 1, above=True)] = 1.0
    min_p: Share = 0.0
    max_new_tokens: Count = 256
    stop: Sequence[str] | str = ()
    seed: Seed | Sequence[Seed] = 0
    logprobs: bool = False
    grammar: Grammar | Opening | None = None
    ignore_eos: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.ignore_eos and self.grammar is not None:
            raise ConfigError(
                "Sampling: ignore_eos cannot be used with a grammar: an end token ends the answer."
            )
        if not all(self.stop_strings):
            raise ConfigError(f"Sampling: no stop string may be empty, got {show(self.stop)}.")

    @functools.cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whether one or several were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def seeds(self, count: int) -> list[int]:
        """Returns the seed of each of `count` requests.

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

    @functools.cached_property
    def filter(self) -> Filter:
        """The filter of these options; see `Filter`."""
        temperature, top_p, min_p = map(float, (self.temperature, self.top_p, self.min_p))
        switches = Switches(
            greedy=temperature == 0,
            top_k=self.top_k > 0,
            top_p=bool(np.float32(top_p) < 1),
            min_p=min_p > 0,
            search=self.top_k > 0 or bool(np.float32(top_p) < _LEAST_TRIED),
        )
        return Filter(
            temperature=min(max(temperature, SMALLEST), 1 / SMALLEST),
            top_k=min(self.top_k, _ALL) if switches.top_k else _ALL,
            top_p=top_p if switches.top_p else math.inf,
            log_min_p=math.log(min_p) if switches.min_p else -math.inf,
            greedy=None,
            searched=None,
            switches=switches,
            logprobs=self.logprobs,
        )


class LanesFilter:
    """The filter of lanes with different samplings: one program for all.

    It draws like the filter of each lane alone, and returns log-probabilities. Between programs
    only changed lanes are updated: setting all 256 would make the device wait.

    Args:
      num_lanes: number of lanes (B).
    """

    def __init__(self, num_lanes: int):
        self._samplings: dict[int, Sampling] = {}
        self._idle = Sampling()
        idle = self._idle.filter
        self._filter = Filter(
            temperature=np.full((num_lanes, 1), idle.temperature, np.float32),
            top_k=np.full((num_lanes, 1), idle.top_k, np.int32),
            top_p=np.full((num_lanes, 1), idle.top_p, np.float32),
            log_min_p=np.full((num_lanes, 1), idle.log_min_p, np.float32),
            greedy=np.full(num_lanes, idle.switches.greedy),
            searched=np.full(num_lanes, idle.switches.search),
            switches=Switches(greedy=False, top_k=True, top_p=True, min_p=True, search=True),
            logprobs=True,
        )

    def of(self, samplings: Mapping[int, Sampling]) -> Filter:
        """Returns the filter for the present samplings.

        Args:
          samplings: lane -> its sampling; the other lanes are idle.
        """
        before, self._samplings = self._samplings, dict(samplings)
        changed = {lane: each for lane, each in samplings.items() if each is not before.get(lane)}
        changed |= {lane: self._idle for lane in before if lane not in samplings}
        if not changed:
            return self._filter
        lanes, filters = list(changed), [sampling.filter for sampling in changed.values()]
        values: dict[str, Any] = {
            name: [[getattr(each, name)] for each in filters]
            for name in ("temperature", "top_k", "top_p", "log_min_p")
        }
        values["greedy"] = [each.switches.greedy for each in filters]
        values["searched"] = [each.switches.search for each in filters]
        arrays: dict[str, np.ndarray] = {}
        for name, new in values.items():
            # a program may still read the old array
            arrays[name] = getattr(self._filter, name).copy()
            arrays[name][lanes] = new
        self._filter = dataclasses.replace(self._filter, **arrays)
        return self._filter


# -- the draw --------------------------------------------------------------------------------------


# Tokens of a block, and blocks of a group; the vocabularies of common models are multiples of a
# block.
_BLOCK, _GROUP = 128, 32
# Trials per token: at the smallest top-p that uses trials, all of them are rejected once in 4
# billion draws. Random numbers have 8 million values. Every step checks the first few trials, and
# the others only if none of those is kept: at a top-p of 0.95 in one of 600 steps of 256 lanes.
_TRIALS, _FIRST_TRIALS = 16, 4


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    rule: Filter,
    forced: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row.

    Args:
      logits: logits of the next token.
      keys: one random key per request.
      positions: position of the token to draw; each position has its own draw.
      rule: the filter.
      forced: tokens to take instead; -1 draws one.

    Returns:
      The tokens, and their log-probabilities under the unfiltered distribution.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    allowed = logits if rule.allowed is None else keep_allowed(logits, rule.allowed)
    if rule.switches.greedy:
        tokens = jnp.argmax(allowed, -1)
    else:
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        tokens = draw_kept(Scaled.of(allowed, rule.temperature), keys, rule)
        if rule.greedy is not None:
            tokens = jnp.where(rule.greedy, jnp.argmax(allowed, -1), tokens)
    if forced is not None:
        tokens = jnp.where(forced < 0, tokens, forced)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return tokens.astype(jnp.int32), logprobs


def likeliest(
    logits: Float[Array, "B V"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns the likeliest token of each row, and its log-probability."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return tokens, look_up(logits, tokens)[0]


def keep_allowed(
    logits: Float[Array, "B V"], allowed: Int[Array, "B words"]
) -> Float[Array, "B V"]:
    """Sets the logits of tokens without a bit to -inf; see `Filter.allowed`."""
    bits = (allowed[..., None] >> jnp.arange(BITS)) & 1
    bits = bits.reshape(len(logits), -1)[:, : logits.shape[-1]]
    return jnp.where(bits == 1, logits, -jnp.inf)


def look_up(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Returns the log-probability of a given token of each row, and whether it is the likeliest."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), tokens == jnp.argmax(logits, axis=-1)


class Scaled(NamedTuple):
    """Logits relative to the largest, so that no temperature is too small to divide by.

    Every pass over the vocabulary recomputes them. If several passes read one array, XLA would
    write it to memory: for 256 lanes of 152K tokens as many bytes as all weights of a small model.

    Attributes:
      logits: the logits.
      peak: the largest of each row.
      temperature: divisor of the differences; one number, or one per row.
    """

    logits: Float[Array, "B V"]
    peak: Float[Array, "B 1"]
    temperature: Any = 1.0

    @classmethod
    def of(cls, logits: Float[Array, "B V"], temperature: Any = 1.0) -> "Scaled":
        """Returns logits relative to their largest, over the temperature."""
        return cls(logits, logits.max(-1, keepdims=True), temperature)

    def anew(self, *others: Array) -> tuple[Any, ...]:
        """Returns (self, *others) behind a barrier, so that XLA computes them again."""
        logits, peak, *same = jax.lax.optimization_barrier((self.logits, self.peak, *others))
        return Scaled(logits, peak, self.temperature), *same

    def of_some(self, logits: Float[Array, " B *n"]) -> Float[Array, " B *n"]:
        """Returns the numbers of some of the logits."""
        peak, temperature = (
            jnp.reshape(x, (-1, *[1] * (logits.ndim - 1))) for x in (self.peak, self.temperature)
        )
        return (logits - peak) / temperature

    @property
    def numbers(self) -> Float[Array, "B V"]:
        """The numbers of the whole vocabulary, none above 0."""
        return self.of_some(self.logits)


def draw_kept(logits: Scaled, keys: Key[Array, " B"], rule: Filter) -> Int[Array, " B"]:
    """Draws one of the tokens that the rule keeps per row; see `draw`.

    Searches for the kept tokens only if they may be few.
    """

    def search() -> Int[Array, " B"]:
        filtered = filter_logits(logits.numbers, rule)
        return draw(Scaled(filtered, jnp.zeros_like(logits.peak)), keys)[:, 0]

    if rule.searched is None:
        return search() if rule.switches.search else try_tokens(logits, keys, rule)
    tried = try_tokens(logits, keys, rule)
    return jax.lax.cond(
        rule.searched.any(), lambda: jnp.where(rule.searched, search(), tried), lambda: tried
    )


def try_tokens(logits: Scaled, keys: Key[Array, " B"], rule: Filter) -> Int[Array, " B"]:
    """Draws from all tokens until top-p keeps one; takes the most likely if it keeps none.

    This rejection sampling draws from exactly the distribution over the kept tokens, without
    knowing them: a token is kept if the more likely ones do not reach top-p, and one pass checks
    all trials.
    """
    least = rule.log_min_p if rule.switches.min_p else None
    if not rule.switches.top_p:
        return draw(logits, keys, least=least)[:, 0]
    tokens = draw(logits, keys, _TRIALS, least=least)
    drawn = jnp.take_along_axis(logits.logits, tokens, axis=-1)

    def first_kept(trials: slice) -> tuple[Int[Array, " B"], Shaped[Array, " B"]]:
        """Returns the first of some trials that is kept, and whether any is."""
        # For the last threshold (-inf) every token counts, so the last sum is the total.
        everything = jnp.full_like(drawn[:, :1], -jnp.inf)
        own, starts = logits.anew(jnp.concatenate([drawn[:, trials], everything], -1))
        weights = jnp.exp(own.numbers)
        sums = sums_of_some(own.logits, weights, starts, operator.gt)
        kept = sums[:, :-1] < rule.top_p * sums[:, -1:]
        first = jnp.argmax(kept, -1)[:, None]
        return jnp.take_along_axis(tokens[:, trials], first, axis=-1)[:, 0], kept.any(-1)

    def of_others() -> Int[Array, " B"]:
        other, kept = first_kept(slice(_FIRST_TRIALS, None))
        other = jnp.where(kept, other, jnp.argmax(logits.logits, -1).astype(tokens.dtype))
        return jnp.where(decided, token, other)

    token, decided = first_kept(slice(_FIRST_TRIALS))
    return jax.lax.cond(decided.all(), lambda: token, of_others)


def draw(
    logits: Scaled, keys: Key[Array, " B"], count: int = 1, *, least: Any = None
) -> Int[Array, "B count"]:
    """Draws tokens, each of a probability proportional to exp(logit).

    First a group of blocks by its probability, then a block of the group, then a token of the
    block: three random numbers per token and one pass over the vocabulary. The first tokens do not
    depend on `count`.

    Args:
      logits: the logits.
      keys: one random key per row.
      count: tokens per row.
      least: the scaled logit below which no token is drawn; None for none.
    """

    def weigh(some: Float[Array, " B *n"], logits: Scaled) -> Float[Array, " B *n"]:
        numbers = logits.of_some(some)
        if least is not None:
            floor = jnp.reshape(least, (-1, *[1] * (numbers.ndim - 1)))
            numbers = jnp.where(numbers < floor, -jnp.inf, numbers)
        return jnp.exp(numbers)

    # On a mesh each device has the same number of whole blocks; otherwise all logits would be
    # gathered.
    together = _BLOCK * sharding.axis_size(sharding.MODEL)

    def blocks_of(x: Float[Array, "B V"]) -> Float[Array, "B blocks n"]:
        pad = [(0, 0), (0, -x.shape[-1] % together)]
        return jnp.pad(x, pad, constant_values=-jnp.inf).reshape(len(x), -1, _BLOCK)

    (own,) = logits.anew()
    by_block = weigh(blocks_of(own.logits), own).sum(-1)
    by_block = sharding.constrain(by_block, sharding.DATA, None)
    pad = [(0, 0), (0, -by_block.shape[-1] % _GROUP)]
    by_block = jnp.pad(by_block, pad).reshape(len(by_block), -1, _GROUP)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (count, 3), by_block.dtype))(keys)
    group = _choose(by_block.sum(-1)[:, None], uniform[..., 0])
    weights = jnp.take_along_axis(by_block, group[..., None], axis=1)
    block = group * _GROUP + _choose(weights, uniform[..., 1])
    within = jnp.take_along_axis(blocks_of(logits.logits), block[..., None], axis=1)
    return block * _BLOCK + _choose(weigh(within, logits), uniform[..., 2])


def _choose(weights: Float[Array, "B c n"], uniform: Float[Array, "B m"]) -> Int[Array, "B m"]:
    """Chooses an index by its weight, with a number between 0 and 1, less than 1.

    This is the first index at which the cumulative weight exceeds that share of the total. An index
    of weight 0 is never chosen: cumulative sums may be rounded differently from one index to the
    next, so its own sum is ignored.
    """
    sums = jnp.where(weights > 0, jnp.cumsum(weights, -1), 0)
    return jnp.argmax(sums > uniform[..., None] * sums.max(-1, keepdims=True), -1)


def filter_logits(logits: Float[Array, "B V"], rule: Filter) -> Float[Array, "B V"]:
    """Sets the logits of excluded tokens to -inf: top-k, then top-p, then min-p.

    Equally likely tokens are kept or excluded together. Nothing is sorted: a search that reads the
    logits a few times finds the least likely token that stays.

    Args:
      logits: relative to the largest, so that none is far above 0.
      rule: the filter.
    """
    if rule.switches.top_k:
        least = least_kept(logits, lambda x: jnp.ones_like(x, jnp.int32), rule.top_k)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if rule.switches.top_p:
        # A token stays if the more likely ones do not reach top_p yet. The first always stays, even
        # if the device treats a tiny top_p as zero.
        budget = rule.top_p * jnp.exp(logits).sum(-1, keepdims=True)
        least = least_kept(logits, jnp.exp, jnp.maximum(budget, SMALLEST))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if rule.switches.min_p:
        floor = logits.max(-1, keepdims=True) + rule.log_min_p
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return logits
