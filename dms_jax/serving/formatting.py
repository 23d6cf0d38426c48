"""The base class of all formatters, with usage and the JSON of events."""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dms_jax.generation import Completion
from dms_jax.generation.answer_readers import AnswerReader, Piece
from dms_jax.generation.answers import Answer, make_reader
from dms_jax.generation.api import total_usage
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import GenerationRequest
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.service import Delta

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_CACHE_FIELDS = (
    "live_tokens",
    "peak_tokens",
    "kv_reads",
    "compression_ratio",
    "cache_bytes",
    "peak_cache_bytes",
)


class Formatter:
    """Formats the response to one request: one JSON object, or the events of a stream.

    Events are complete strings, ready to send.

    Args:
      request: the request.
      served: the model.
    """

    def __init__(self, request: GenerationRequest, served: ServedModel):
        self.request, self.served = request, served
        self.id, self.created = secrets.token_hex(12), int(time.time())
        self._readers: dict[int, AnswerReader] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the response to a request without streaming, from its answers in order."""
        raise NotImplementedError

    def opening(self) -> list[str]:
        """Returns the events before the first text."""
        return []

    def events(self, delta: Delta) -> list[str]:
        """Returns the events of a delta."""
        raise NotImplementedError

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        """Returns the events after the last text."""
        return []

    def failure(self, error: RefusalError) -> list[str]:
        """Returns the last events of a stream that an error ends."""
        raise NotImplementedError

    # -- for subclasses ---------------------------------------------------------------------------

    def read(self, delta: Delta) -> list[Piece]:
        """Returns the pieces that a delta adds to an answer."""
        if delta.choice not in self._readers:
            self._readers[delta.choice] = make_reader(self.request.form)
        reader = self._readers[delta.choice]
        pieces = reader.read(delta.text) if delta.text else []
        return pieces if delta.completion is None else pieces + reader.end()

    def answer(self, completion: Completion) -> Answer:
        """Returns the parts of a whole answer."""
        return Answer.of(self.request.form, completion.text)

    def usage(self, completions: Sequence[Completion]) -> "Figures":
        """Returns the usage of all answers; a prompt with several answers counts once."""
        total, choices = (
            total_usage([each.usage for each in completions]),
            self.request.asked.choices,
        )
        starts = range(0, len(completions), choices)
        return Figures(
            prompt_tokens=sum(map(len, self.request.prompts)),
            new_tokens=total.new_tokens,
            thought_tokens=sum(map(self._thought_tokens, completions)),
            cached_tokens=sum(_cached(completions[each : each + choices]) for each in starts),
            cache={name: getattr(total, name) for name in _CACHE_FIELDS},
        )

    def _thought_tokens(self, completion: Completion) -> int:
        """Returns the number of thought tokens of an answer, markers included."""
        form, tokenizer = self.request.form, self.served.tokenizer
        if form.thinks == "no" or tokenizer is None:
            return 0
        end = tokenizer.backend.token_to_id(form.markers[1])
        if end in completion.tokens:
            return completion.tokens.index(end) + 1
        thought = self.answer(completion).thought
        return len(tokenizer.encode(thought, add_special_tokens=False)) if thought else 0


def _cached(completions: Sequence[Completion]) -> int:
    """Returns the tokens of one prompt that were cached before any of its answers ran.

    Its other answers share the pages, or a copy, of the one that prefills it. A copy reads nothing.
    """
    usages = [each.usage for each in completions]
    read = [each for each in usages if each.cached_tokens or each.prefilled_tokens]
    return min((each.cached_tokens for each in read), default=0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """The usage of the answers to a request.

    Attributes:
      prompt_tokens, new_tokens: numbers of prompt tokens and generated tokens.
      thought_tokens: new tokens that are thoughts.
      cached_tokens: prompt tokens served from cached prefixes.
      cache: the use of the cache (`dms_jax.cache.accounting.Usage`).
    """

    prompt_tokens: int
    new_tokens: int
    thought_tokens: int
    cached_tokens: int
    cache: Mapping[str, Any]

    @property
    def total_tokens(self) -> int:
        """Number of prompt tokens and generated tokens."""
        return self.prompt_tokens + self.new_tokens

    @property
    def completion(self) -> dict[str, Any]:
        """The form of chat and text completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "kv_cache": dict(self.cache),
        }


class TokenTexts:
    """The text and the bytes of each token of an answer, for its log-probabilities.

    Args:
      tokenizer: the model's; None if it has none.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._last = tokenizer, dict[int, int]()

    def of(self, choice: int, prompt: list[int], tokens: Sequence[int]) -> list[str]:
        """Returns the texts of the next tokens, which may depend on the previous token."""
        if self._tokenizer is None:
            return [""] * len(tokens)
        before = [self._last.get(choice, prompt[-1]), *tokens]
        self._last[choice] = before[-1]
        return [self._decode(*pair)[len(self._decode(*pair[:1])) :] for pair in pairwise(before)]

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the bytes of a token, which may be part of a character."""
        own = None if self._tokenizer is None else self._tokenizer.bytes_of(token)
        return None if own is None else list(own)

    def _decode(self, *tokens: int) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def data_event(data: str) -> str:
    """Returns an event without a name."""
    return f"data: {data}\n\n"


def named_event(data: Mapping[str, Any]) -> str:
    """Returns an event whose name is the type of its data."""
    return f"event: {data['type']}\ndata: {to_json(data)}\n\n"
