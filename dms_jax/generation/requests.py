"""Requests: from a prompt's token ids to a completion with its text and usage.

`encode_prompts` turns texts, token ids and chats into token ids, and names in its error what it
cannot use; `make_requests` gives each request its seed and its limits.
"""

import collections
import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeGuard, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from dms_jax.cache.accounting import Meter, Usage
from dms_jax.checkpoint.messages import read_messages
from dms_jax.checks import check, is_whole, show
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, ConfigError, DataError, TooLongError
from dms_jax.generation.grammar import Matcher, OpeningMatcher
from dms_jax.generation.sampling import Sampling
from dms_jax.model.language_model import PACKAGE, LanguageModel, check_tokens

FinishReason = Literal["end", "stop", "length", "grammar", "cancelled"]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | np.ndarray
OnTokens = Callable[["Update"], None]


@dataclasses.dataclass(frozen=True)
class Update:
    """The new tokens of one request, for streaming.

    Attributes:
      index: index of the prompt in the call.
      tokens: token ids since the last update.
      text: text since the last update; text that may still change comes later.
      finished: whether this is the last update.
    """

    index: int
    tokens: list[int]
    text: str
    finished: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      text: the new text, as it continues that of the prompt, with any leading space; without end
        tokens and stop strings.
      tokens: the new token ids, end tokens included.
      logprobs: the log-probability of each new token; None unless `Sampling.logprobs` is set.
      finish_reason: "end" for an end token, "stop" for a stop string, "length" for max_new_tokens
        or the model's last position, "grammar" if its grammar became too complex to be followed,
        "cancelled" if `Engine.cancel` ended it.
      usage: the use of the cache.
      likeliest: the token with the highest logit at each position of the answer, and its
        log-probability; only if the answer has an opening (`grammar.Opening`), else None.
    """

    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str
    usage: Usage
    likeliest: list[tuple[int, float]] | None = None


class State(enum.Enum):
    """Where a request is; `scheduler` has a diagram of the transitions."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclasses.dataclass
class Request:
    """A prompt on its way to a completion.

    Attributes:
      index: index of the prompt in the call.
      prompt: token ids of the prompt.
      seed: seed of its random draws.
      copy: number of equal prompts before it in the call; each copy draws differently.
      max_new_tokens: the most tokens that it may generate.
      meter: counts its use of the cache.
      max_length: length that the sequence can reach: prompt and longest answer.
      sampling: how its tokens are drawn and when it ends.
      adapter: name of its adapter; None for the plain model.
      priority: lower numbers are admitted first and preempted last; equal ones in order of arrival.
      state: its state.
      given: the whole answer, if it is given and only scored, not drawn.
      matcher: follows the answer through the grammar, or the opening, of its sampling.
      generated: token ids of the answer so far; the last one is not cached yet.
      logprobs: the log-probability of each of them, if asked for.
      greedy: whether each token of a given answer was the likeliest.
      likeliest: see `Completion`; empty without an opening.
      steps: live entries and reads of each chunk of decode steps; see `totals`.
      slots: slots in use per row when it was preempted, or of a shared prompt whose copy did not
        fit; it needs this many to continue.
      prompt_peak: the most live entries after any token of the prompt; set when the first token is.
      text: text so far.
      reported_tokens: number of generated tokens that were streamed.
      failure: why its grammar cannot be followed any further; None if it can.
      finish_reason: None while it runs; then see `Completion`.
      usage: None while it runs.
    """

    index: int
    prompt: list[int]
    seed: int
    copy: int
    max_new_tokens: int
    max_length: int
    meter: Meter
    sampling: Sampling
    adapter: str | None = None
    priority: int = 0
    given: list[int] | None = None
    matcher: Matcher | OpeningMatcher | None = None
    state: State = State.WAITING
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    greedy: bool = True
    likeliest: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    steps: list[Int[np.ndarray, "2 n"]] = dataclasses.field(default_factory=list)
    slots: Int[np.ndarray, "L K"] | None = None
    prompt_peak: int = 0
    text: str = ""
    reported_tokens: int = 0
    failure: str | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @functools.cached_property
    def prompt_array(self) -> Int[np.ndarray, " n"]:
        """The prompt as an array."""
        return np.asarray(self.prompt, np.int32)

    @property
    def sequence(self) -> Int[np.ndarray, " n"]:
        """The prompt and the answer so far."""
        return np.concatenate([self.prompt_array, np.asarray(self.generated, np.int32)])

    @property
    def remaining(self) -> int:
        """The number of tokens that it may still generate."""
        if self.finish_reason is not None:
            return 0
        return self.max_new_tokens - len(self.generated)

    @property
    def has_new_tokens(self) -> bool:
        """Whether it has tokens that were not reported."""
        return len(self.generated) > self.reported_tokens

    @property
    def live(self) -> int:
        """The live entries over all rows after the last collected token."""
        return int(self.steps[-1][0, -1]) if self.steps else self.meter.live

    def totals(self) -> tuple[list[int], list[int]]:
        """Returns the live entries and the reads of each decode step, over all rows.

        The steps ran generated[:-1]; steps after a stop string are left out.
        """
        if not self.steps:
            return [], []
        live, reads = np.concatenate(self.steps, axis=1)[:, : len(self.generated) - 1].tolist()
        return live, reads


def make_requests(
    config: ModelConfig,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    adapters: Sequence[str | None] | None = None,
    *,
    priority: int = 0,
) -> list[Request]:
    """Builds a request from the token ids of each prompt; copies of a prompt draw differently.

    Prompts with different adapters are not copies (`adapters` None: the plain model for all). All
    have the same `Request.priority`.

    Raises:
      TooLongError: a prompt leaves no room for an answer.
      ConfigError: there are more or fewer seeds than prompts.
    """
    copies: collections.Counter = collections.Counter()
    requests = []
    seeds = sampling.seeds(len(prompts))
    # Chains of one prompt mostly share one list object, and hashing thousands of tokens is slow.
    same = {id(tokens): tuple(tokens) for tokens in prompts}
    numbers: dict[tuple[int, ...], int] = {}
    number_of = {each: numbers.setdefault(same[each], len(numbers)) for each in same}
    adapters = [None] * len(prompts) if adapters is None else adapters
    each = zip(prompts, seeds, adapters, strict=True)
    for index, (tokens, seed, adapter) in enumerate(each):
        equal = seed, number_of[id(tokens)], adapter
        which: dict[str, Any] = dict(index=index, seed=seed, copy=copies[equal], adapter=adapter)
        requests.append(make_request(config, tokens, sampling, priority=priority, **which))
        copies[equal] += 1
    _warn_of_positions(config, requests, sampling)
    return requests


def _warn_of_positions(
    config: ModelConfig, requests: Sequence[Request], sampling: Sampling
) -> None:
    """Warns if answers end before `max_new_tokens` because the model has no more positions."""
    short = [each for each in requests if each.max_new_tokens < sampling.max_new_tokens]
    if short:
        first = min(short, key=lambda each: each.max_new_tokens)
        which = "the answer ends"
        if len(requests) > 1:
            which = f"{len(short)} of {len(requests)} answers end earlier, prompt {first.index}'s"
        warnings.warn(
            f"max_new_tokens={sampling.max_new_tokens:,} is more than the model's "
            f"{config.max_position_embeddings:,} positions leave after a prompt of "
            f"{len(first.prompt):,} tokens: {which} after {first.max_new_tokens:,}.",
            skip_file_prefixes=(PACKAGE,),
        )


def make_request(
    config: ModelConfig,
    prompt: list[int],
    sampling: Sampling,
    *,
    index: int = 0,
    seed: int = 0,
    copy: int = 0,
    adapter: str | None = None,
    priority: int = 0,
) -> Request:
    """Builds a request; see `Request` for its arguments.

    Raises:
      TooLongError: the prompt leaves no position for an answer.
    """
    positions = config.max_position_embeddings
    room = positions - len(prompt)
    if room < 1:
        raise TooLongError(
            f"Prompt {index} has {len(prompt)} tokens, which leaves no room for an answer in the "
            f"model's {positions} positions. Shorten it to at most {positions - 1} tokens."
        )
    max_new_tokens = min(sampling.max_new_tokens, room)
    return Request(
        index=index,
        prompt=prompt,
        seed=seed,
        copy=copy,
        max_new_tokens=max_new_tokens,
        max_length=len(prompt) + max_new_tokens,
        meter=Meter(rows=config.num_layers * config.num_kv_heads),
        sampling=sampling,
        adapter=adapter,
        priority=priority,
    )


# The sampling of given answers.
SCORED = Sampling(temperature=0, max_new_tokens=1, logprobs=True)


def scored_request(
    config: ModelConfig, index: int, prompt: list[int], answer: list[int], max_length: int
) -> Request:
    """Builds a request whose answer is given, to be scored.

    Without a prompt the cache starts with the answer, whose first token is not scored.
    """
    return Request(
        index=index,
        prompt=prompt,
        seed=0,
        copy=0,
        max_new_tokens=len(answer),
        max_length=max_length,
        meter=Meter(rows=config.num_layers * config.num_kv_heads),
        sampling=SCORED,
        given=answer,
        generated=[] if prompt else answer[:1],
    )


def completion_of(request: Request) -> Completion:
    """Returns the completion of a request that has ended."""
    assert request.usage is not None
    assert request.finish_reason is not None
    return Completion(
        text=request.text,
        tokens=request.generated,
        logprobs=request.logprobs if request.sampling.logprobs else None,
        finish_reason=request.finish_reason,
        usage=request.usage,
        likeliest=request.likeliest or None,
    )


def finished(requests: Sequence[Request]) -> dict[int, Completion]:
    """Returns the completions of the requests that have ended, by index."""
    return {each.index: completion_of(each) for each in requests if each.usage is not None}


class NotNumbersError(CheckpointError):
    """Logits of some requests are not numbers.

    Attributes:
      indices: these requests; the tokens of the others are valid.
    """

    def __init__(self, message: str, indices: Iterable[int]):
        super().__init__(message)
        self.indices = frozenset(indices)


def check_finite(drawn: Iterable[tuple[Request, np.bool_ | np.ndarray]]) -> None:
    """Raises NotNumbersError if logits of next tokens were not finite."""
    wrong = [(request, finite) for request, finite in drawn if not np.all(finite)]
    if wrong:
        request, finite = wrong[0]
        position = len(request.prompt) + len(request.generated)
        position += int(np.argmin(finite))  # the first bad one
        raise NotNumbersError(
            f"The model's logits are not numbers (NaN) at token {position} of prompt "
            f"{request.index}. Check the weights, or load the model with `dtype=float32` if they "
            "overflow float16.",
            (each.index for each, _ in wrong),
        )


def record_usage(request: Request, *, cached: int, live: int, **held: int) -> None:
    """Sets the usage of a request that has ended; a second call changes nothing.

    Tokens after a stop string count only towards the pages that hold them.

    Args:
      request: the request.
      cached: tokens that its lane has processed.
      live: live slots of its lane, summed over all rows.
      **held: its `cache_bytes` and `host_bytes`.
    """
    meter = dataclasses.replace(request.meter)
    meter.add(*request.totals())
    seen = len(request.prompt) + len(request.generated) - 1
    if not request.generated:  # cancelled, perhaps in the middle of its prompt
        seen = cached
    if cached == seen:  # nothing came after a stop string
        meter.finish(live)
    request.usage = meter.usage(
        prompt_tokens=len(request.prompt), new_tokens=len(request.generated), seen=seen, **held
    )


# -- prompts ---------------------------------------------------------------------------------------


# A text with more characters than this per token that fits is refused before it is tokenized. Most
# tokens have four, and no real text consists of the longest tokens alone.
CHARACTERS_A_TOKEN = 32


@runtime_checkable
class Encoder(Protocol):
    """What `encode_prompt` needs of a model: a `LanguageModel`, or its description elsewhere."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template, or None."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The configuration, for the vocabulary and the positions."""
        ...


def check_call(sampling: Sampling | None, on_tokens: OnTokens | None) -> Sampling:
    """Returns the sampling to use; raises ConfigError if an argument is of another type."""
    sampling = Sampling() if sampling is None else check("sampling", sampling, Sampling)
    check("on_tokens", on_tokens, Annotated[OnTokens | None, "it is called with an Update"])
    return sampling


def check_stop(model: LanguageModel, sampling: Sampling) -> None:
    """Raises ConfigError if there are stop strings but no tokenizer."""
    if sampling.stop_strings and model.tokenizer is None:
        raise ConfigError(
            "Sampling: stop strings need text, and this model has no "
            "tokenizer. Leave them out, or end at a token (generation.eos_token_ids)."
        )


def check_list(prompts: Any, what: str = "prompts") -> None:
    """Raises DataError unless `prompts` is a list that is not empty."""
    if isinstance(prompts, str):
        raise DataError(f"Give a list of {what}, not a single string: [{show(prompts)}].")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence | np.ndarray):
        raise DataError(f"Give a list of {what}, got {show(prompts)}.")
    if len(prompts) == 0:
        raise DataError(f"There is nothing to do: the list of {what} is empty.")
    if isinstance(prompts[0], Mapping):
        raise DataError(f"Give a list of {what}; one chat is a list of messages in that list.")
    if is_whole(prompts[0]):
        raise DataError(f"Give a list of {what}; one list of token ids goes into that list.")


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def encode_prompt(
    model: Encoder,
    prompt: Any,
    *,
    name: str = "The prompt",
    continuing: bool = False,
    most: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
      model: the model whose tokenizer, chat template, vocabulary and positions apply.
      prompt: a string, a list of chat messages, or token ids.
      name: what error messages call the prompt.
      continuing: whether a text continues a sequence, without a beginning-of-sequence token.
      most: the most tokens of a prompt; None for the model's positions. Far longer texts are
        refused before they are tokenized (`check_characters`).

    Raises:
      TooLongError: the prompt is longer than the model's positions.
      DataError: the prompt is empty, of another type, outside the vocabulary, or text for a model
        without a tokenizer.
    """
    tokenizer = model.tokenizer
    most = model.config.max_position_embeddings if most is None else most
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise DataError(f"{name} is text, and this model has no tokenizer. Give token ids.")
        if isinstance(prompt, str):
            if not prompt:
                raise DataError(
                    f"{name} is an empty string. Give at least one character, or, to start from "
                    "nothing, a list of the one token that begins a sequence."
                )
            text, special = prompt, not continuing
        else:
            check_messages(prompt, name)
            check_messages_length(prompt, most, name)
            text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)
            special = False
        check_characters(len(text), most, name)
        try:
            tokens = tokenizer.encode(text, add_special_tokens=special)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    else:
        tokens = _ids(prompt, name)
    if not tokens:
        raise DataError(f"{name} is empty. Give at least one token.")
    try:
        check_tokens(np.asarray(tokens, np.int64), model.config)
    except OverflowError:
        place, token = next((n, x) for n, x in enumerate(tokens) if not -(2**63) <= x < 2**63)
        raise DataError(
            f"{name} has {show(token)} at place {place}, which is not a token id."
        ) from None
    except DataError as error:
        raise type(error)(f"{name}: {error}") from None
    return tokens


def check_characters(characters: int, most: int, name: str = "The prompt") -> None:
    """Raises TooLongError if a text has too many characters to be `most` tokens."""
    if characters > CHARACTERS_A_TOKEN * most:
        raise TooLongError(
            f"{name} has {characters:,} characters, too many for the {most:,} tokens of a sequence "
            f"here: {CHARACTERS_A_TOKEN * most:,} at most are tokenized. Shorten it."
        )


def check_messages_length(messages: Sequence[Any], most: int, name: str = "The prompt") -> None:
    """Raises TooLongError if messages, which may have parts, hold too much text for a prompt."""
    contents = [message.get("content") for message in messages]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    check_characters(sum(len(text) for text in texts if isinstance(text, str)), most, name)


def encode_prompts(model: LanguageModel, prompts: Sequence[Any] | np.ndarray) -> list[list[int]]:
    """Returns the token ids of every prompt; see `encode_prompt`.

    A prompt that occurs several times in the list (chains) is encoded once.
    """
    encoded: dict[int, list[int]] = {}
    prompts = list(prompts)  # keeps the rows of an array, and so their ids
    for index, prompt in enumerate(prompts):
        if id(prompt) not in encoded:
            encoded[id(prompt)] = encode_prompt(model, prompt, name=f"Prompt {index}")
    return [encoded[id(prompt)] for prompt in prompts]


def check_messages(messages: Sequence[Any], name: str = "The prompt") -> None:
    """Raises DataError if a chat message is malformed."""
    try:
        read_messages(messages)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _ids(prompt: Any, name: str) -> list[int]:
    if isinstance(prompt, np.ndarray | jax.Array):
        array = np.asarray(prompt)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{name} must be a string, chat messages or a list of token ids, got an array of "
                f"{array.dtype} and shape {list(array.shape)}; token ids are whole numbers in one "
                "dimension."
            )
        return array.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(
            f"{name} must be a string, chat messages or a list of token ids, got {show(prompt)}."
        )
    # Fast path for plain integers: checking 32,768 of them one by one took 32 ms.
    if set(map(type, prompt)) == {int}:
        return list(prompt)
    for place, token in enumerate(prompt):
        if not is_whole(token):
            raise DataError(
                f"{name} holds {show(token)} at place {place}; token ids are whole numbers."
            )
    return [int(token) for token in prompt]
