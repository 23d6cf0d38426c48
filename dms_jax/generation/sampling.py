"""How tokens are chosen: temperature, top-k, top-p, min-p, and seeds that ignore the batch.

The draws never depend on the batch. The logits do, through rounding: a sum in another order
differs in the last bit, and where two next tokens are nearly equally likely the answer diverges
from there. Of 24 greedy answers of 64 tokens to prompts of random tokens, this many differed
between batches of 4 or 24 and one prompt at a time (shipped models; answers to tasks never did;
`experiments.reproduction.batch_dependence` measures it into `experiments/results/batch`):

    CPU, float32 and float64                   0
    CPU, bfloat16, against two lanes           0 to 4 (9 to 12 if XLA may leave out roundings)
    CPU, bfloat16, against an engine of one    8 to 13: single rows are summed in another order
    H200, float32 (products in TF32)           2 to 3
    H200, bfloat16                             12 to 18
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from flax import struct

from dms_jax.checks import Count, Number, Options, Range, Seed, Share, Whole, show
from dms_jax.errors import ConfigError

# The smallest normal number. A device may flush smaller ones to zero, among them the inverse that
# it multiplies by in place of a division.
SMALLEST = float(np.finfo(np.float32).tiny)
# More tokens than any vocabulary has.
_ALL = 2**31 - 1
# The least top-p for which the few tokens that are tried are enough (`drawing`).
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
    top-p below 0.75), and on what is returned; the values are inputs, so another temperature
    compiles nothing. Each value is a number for all lanes, or an array [B, 1].

    Attributes:
      temperature: clipped so that it and its inverse are normal float32 numbers.
      top_k: see `Sampling`; a number larger than any vocabulary if it is off.
      top_p: see `Sampling`; infinite if it is off, which it also is if it rounds to 1 in float32.
      log_min_p: logarithm of `min_p`, which float32 can represent even where `min_p` underflows.
      greedy: Bool[B], lanes that take the most likely token among others that draw; None if all
        lanes do the same.
      searched: Bool[B], lanes whose tokens are searched for, likewise.
      switches: which filters are on.
      logprobs: whether programs return log-probabilities.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    log_min_p: Any
    greedy: Any
    searched: Any
    switches: Switches = struct.field(pytree_node=False)
    logprobs: bool = struct.field(pytree_node=False)


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
        its positions, and how many equal prompts come before it in the call (so that copies of a
        prompt become different chains), not on the rest of the batch. The answer can depend on it
        through rounding, in bfloat16 and on a GPU: the module docstring says how often.
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
    """The filter of lanes that differ in their sampling: one program for whatever they ask.

    It draws as the filter of each lane alone does, and returns log-probabilities. From one program
    to the next only lanes that changed are set anew: a device would wait for all 256 to be.

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
        """Returns the filter for what the lanes ask now.

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
            arrays[name] = getattr(self._filter, name).copy()  # a program may still read the old
            arrays[name][lanes] = new
        self._filter = dataclasses.replace(self._filter, **arrays)
        return self._filter
