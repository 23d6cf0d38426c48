"""The JSON of answers, whole and in chunks, for one request.

Beside OpenAI's fields, `usage.kv_cache` has what the answers used of the cache
(`dms_jax.cache.accounting.Usage`): live tokens, their peak, reads, bytes.
"""

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dms_jax.generation import Completion
from dms_jax.generation.api import total_usage
from dms_jax.generation.text import TextOffsets
from dms_jax.serving.protocol import Ask
from dms_jax.serving.service import Piece

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
_CACHE = (
    "live_tokens",
    "peak_tokens",
    "kv_reads",
    "compression_ratio",
    "cache_bytes",
    "peak_cache_bytes",
)


@dataclasses.dataclass
class Replies:
    """What one request is answered with.

    Attributes:
      ask: what it asks for.
      chat: whether in the form of /v1/chat/completions.
      model: the name under which the model is served.
      tokenizer: of the model; None if it has none.
    """

    ask: Ask
    chat: bool
    model: str
    tokenizer: Any
    _id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    _created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, TextOffsets] = dataclasses.field(default_factory=dict)
    _last: dict[int, int] = dataclasses.field(default_factory=dict)

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer to a request that is not streamed.

        Args:
          pieces: those of each choice.
        """
        choices = []
        for index, parts in enumerate(pieces):
            completion = parts[-1].completion
            assert completion is not None
            text = {"text": completion.text}
            if self.chat:
                message = {"role": "assistant", "content": completion.text, "refusal": None}
                text = {"message": message}
            whole = dataclasses.replace(
                parts[-1], tokens=completion.tokens, logprobs=completion.logprobs or []
            )
            choices.append(
                {
                    "index": index,
                    **text,
                    "logprobs": self._logprobs(whole),
                    "finish_reason": _REASONS[completion.finish_reason],
                }
            )
        completions = [parts[-1].completion for parts in pieces]
        return self._reply("", choices) | {"usage": self.usage(completions)}

    def opening(self) -> list[str]:
        """The JSON of the chunks before the first text: whose turn it is."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
            for index in range(len(self.ask.prompts) * self.ask.choices)
        ]

    def chunk(self, piece: Piece) -> str | None:
        """The JSON of the chunk of a piece; None if there is nothing to tell yet."""
        if not (piece.text or piece.logprobs or piece.completion):
            return None
        text: dict[str, Any] = {"text": piece.text}
        if self.chat:
            text = {"delta": {"content": piece.text} if piece.text else {}}
        ended = piece.completion
        return self._chunk(
            {
                "index": piece.choice,
                **text,
                "logprobs": self._logprobs(piece),
                "finish_reason": None if ended is None else _REASONS[ended.finish_reason],
            }
        )

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        """The JSON of the chunk after the last text, if it was asked for: what was used."""
        if not self.ask.include_usage:
            return []
        return [to_json(self._reply(".chunk", []) | {"usage": self.usage(completions)})]

    def usage(self, completions: Sequence[Any]) -> dict[str, Any]:
        """What all answers used; a prompt with several counts once."""
        total = total_usage([completion.usage for completion in completions])
        prompt = sum(map(len, self.ask.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": total.new_tokens,
            "total_tokens": prompt + total.new_tokens,
            "kv_cache": {name: getattr(total, name) for name in _CACHE},
        }

    def _chunk(self, choice: dict[str, Any]) -> str:
        head, tail = self._around
        return f"{head}{to_json(choice)}{tail}"

    @functools.cached_property
    def _around(self) -> tuple[str, str]:
        """What stands before and behind the choice in every chunk: it is written once."""
        usage = {"usage": None} if self.ask.include_usage else {}
        head, tail = to_json(self._reply(".chunk", []) | usage).split('"choices":[]')
        return f'{head}"choices":[', f"]{tail}"

    def _reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self._id}",
            "object": f"chat.completion{kind}" if self.chat else "text_completion",
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.ask.sampling.logprobs:
            return None
        texts = self._texts(piece)
        if self.chat:
            content = [
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": self._bytes(token),
                    "top_logprobs": [],
                }
                for text, token, logprob in zip(texts, piece.tokens, piece.logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        if piece.choice not in self._offsets:
            self._offsets[piece.choice] = TextOffsets(self.tokenizer, self._prompt(piece))
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": self._offsets[piece.choice].add(piece.tokens),
        }

    def _prompt(self, piece: Piece) -> list[int]:
        return self.ask.prompts[piece.choice // self.ask.choices]

    def _texts(self, piece: Piece) -> list[str]:
        """The text of each token of a piece: a token may begin with a space only behind another."""
        if self.tokenizer is None:
            return [""] * len(piece.tokens)
        before = [self._last.get(piece.choice, self._prompt(piece)[-1]), *piece.tokens]
        self._last[piece.choice] = before[-1]
        return [self._decode(*pair)[len(self._decode(*pair[:1])) :] for pair in pairwise(before)]

    def _bytes(self, token: int) -> list[int] | None:
        """The bytes of a token, from which clients put characters of several tokens together."""
        own = None if self.tokenizer is None else self.tokenizer.bytes_of(token)
        return None if own is None else list(own)

    def _decode(self, *tokens: int) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
