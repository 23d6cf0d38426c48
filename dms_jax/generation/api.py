"""`generate`, conversations, and scoring through the cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.cache.accounting import Meter, Usage
from dms_jax.errors import CapacityError, DataError
from dms_jax.generation.engine import Engine
from dms_jax.generation.requests import Completion, OnTokens, Prompt
from dms_jax.generation.sampling import Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

MAX_LANES = 256


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`, in the order of the prompts.

    Attributes:
      completions: one per prompt, each with its own usage.
    """

    completions: list[Completion]

    @property
    def texts(self) -> list[str]:
        """The texts, without end tokens and stop strings."""
        return [completion.text for completion in self.completions]

    @property
    def tokens(self) -> list[list[int]]:
        """New token ids, end tokens included."""
        return [completion.tokens for completion in self.completions]

    @property
    def logprobs(self) -> list[list[float] | None]:
        """The model's log-probability of each new token, where `Sampling.logprobs` asks."""
        return [completion.logprobs for completion in self.completions]

    @property
    def finish_reasons(self) -> list[str]:
        """Why each one ended: "end", "stop" or "length"."""
        return [completion.finish_reason for completion in self.completions]

    @property
    def usage(self) -> Usage:
        """Sums over the requests; ratios of the sums."""
        return total_usage([completion.usage for completion in self.completions])


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Adds up requests: reads, peaks and bytes are sums (the chains of the papers run at once)."""

    def total(name: str) -> Any:
        return sum(getattr(usage, name) for usage in usages)

    live = total("live_tokens")
    seen = sum(usage.compression_ratio * usage.live_tokens for usage in usages)
    return Usage(
        prompt_tokens=total("prompt_tokens"),
        new_tokens=total("new_tokens"),
        kv_reads=total("kv_reads"),
        peak_tokens=total("peak_tokens"),
        live_tokens=live,
        compression_ratio=seen / live if live else 1.0,
        cache_bytes=total("cache_bytes"),
        peak_cache_bytes=total("peak_cache_bytes"),
    )


def generate(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    policy: Policy | None = None,
    sampling: Sampling | None = None,
    memory: int | None = None,
    chunk: int = 32,
    page_size: int = 64,
    prefill_chunk: int = 512,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Completes prompts from a paged cache that holds only what the policy keeps.

    Args:
      model: from `load` or `retrofit`.
      prompts: strings, lists of token ids, or lists of chat messages; any lengths.
      policy: the checkpoint's own if None.
      sampling: `Sampling()` if None.
      memory: bytes for the cache. Requests that do not fit wait; a running one may be put back in
        the queue and recomputed. None takes what the requests can need, within the free memory.
      chunk: decode steps per compiled program; news and stop strings arrive this often.
      page_size: slots a page.
      prefill_chunk: prompt tokens per compiled program.
      on_tokens: called with an `Update` whenever a request has news.

    Returns:
      A `Generation`: texts, tokens, usage.

    Raises:
      DataError: a prompt is empty, outside the vocabulary, or beyond the model's positions.
      ConfigError: the policy or an option does not fit.
      CapacityError: the memory does not hold a single sequence.
    """
    if not prompts:
        raise DataError("There is nothing to generate: the list of prompts is empty.")
    sampling = sampling or Sampling()
    engine = Engine(
        model,
        policy,
        num_lanes=min(len(prompts), MAX_LANES),
        memory=memory,
        max_tokens=_longest(model, prompts, sampling, chunk),
        page_size=page_size,
        chunk=chunk,
        prefill_chunk=prefill_chunk,
    )
    return Generation(engine.generate(prompts, sampling=sampling, on_tokens=on_tokens))


def _longest(
    model: LanguageModel, prompts: Sequence[Prompt], sampling: Sampling, chunk: int
) -> int | None:
    """Tokens of the longest sequence, where that is known without tokenising."""
    if any(
        isinstance(prompt, str) or not prompt or isinstance(prompt[0], dict) for prompt in prompts
    ):
        return None
    return max(map(len, prompts)) + sampling.max_new_tokens + chunk


class Conversation:
    """Turns that share one cache: nothing of the past is recomputed.

    Attributes:
      turns: the completions so far.
    """

    def __init__(self, model: LanguageModel, policy: Policy | None = None, **options: Any):
        self._engine = Engine(model, policy, num_lanes=1, **options)
        self._before: list[int] = []  # the last answer's newest token is not in the cache yet
        self.turns: list[Completion] = []

    def say(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Appends a prompt to the conversation and returns the answer.

        Text of a later turn is encoded without the beginning-of-sequence token. The usage is that
        of this turn, over a cache that holds all turns.

        Raises:
          DataError: the conversation has outgrown the model's positions.
          CapacityError: or its memory; the conversation is over then.
        """
        sampling = sampling or Sampling()
        tokens = self._engine.encode(prompt, continuing=bool(self.turns))
        request = self._engine.request(
            tokens,
            sampling,
            seed=sampling.seed_of(0),
            before=self._before,
            seen=int(self._engine.runner.seen[0]),
        )
        try:
            (completion,) = self._engine.serve([request], sampling, on_tokens, keep=True)
        except BaseException:
            self._before, self.turns = [], []  # the engine has started over
            raise
        self._before = [completion.tokens[-1]]
        self.turns.append(completion)
        return completion


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a given sequence, read off the decode steps.

    Attributes:
      logprobs: [n - 1], of tokens 1 ... n - 1 given those before.
      usage: of the cache, as if the sequence had been generated.
    """

    logprobs: Float[np.ndarray, " n"]
    usage: Usage


def score(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    *,
    policy: Policy | None = None,
    chunk: int = 64,
    page_size: int = 64,
    num_lanes: int = MAX_LANES,
    memory: int | None = None,
) -> list[Score]:
    """Feeds given sequences token by token through the paged cache, as decoding would.

    Args:
      model: from `load` or `retrofit`.
      sequences: token ids, at least two each.
      policy: the checkpoint's own if None.
      chunk: decode steps per compiled program.
      page_size: slots a page.
      num_lanes: sequences at a time.
      memory: bytes for the cache; None for what they can need.

    Raises:
      DataError: a sequence is too short, too long, or outside the vocabulary.
      CapacityError: the memory does not hold `num_lanes` sequences to their end.
    """
    if not sequences or min(map(len, sequences)) < 2:
        raise DataError("Scoring needs sequences of at least two tokens.")
    scores: list[Score] = []
    num_lanes = min(num_lanes, len(sequences))
    engine = Engine(
        model,
        policy,
        num_lanes=num_lanes,
        memory=memory,
        max_tokens=max(map(len, sequences)) + chunk,
        page_size=page_size,
        chunk=chunk,
    )
    for start in range(0, len(sequences), num_lanes):
        batch = [engine.encode(sequence) for sequence in sequences[start : start + num_lanes]]
        scores.extend(_score_batch(engine, batch))
    return scores


def _score_batch(engine: Engine, batch: list[list[int]]) -> list[Score]:
    runner, chunk = engine.runner, engine.chunk
    num_lanes, longest = len(runner.seen), max(map(len, batch))
    tokens = np.zeros((-(-longest // chunk) * chunk + 1, num_lanes), np.int32)
    lengths = np.zeros(num_lanes, np.int32)
    for lane, sequence in enumerate(batch):
        tokens[: len(sequence), lane] = sequence
        lengths[lane] = len(sequence)
    rows = engine.model.config.num_layers * engine.model.config.num_kv_heads
    meters = [Meter(rows=rows) for _ in batch]
    logprobs: list[list[np.ndarray]] = [[] for _ in batch]
    # The last token of a sequence predicts nothing of it and is not fed.
    for first in range(0, longest - 1, chunk):
        counts = np.clip(lengths - 1 - first, 0, chunk)
        if not runner.fits(counts):
            raise CapacityError(
                f"The pool cannot hold {len(batch)} sequences of {longest} tokens at once; give "
                "it more memory or score fewer at a time."
            )
        runner.reserve(counts)
        for lane, meter in enumerate(meters):
            meter.peak_bytes = max(meter.peak_bytes, runner.cache_bytes(lane))
        steps = runner.follow(tokens[first : first + chunk + 1], counts)
        runner.trim()
        for lane, meter in enumerate(meters):
            taken = slice(0, counts[lane])
            meter.add(steps.live[taken, lane], steps.reads[taken, lane].tolist())
            logprobs[lane].append(steps.logprobs[taken, lane])
    scores = [
        Score(
            logprobs=np.concatenate(logprobs[lane]),
            usage=meters[lane].usage(
                prompt_tokens=1,
                new_tokens=len(sequence) - 1,
                seen=len(sequence) - 1,
                cache_bytes=runner.cache_bytes(lane),
            ),
        )
        for lane, sequence in enumerate(batch)
    ]
    runner.clear(list(range(num_lanes)))
    return scores
