"""Incremental detokenization: tokens to text as they arrive, with stop strings.

A tokenizer decodes lists of tokens, not single tokens: a character may span several tokens, and the
first token of a list may lose its leading space. So the text of a request is decoded in overlapping
windows. Each starts where an earlier one ended with a complete character:

    tokens   [ ... | s ... c | ... n ]        s: start of the window, c: committed so far
    committed text += decode(tokens[s:j])[len(decode(tokens[s:c])):]      for the last safe j <= n

If the last committed token decodes alone, the window starts with it (s = c - 1), and the length of
its text is known.

An answer continues its prompt, so its first window begins with a token of the prompt: otherwise the
indentation of a line of code would be lost. After a special token a new text starts.

It is safe to commit after a token that ends neither an incomplete character nor a run of
single-byte tokens (the byte fallback of sentencepiece decodes a run as a whole, and special tokens
do not interrupt it). The work per token does not grow with the length of the text.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from dms_jax.generation.requests import Request

_INCOMPLETE = "\ufffd"
# The most pending tokens; beyond them every complete character is committed.
_MOST_PENDING = 64
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopStrings:
    """Finds stop strings in a growing text, and how much of its end may become one.

        stop strings  "two thread", "three"
        text          "one two thre"     its last 8 characters may become the first, 4 the second

    Args:
      strings: the strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._end = ""  # of the text, one character shorter than the longest string

    @property
    def held(self) -> int:
        """The most characters at the end of the text that may become a stop string."""
        last, most = self._end[-1:], len(self._end) + 1
        lengths = (
            (each, n)
            for each in self._strings
            for n in range(1, min(len(each), most))
            if each[n - 1] == last
        )
        return max((n for each, n in lengths if self._end.endswith(each[:n])), default=0)

    def find(self, more: str) -> int | None:
        """Returns where the first stop string would begin if `more` were appended, or None.

        The position counts from the start of `more`, and is negative before it.
        """
        text = self._end + more
        found = (place for each in self._strings if (place := text.find(each)) >= 0)
        place = min(found, default=None)
        return None if place is None else place - len(self._end)

    def add(self, more: str) -> None:
        """Appends text that completes no stop string."""
        text, longest = self._end + more, max(map(len, self._strings), default=1)
        self._end = text[max(len(text) - longest + 1, 0) :]


@dataclasses.dataclass
class _Stream:
    """The state of decoding one request.

    Attributes:
      before: the end of the prompt, or none.
      start, committed: s and c of the module docstring; s is -1 if the window begins with `before`.
      prefix: length of the text of tokens[s:c].
      stops: the stop strings in its text.
      text: text of tokens[:c].
      seen: number of tokens processed.
      shown: number of characters returned.
    """

    before: list[int]
    start: int
    prefix: int
    stops: StopStrings
    committed: int = 0
    text: str = ""
    seen: int = 0
    shown: int = 0


class TextTracker:
    """Keeps the text, the tokens and the finish reason of requests up to date.

    Args:
      tokenizer: the model's tokenizer; None if it has none, and then there is no text.
      end_tokens: token ids that end a request.
    """

    def __init__(self, tokenizer: Any, end_tokens: tuple[int, ...]):
        self._tokenizer, self._end_tokens = tokenizer, frozenset(end_tokens)
        self._streams: dict[int, _Stream] = {}
        self._open: dict[int, bool] = {}
        self._texts: dict[int, str] = {}

    def end(self, request: Request) -> None:
        """Sets the finish reason of a request that its tokens alone have ended."""
        ends = bool(request.generated) and request.generated[-1] in self._end_tokens
        if ends and not request.sampling.ignore_eos:
            request.finish_reason = "end"
        elif request.remaining == 0 and request.finish_reason is None:
            request.finish_reason = "length"

    def update(self, request: Request) -> str:
        """Processes the new tokens of a request and returns the new final text.

        Text that may still change is held back: incomplete characters and possible stop strings.
        Tokens after the one that completes a stop string are removed from the request.
        """
        self.end(request)
        if self._tokenizer is None:
            return ""
        stop = request.sampling.stop_strings
        stream = self._streams.get(request.index)
        if stream is None:  # a request with text continues an earlier call
            stream = self.begin(request.prompt, stop)
            earlier = StopStrings(stop)
            earlier.add(request.text)
            stream.shown = len(request.text) - earlier.held
            self._streams[request.index] = stream
        tokens = _without_end(request)
        final = request.finish_reason is not None
        found = self._find_stop(stream, tokens, final=final) if stop else None
        if found is not None:
            kept, text = found
            del request.generated[kept:], request.logprobs[kept:], request.likeliest[kept:]
            request.finish_reason = "stop"
        elif request.finish_reason is not None:
            text = self._text(stream, tokens, len(tokens))
        else:
            self._commit(stream, tokens, len(tokens))
            text = stream.text
        stream.seen = len(tokens)
        request.text = text
        safe = len(text) - (0 if request.finish_reason else stream.stops.held)
        shown = text[stream.shown : safe]
        stream.shown = max(safe, stream.shown)
        if request.finish_reason is not None:
            del self._streams[request.index]
        return shown

    def decode(self, request: Request) -> None:
        """Sets the text of a request that has ended, whose tokens `update` has not processed."""
        if self._tokenizer is not None:
            tokens = _without_end(request)
            request.text = self._text(self.begin(request.prompt), tokens, len(tokens))

    def begin(self, prompt: list[int], stops: tuple[str, ...] = ()) -> _Stream:
        """Returns the state before the first token after a prompt."""
        before = self._context(prompt)
        return _Stream(
            before,
            start=-len(before),
            prefix=len(self._decode(before)),
            stops=StopStrings(stops),
        )

    def length(self, stream: _Stream, tokens: list[int]) -> int:
        """Returns the length of the text of the tokens so far, parts of characters included."""
        self._commit(stream, tokens, len(tokens))
        return len(stream.text) + len(self._uncommitted(stream, tokens, len(tokens)))

    def _context(self, prompt: list[int]) -> list[int]:
        """Returns the prompt tokens with which the first window begins; none after a special one.

        That is the last token that decodes alone, which a byte token does not; for a prompt of byte
        tokens only, the last tokens that form whole characters.
        """
        bytes_behind: list[int] = []
        for token in prompt[: -_MOST_PENDING - 1 : -1]:
            text = self._text_of(token)
            if not text and self._tokenizer.decode([token], skip_special_tokens=False):
                break
            if self._length_alone(token):
                return [token]
            bytes_behind.insert(0, token)
        for cut in range(min(4, len(bytes_behind))):  # may start in the middle of a character
            if _INCOMPLETE not in self._decode(bytes_behind[cut:]):
                return bytes_behind[cut:]
        return []

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _text(self, stream: _Stream, tokens: list[int], end: int) -> str:
        """Returns the text of tokens[:end], incomplete characters included."""
        return stream.text + self._uncommitted(stream, tokens, end)

    def _uncommitted(self, stream: _Stream, tokens: list[int], end: int) -> str:
        """Returns the part of the text of tokens[:end] that is not committed."""
        window = tokens[max(stream.start, 0) : end]
        if stream.start >= 0:
            return self._decode(window)[stream.prefix :]
        text, before = self._decode(stream.before + window), self._decode(stream.before)
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(window)  # prompt and answer together do not decode

    def _commit(self, stream: _Stream, tokens: list[int], most: int) -> None:
        """Commits those of tokens[:most] whose text can no longer change."""
        end = most
        while end > stream.committed:
            if not self._may_continue(tokens[end - 1]):
                text = self._uncommitted(stream, tokens, end)
                if not text.endswith(_INCOMPLETE):
                    break
            end -= 1
            if most - end > _MOST_PENDING:
                end, text = self._last_complete(stream, tokens, most)
                break
        else:
            return
        if alone := self._length_alone(tokens[end - 1]):
            stream.start, stream.prefix = end - 1, alone
        elif prefix := len(self._decode(tokens[stream.committed : end])):
            stream.start, stream.prefix = stream.committed, prefix
        else:  # only special tokens or a stripped space; a window needs some text
            stream.prefix += len(text)
        stream.committed, stream.text = end, stream.text + text
        stream.stops.add(text)

    def _last_complete(self, stream: _Stream, tokens: list[int], most: int) -> tuple[int, str]:
        """Returns the end of the last complete character of tokens[:most], and the text up to it.

        A character has at most four byte tokens; if none of the last four ends one, all are taken.
        """
        ends = range(most, most - 4, -1)
        texts = [(end, self._uncommitted(stream, tokens, end)) for end in ends]
        return next((each for each in texts if not each[1].endswith(_INCOMPLETE)), texts[0])

    def _may_continue(self, token: int) -> bool:
        """Whether a run of byte tokens may continue after a token: it is a byte or has no text."""
        if token not in self._open:
            self._open[token] = self._is_byte(token) or not self._text_of(token)
        return self._open[token]

    def _is_byte(self, token: int) -> bool:
        piece = self._tokenizer.backend.id_to_token(token) or ""
        return bool(_BYTE_TOKEN.fullmatch(piece))

    def _length_alone(self, token: int) -> int:
        """Returns the length of the text of a token by itself; 0 if it may depend on others."""
        text = "" if self._may_continue(token) else self._text_of(token)
        return 0 if _INCOMPLETE in text else len(text)

    def _text_of(self, token: int) -> str:
        """Returns the text of a token by itself."""
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def _find_stop(
        self, stream: _Stream, tokens: list[int], *, final: bool
    ) -> tuple[int, str] | None:
        """Returns the fewest tokens whose text contains a stop string, and the text before it.

        The result does not depend on chunks: every token is checked as if it came alone. With
        `final` no more tokens come, so an incomplete character stays incomplete.
        """
        uncommitted = self._uncommitted(stream, tokens, len(tokens))
        # A stop string may appear and vanish while a character is incomplete.
        if _INCOMPLETE not in uncommitted and stream.stops.find(uncommitted) is None:
            return None
        first = min(stream.seen + 1, len(tokens)) if final else stream.seen + 1
        for end in range(first, len(tokens) + 1):
            known = self._uncommitted(stream, tokens, end)
            if not (final and end == len(tokens)):  # U+FFFD may be the start of a character
                known = known.rstrip(_INCOMPLETE)
            position = stream.stops.find(known)
            if position is not None:
                return end, (stream.text + known)[: len(stream.text) + position]
            self._commit(stream, tokens, end)  # so that the next window is short
        return None


def _without_end(request: Request) -> list[int]:
    """Returns the tokens of a text: an end token is none, even if the tokenizer calls it text."""
    return request.generated[:-1] if request.finish_reason == "end" else request.generated


class TextOffsets:
    r"""The offset of each token of an answer in its text, in characters.

    A token that continues a character has the offset of its start:

    # In: " I", "\xf0", "\x9f", "\x98", "\x80", " it"  Out: 0, 2, 2, 2, 2, 3

    Args:
      tokenizer: the model's tokenizer; None if it has none, and then there is no text.
      prompt: token ids before the answer.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self._tokenizer, self._tokens = tokenizer, list[int]()
        self._tracker = TextTracker(tokenizer, ())
        self._stream = None if tokenizer is None else self._tracker.begin(prompt)
        self._length = 0
        self._part, self._begins = b"", 0  # bytes of an incomplete character, and its offset

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> int:
        if self._stream is None:
            return 0
        own = self._tokenizer.bytes_of(token) or b""
        goes_on = bool(self._part) and own[:1] != b"" and 0x80 <= own[0] < 0xC0
        place = self._begins if goes_on else self._length
        reader = codecs.getincrementaldecoder("utf-8")(errors="replace")
        complete = reader.decode(self._part + own if goes_on else own)
        self._part, self._begins = reader.getstate()[0], place + len(complete)
        self._tokens.append(token)
        self._length = self._tracker.length(self._stream, self._tokens)
        return place
