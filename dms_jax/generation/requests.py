"""One request on the host: its tokens, its text so far, why it ended, what it used."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dms_jax.cache.accounting import Meter, Usage

FinishReason = Literal["end", "stop", "length"]
Prompt = str | Sequence[int] | Sequence[dict[str, str]]
OnTokens = Callable[["Update"], None]


@dataclasses.dataclass(frozen=True)
class Update:
    """News of one request, for streaming.

    Attributes:
      index: which prompt of the call.
      tokens: new tokens since the last update.
      text: new text; held back while it may still change.
      finished: whether this is the last one.
    """

    index: int
    tokens: list[int]
    text: str
    finished: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of one prompt."""

    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str
    usage: Usage


@dataclasses.dataclass
class Request:
    """A prompt on its way to a completion.

    Attributes:
      index: place in the call.
      prompt: token ids that belong to the prompt.
      seed: of its draws; `copy` tells equal prompts apart.
      before: tokens that precede the prompt and are not in the cache yet (a conversation's last).
      generated: new tokens so far; the newest is not in the cache yet.
      live, reads: totals over the rows at each decode step, which feed generated[:-1].
      finish_reason: None while running; "end" for an end token, "stop" for a stop string,
        "length" when it may not grow.
    """

    index: int
    prompt: list[int]
    seed: int
    copy: int
    max_new_tokens: int
    meter: Meter
    before: list[int] = dataclasses.field(default_factory=list)
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    live: list[int] = dataclasses.field(default_factory=list)
    reads: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    reported_tokens: int = 0
    reported_text: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def remaining(self) -> int:
        """New tokens it may still draw."""
        if self.finish_reason is not None:
            return 0
        return self.max_new_tokens - len(self.generated)


class TextTracker:
    """Turns a request's tokens into text as they arrive, and watches for stop strings."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], end_tokens: tuple[int, ...]):
        self._tokenizer, self._stop, self._end_tokens = tokenizer, stop, end_tokens

    def update(self, request: Request) -> str:
        """Updates text, tokens and finish reason; returns the text that may be shown now.

        Text that may still change is held back: an incomplete character, and the beginning of
        what may become a stop string.
        """
        if request.generated and request.generated[-1] in self._end_tokens:
            request.finish_reason = "end"
        elif request.remaining == 0 and request.finish_reason is None:
            request.finish_reason = "length"
        if self._tokenizer is None:
            return ""
        text = self._decode(request.generated)
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            position, stop = min(found)
            request.generated = self._shortest(request.generated, stop)
            kept = len(request.generated)
            del request.logprobs[kept:], request.live[kept - 1 :], request.reads[kept - 1 :]
            request.finish_reason = "stop"
            text = text[:position]
        request.text = text
        safe = len(text) if request.finish_reason else self._safe_length(text)
        shown = text[request.reported_text : safe]
        request.reported_text = max(safe, request.reported_text)
        return shown

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _shortest(self, tokens: list[int], stop: str) -> list[int]:
        """The fewest tokens whose text holds the stop string."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if stop in self._decode(tokens[:middle]) else (middle + 1, high)
            )
        return tokens[:low]

    def _safe_length(self, text: str) -> int:
        end = len(text.rstrip("\ufffd"))
        for stop in self._stop:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if text[:end].endswith(stop[:length]):
                    end -= length
                    break
        return end
