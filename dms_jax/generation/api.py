"""`generate` and `score`: the calls that make an engine for one use."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
from jaxtyping import Float

from dms_jax.cache.accounting import Usage
from dms_jax.checks import Count, CountOnDevice, check, check_keywords, show_options
from dms_jax.errors import DataError
from dms_jax.generation.engine import Engine, EngineKeywords, EngineOptions, Source
from dms_jax.generation.requests import (
    Completion,
    OnTokens,
    Prompt,
    Request,
    check_call,
    check_list,
    encode_prompt,
    encode_prompts,
    make_requests,
    scored_request,
)
from dms_jax.generation.sampling import Sampling
from dms_jax.interrupts import keep_finished
from dms_jax.model.language_model import LanguageModel, check_model
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
        """The text of the new tokens, without end tokens and stop strings."""
        return [completion.text for completion in self.completions]

    @property
    def tokens(self) -> list[list[int]]:
        """The ids of the new tokens, end tokens included."""
        return [completion.tokens for completion in self.completions]

    @property
    def logprobs(self) -> list[list[float] | None]:
        """The model's log-probability of each new token, if `Sampling.logprobs` is set."""
        return [completion.logprobs for completion in self.completions]

    @property
    def usage(self) -> Usage:
        """The usage of all requests together; see `total_usage`."""
        return total_usage([completion.usage for completion in self.completions])


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Adds up the usage of requests, peaks included, as the papers run all chains concurrently.

    The compression ratio is that of the sums.
    """
    names = [field.name for field in dataclasses.fields(Usage)]
    total: dict[str, Any] = {name: sum(getattr(each, name) for each in usages) for name in names}
    live, seen = total["live_tokens"], sum(e.compression_ratio * e.live_tokens for e in usages)
    total["compression_ratio"] = seen / live if live else 1.0
    return Usage(**total)


@show_options(EngineOptions)
def generate(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    policy: Policy | str | None = None,
    sampling: Sampling | None = None,
    memory: float | int | None = None,
    chunk: int = 32,
    on_tokens: OnTokens | None = None,
    **options: Unpack[EngineKeywords],
) -> Generation:
    """Completes prompts from a paged cache that holds only the tokens kept by the policy.

    Equal prompts are prefilled once; their chains draw with different seeds, so they differ from
    the first token on. A prefix that several prompts share (a document, examples) is prefilled once
    too, up to its last whole page (`dms_jax.generation.prefixes`). Chains of a long prompt share
    its pages, under policies that do not overwrite them. Answers and usage are the same
    as for prompts prefilled one by one, except `Usage.prefilled_tokens` and `Usage.cached_tokens`.

    The random draws of a request do not depend on the rest of the batch, nor on memory, lanes or
    chunks. Its logits do, through the rounding of sums, which can change an answer where two next
    tokens are nearly equally likely. No such change was measured in float64, nor in float32 on a
    CPU; `dms_jax.generation.sampling` gives the rates on a GPU and in bfloat16.

    Args:
      model: from `load` or `retrofit`.
      prompts: strings, lists of token ids, or lists of chat messages, of any lengths.
      policy: the cache policy, or its name ("TOVA"); None for the checkpoint's.
      sampling: how tokens are drawn and when generation ends; None for `Sampling()`.
      memory: bytes for the cache; None for as much as the requests may need, within the free
        memory. Requests that do not fit wait; a running one may be preempted and recomputed.
      chunk: decode steps between two checks of the requests; updates are sent and stop strings
        found at these checks.
      on_tokens: called with an `Update` whenever a request has new tokens.
      **options: page_size, prefill_chunk, kv_dtype, ...: see `dms_jax.generation.EngineOptions`.

    Returns:
      A `Generation` with texts, tokens and usage.

    Raises:
      DataError: a prompt is empty, outside the vocabulary, or longer than the model's positions.
      ConfigError: an option is malformed, or the policy does not fit the model.
      CapacityError: the memory does not hold a single sequence. Raised before anything runs if that
        is known in advance: for prompts that the policy stores whole, and, under a policy that
        evicts nothing, for answers that only their length can end.

    Any exception that interrupts it, KeyboardInterrupt and an error of `on_tokens` included, has
    the completions that had ended: `error.finished` is {index of the prompt: Completion}.
    """
    check_keywords("generate", generate, options, sampling=Sampling)
    check_model(model)
    check_list(prompts)
    sampling = check_call(sampling, on_tokens)
    tokens = encode_prompts(model, prompts)
    requests = make_requests(model.config, tokens, sampling)
    engine = Engine(
        model,
        policy,
        num_lanes=min(len(prompts), MAX_LANES),
        max_tokens=max(map(len, tokens)) + sampling.max_new_tokens,
        memory=memory,
        chunk=chunk,
        **options,
    )
    return Generation(engine.serve(Source(requests, on_tokens=on_tokens)))


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a given sequence, from the decode steps.

    Attributes:
      logprobs: [n - 1], the log-probability of each of tokens 1 ... n - 1 given those before it.
      usage: the use of the cache, as if the sequence had been generated.
    """

    logprobs: Float[np.ndarray, " n"]
    usage: Usage


@show_options(EngineOptions)
def score(
    model: LanguageModel,
    sequences: Sequence[Prompt] | np.ndarray,
    *,
    policy: Policy | str | None = None,
    num_lanes: int = MAX_LANES,
    memory: float | int | None = None,
    chunk: int = 64,
    max_length: int | None = None,
    on_done: Callable[[], None] | None = None,
    **options: Unpack[EngineKeywords],
) -> list[Score]:
    """Scores given sequences by teacher-forced decoding, token by token through the paged cache.

    There is no prompt, so a policy's prompt rules do not apply: the eviction at the end of the
    prompt (SnapKV and similar policies with `interval=None`, or `prefill="dense_then_evict"`), and
    Quest's full reads.

    Args:
      model: from `load` or `retrofit`.
      sequences: token ids or text, at least two tokens each.
      policy: the cache policy, or its name ("TOVA"); None for what the checkpoint declares.
      num_lanes, memory, chunk, **options: see `dms_jax.generation.EngineOptions`.
      max_length: tokens from which a policy with a `compression_ratio` computes its budget; None
        for the length of each sequence.
      on_done: called whenever a sequence is done.

    Raises:
      DataError: a sequence is too short, too long, or outside the vocabulary.
      CapacityError: the memory does not hold a single sequence.

    Any exception that interrupts it, KeyboardInterrupt included, has the scores of the sequences
    that had ended: `error.finished` is {index of the sequence: Score}.
    """
    check_keywords("score", score, options)
    check_model(model)
    check_list(sequences, "sequences")
    tokens = [
        encode_prompt(model, sequence, name=f"Sequence {index}")
        for index, sequence in enumerate(sequences)
    ]
    shortest = min(range(len(tokens)), key=lambda index: len(tokens[index]))
    if len(tokens[shortest]) < 2:
        raise DataError(
            f"Sequence {shortest} has one token; scoring predicts each token from those before it "
            "and needs two."
        )
    max_lengths = [len(sequence) for sequence in tokens]
    if max_length is not None:
        max_lengths = [check("max_length", max_length, CountOnDevice)] * len(tokens)
    requests = [
        scored_request(model.config, index, [], each, max_length)
        for index, (each, max_length) in enumerate(zip(tokens, max_lengths, strict=True))
    ]
    engine = Engine(
        model,
        policy,
        num_lanes=min(check("num_lanes", num_lanes, Count), len(tokens)),
        max_tokens=max(map(len, tokens)),
        memory=memory,
        chunk=chunk,
        **options,
    )
    with keep_finished(lambda: {each.index: _score_of(each) for each in requests if each.usage}):
        engine.serve(Source(requests, on_end=on_done and (lambda _: on_done())))
    return list(map(_score_of, requests))


def _score_of(request: Request) -> Score:
    """Returns the score of a sequence, whose first token stands for a prompt."""
    assert request.usage is not None
    usage = dataclasses.replace(
        request.usage, prompt_tokens=1, new_tokens=request.usage.new_tokens - 1
    )
    return Score(np.asarray(request.logprobs), usage)
