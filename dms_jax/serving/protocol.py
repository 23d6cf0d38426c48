"""OpenAI's protocol: `parse_request` for JSON that comes, `ResponseFormatter` for JSON that goes.

Fields of a request are parsed one by one, and none is ignored. A field that changes nothing at its
neutral value (`presence_penalty: 0`) is accepted there and refused at any other. An unknown field
is refused: an answer that silently leaves out what was asked for is worse than none.

Besides OpenAI's fields, `usage.kv_cache` of an answer has its use of the cache
(`dms_jax.cache.accounting.Usage`): live tokens, their peak, reads, bytes.
"""

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from dms_jax.checkpoint.messages import text_of
from dms_jax.checks import Count, Number, Range, Seed, Share, Whole, check, check_names, show
from dms_jax.errors import ConfigError, DataError, DmsJaxError, TooLongError, plain
from dms_jax.generation import Completion, Sampling
from dms_jax.generation.api import total_usage
from dms_jax.generation.requests import (
    Encoder,
    check_characters,
    check_messages_length,
    encode_prompt,
)
from dms_jax.generation.text import TextOffsets
from dms_jax.model.template_variables import check_template_variables
from dms_jax.serving.service import Delta

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
TOO_LONG = "context_length_exceeded"  # OpenAI's word, by which clients shorten what they send
MOST_CHOICES = 128
MOST_STOPS = 16
_LONGEST_MESSAGE = 2000


class RefusalError(DmsJaxError):
    """A request is refused; the HTTP response to it.

    Args:
      message: what is wrong and what to do.
      status: HTTP status.
      param: the field that is wrong.
      code: OpenAI's code of the error, for programs.
      retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: object,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        # Both may quote what the client sent, half of a surrogate pair included.
        message = plain(self, _LONGEST_MESSAGE, lines=True)
        param = None if self.param is None else plain(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


# -- requests ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A parsed request.

    Attributes:
      prompts: token ids, one list for each prompt.
      choices: answers to each.
      sampling: how they are sampled.
      stream: whether tokens are sent as they are generated.
      include_usage: whether the last chunk of the stream has the usage.
    """

    prompts: list[list[int]]
    choices: int
    sampling: Sampling
    stream: bool
    include_usage: bool


# The type of each field.
_BOTH: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "stream_options": Any,
    "n": Annotated[int, Range(1, MOST_CHOICES)],
    "max_tokens": Count,
    "temperature": Annotated[Number, Range(0)],
    "top_p": Annotated[Number, Range(0, 1, above=True)],
    "top_k": Annotated[int, Range(-1, 2**31 - 1)],
    "min_p": Share,
    "seed": Seed,
    "stop": Any,
}
_CHAT = _BOTH | {
    "messages": Any,
    "max_completion_tokens": Count,
    "logprobs": bool,
    "chat_template_kwargs": Any,
}
_COMPLETION = _BOTH | {"prompt": Any, "logprobs": Whole}

# Fields that are not served, each with its neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_WHY = {
    "tools": "this server calls no tools",
    "tool_choice": "this server calls no tools",
    "functions": "this server calls no tools",
    "function_call": "this server calls no tools",
    "response_format": "answers are not held to a grammar",
    "top_logprobs": "only the log-probability of the chosen token is known",
}
# Fields about the caller, which do not change an answer.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_ROLES = ("system", "user", "assistant")


def unknown_model(asked: Any, name: str) -> RefusalError:
    """Returns the error of a request for another model than the one of this name."""
    return RefusalError(
        f"There is no model {show(asked)} here, only {name!r}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def parse_request(
    body: bytes,
    *,
    chat: bool,
    model: Encoder,
    name: str,
    defaults: Sampling,
    max_tokens: int,
    max_answers: int,
    seed: int,
) -> CompletionRequest:
    """Parses the body of a request.

    Args:
      body: JSON.
      chat: whether it is for /v1/chat/completions.
      model: its tokenizer, template and vocabulary are used.
      name: of the model, in requests.
      defaults: sampling of requests that give none; its `max_new_tokens` applies as far as there is
        room.
      max_tokens: the most tokens of a prompt and its answer.
      max_answers: the most answers of a request, which are counted before a prompt is tokenized.
      seed: of a request that gives none.

    Raises:
      RefusalError: it is no JSON object, asks for another model, or has a field that is unknown,
        not served, missing, or of another type.
      DataError: a prompt cannot be used.
    """
    fields = _parse_json(body)
    if fields.get("model", name) != name:
        raise unknown_model(fields["model"], name)
    known = _CHAT if chat else _COMPLETION
    given = _check_fields(fields, known)
    sent = [] if chat else _completion_prompts(given)
    choices = given.get("n", 1)
    _check_answers(1 if chat else len(sent), choices, max_answers)
    try:
        if chat:
            prompts = [_chat_prompt(given, model, max_tokens)]
        else:
            prompts = [
                encode_prompt(model, prompt, name=f"Prompt {index}", most=max_tokens)
                for index, prompt in enumerate(sent)
            ]
    except TooLongError as error:
        raise _too_long(error, chat) from None
    if not chat and given.get("logprobs", 0) > 1:
        raise RefusalError(
            "logprobs: only the log-probability of the chosen token is known; ask for 0 or 1.",
            param="logprobs",
        )
    longest = max(map(len, prompts))
    if longest >= max_tokens:
        raise _too_long(
            f"The prompt has {longest:,} tokens, which leaves no room for an answer in the "
            f"{max_tokens:,} of a sequence here. Shorten it to at most {max_tokens - 1:,}.",
            chat,
        )
    asked = given.get("max_completion_tokens", given.get("max_tokens"))
    if asked is not None and longest + asked > max_tokens:
        raise RefusalError(
            f"The prompt has {longest:,} tokens and an answer of up to {asked:,} is asked for; a "
            f"sequence may have {max_tokens:,} here. Ask for at most {max_tokens - longest:,}.",
            param="max_completion_tokens" if "max_completion_tokens" in given else "max_tokens",
            code=TOO_LONG,
        )
    chosen = {each: given[each] for each in ("temperature", "top_p", "min_p") if each in given}
    if "top_k" in given:
        chosen["top_k"] = max(given["top_k"], 0)  # -1 is all of them too
    if "stop" in given:
        chosen["stop"] = _stop(given["stop"])
    sampling = dataclasses.replace(
        defaults,
        **chosen,
        max_new_tokens=asked or min(defaults.max_new_tokens, max_tokens - longest),
        seed=given.get("seed", seed),
        logprobs=given["logprobs"] is not False if "logprobs" in given else False,
    )
    stream = given.get("stream", False)
    return CompletionRequest(prompts, choices, sampling, stream, _include_usage(given, stream))


def _parse_json(body: bytes) -> Mapping[str, Any]:
    """Returns the fields of a body, without those that are null."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RefusalError(f"The body must be a JSON object, got {show(fields)}.")
    return {name: value for name, value in fields.items() if value is not None}


def _too_long(what: object, chat: bool) -> RefusalError:
    return RefusalError(what, param="messages" if chat else "prompt", code=TOO_LONG)


def _check_answers(prompts: int, choices: int, max_answers: int) -> None:
    """Refuses more answers than can run or wait: 16 MB of prompts can ask for a hundred million."""
    if (asked := prompts * choices) > max_answers:
        raise RefusalError(
            f"{asked:,} answers ({prompts:,} prompt{'s'[: prompts > 1]}, n={choices}) are asked "
            f"for at once, and at most {max_answers:,} can run or wait here. Ask for fewer.",
            param="n" if choices > 1 else "prompt",
        )


def _check_fields(fields: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are served, each checked by its type."""
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            why = f": {_WHY[name]}" if name in _WHY else ""
            raise RefusalError(
                f"{name}={show(fields[name])} is not served{why}. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    served = {name: v for name, v in fields.items() if name not in (*_NEUTRAL, *_IGNORED)}
    for name in served:
        if name not in known:
            try:
                check_names("A request", [name], [*known])
            except ConfigError as error:
                raise RefusalError(error, param=name, code="unknown_parameter") from None
    return {name: _check_field(name, value, known[name]) for name, value in served.items()}


def _check_field(name: str, value: Any, kind: Any) -> Any:
    try:
        return check(name, value, kind)
    except ConfigError as error:
        raise RefusalError(error, param=name) from None


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise RefusalError(
            f'stream_options takes {{"include_usage": true}}, got {show(options)}.',
            param="stream_options",
        )
    if options and not stream:
        raise RefusalError("stream_options is for stream=true.", param="stream_options")
    return _check_field("stream_options.include_usage", options.get("include_usage", False), bool)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    texts = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    if not texts or len(stops) > MOST_STOPS:
        raise RefusalError(
            f"stop must be a text or a list of up to {MOST_STOPS} texts, none of them empty, got "
            f"{show(stop)}.",
            param="stop",
        )
    return tuple(stops)


def _completion_prompts(given: Mapping[str, Any]) -> list[Any]:
    """Returns the prompts: `prompt` is a text, token ids, or a list of either."""
    if "prompt" not in given:
        raise RefusalError("prompt is missing.", param="prompt")
    prompt = given["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RefusalError(
            f"prompt must be a text, a list of token ids, or a list of either, got {show(prompt)}.",
            param="prompt",
        )
    prompts = prompt if isinstance(prompt[0], str | list) else [prompt]
    if any(isinstance(each, dict) for one in prompts for each in (one, *one[:1])):
        raise RefusalError("prompt takes no messages: /v1/chat/completions does.", param="prompt")
    return prompts


def _chat_prompt(given: Mapping[str, Any], model: Encoder, most: int) -> list[int]:
    """Returns the token ids of a conversation in the checkpoint's chat template."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusalError("messages must be a list that is not empty.", param="messages")
    checked = [_message(message, place) for place, message in enumerate(messages)]
    variables = given.get("chat_template_kwargs", {})
    name = "chat_template_kwargs"
    try:
        check_template_variables(name, check(name, variables, Mapping))
    except ConfigError as error:
        raise RefusalError(error, param=name) from None
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise RefusalError("The model came without a tokenizer; send token ids as a prompt.")
    if tokenizer.chat_template is None:
        raise RefusalError(
            "The checkpoint has no chat template; send the text as prompt to /v1/completions.",
            param="messages",
        )
    name = "The conversation"
    check_messages_length(checked, most, name)
    try:
        text = tokenizer.apply_chat_template(checked, **variables)
        check_characters(len(text), most, name)
        return encode_prompt(model, tokenizer.encode(text, False), name=name, most=most)
    except TooLongError:
        raise
    except DataError as error:
        raise RefusalError(error, param="messages") from None


def _message(message: Any, place: int) -> dict[str, str]:
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise RefusalError(
            f"{where} must have role and content, got {show(message)}.", param="messages"
        )
    if message["role"] not in _ROLES:
        raise RefusalError(
            f"{where}: role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, got "
            f"{show(message['role'])}; this server calls no tools.",
            param="messages",
        )
    more = [name for name, value in message.items() if value and name not in ("role", "content")]
    if more:
        raise RefusalError(f"{where}: {', '.join(more)} is not served.", param="messages")
    return {"role": message["role"], "content": _content(message["content"], where)}


def _content(content: Any, where: str) -> str:
    """Returns the text of a message, which may be in parts."""
    try:
        return text_of(content)
    except DataError as error:
        raise RefusalError(f"{where}: {error}", param="messages") from None


# -- answers -------------------------------------------------------------------------------------

_FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
_CACHE_FIELDS = (
    "live_tokens",
    "peak_tokens",
    "kv_reads",
    "compression_ratio",
    "cache_bytes",
    "peak_cache_bytes",
)


@dataclasses.dataclass
class ResponseFormatter:
    """Formats the response to one request: one JSON object, or chunks of a stream.

    Attributes:
      request: the request.
      chat: whether in the form of /v1/chat/completions.
      model: the model's name.
      tokenizer: the model's; None if it has none.
    """

    request: CompletionRequest
    chat: bool
    model: str
    tokenizer: Any
    _id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    _created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, TextOffsets] = dataclasses.field(default_factory=dict)
    _last: dict[int, int] = dataclasses.field(default_factory=dict)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Returns the response to a request that is not streamed.

        Args:
          deltas: those of each choice.
        """
        choices = []
        for index, own in enumerate(deltas):
            completion = own[-1].completion
            assert completion is not None
            text = {"text": completion.text}
            if self.chat:
                message = {"role": "assistant", "content": completion.text, "refusal": None}
                text = {"message": message}
            whole = dataclasses.replace(
                own[-1], tokens=completion.tokens, logprobs=completion.logprobs or []
            )
            choices.append(
                {
                    "index": index,
                    **text,
                    "logprobs": self._logprobs(whole),
                    "finish_reason": _FINISH_REASONS[completion.finish_reason],
                }
            )
        completions = [own[-1].completion for own in deltas]
        return self._envelope("", choices) | {"usage": self._usage(completions)}

    def opening(self) -> list[str]:
        """Returns the JSON of the chunks before the first text, which have the role."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
            for index in range(len(self.request.prompts) * self.request.choices)
        ]

    def chunk(self, delta: Delta) -> str | None:
        """Returns the JSON of the chunk of a delta; None if there is nothing to send."""
        if not (delta.text or delta.logprobs or delta.completion):
            return None
        text: dict[str, Any] = {"text": delta.text}
        if self.chat:
            text = {"delta": {"content": delta.text} if delta.text else {}}
        ended = delta.completion
        return self._chunk(
            {
                "index": delta.choice,
                **text,
                "logprobs": self._logprobs(delta),
                "finish_reason": None if ended is None else _FINISH_REASONS[ended.finish_reason],
            }
        )

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        """Returns the JSON of the chunk after the last text, which has the usage if asked for."""
        if not self.request.include_usage:
            return []
        return [to_json(self._envelope(".chunk", []) | {"usage": self._usage(completions)})]

    def _usage(self, completions: Sequence[Any]) -> dict[str, Any]:
        """Returns the usage of all answers; a prompt with several of them counts once."""
        total = total_usage([completion.usage for completion in completions])
        prompt = sum(map(len, self.request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": total.new_tokens,
            "total_tokens": prompt + total.new_tokens,
            "prompt_tokens_details": {"cached_tokens": min(total.cached_tokens, prompt)},
            "kv_cache": {name: getattr(total, name) for name in _CACHE_FIELDS},
        }

    def _chunk(self, choice: dict[str, Any]) -> str:
        head, tail = self._around
        return f"{head}{to_json(choice)}{tail}"

    @functools.cached_property
    def _around(self) -> tuple[str, str]:
        """The JSON before and after the choice, which is the same in every chunk."""
        usage = {"usage": None} if self.request.include_usage else {}
        head, tail = to_json(self._envelope(".chunk", []) | usage).split('"choices":[]')
        return f'{head}"choices":[', f"]{tail}"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self._id}",
            "object": f"chat.completion{kind}" if self.chat else "text_completion",
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.request.sampling.logprobs:
            return None
        texts = self._texts(delta)
        if self.chat:
            content = [
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": self._bytes(token),
                    "top_logprobs": [],
                }
                for text, token, logprob in zip(texts, delta.tokens, delta.logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        if delta.choice not in self._offsets:
            self._offsets[delta.choice] = TextOffsets(self.tokenizer, self._prompt(delta))
        return {
            "tokens": texts,
            "token_logprobs": delta.logprobs,
            "top_logprobs": None,
            "text_offset": self._offsets[delta.choice].add(delta.tokens),
        }

    def _prompt(self, delta: Delta) -> list[int]:
        return self.request.prompts[delta.choice // self.request.choices]

    def _texts(self, delta: Delta) -> list[str]:
        """Returns the text of each token: some begin with a space only behind another token."""
        if self.tokenizer is None:
            return [""] * len(delta.tokens)
        before = [self._last.get(delta.choice, self._prompt(delta)[-1]), *delta.tokens]
        self._last[delta.choice] = before[-1]
        return [self._decode(*pair)[len(self._decode(*pair[:1])) :] for pair in pairwise(before)]

    def _bytes(self, token: int) -> list[int] | None:
        """Returns the bytes of a token: a character may be the bytes of several tokens."""
        own = None if self.tokenizer is None else self.tokenizer.bytes_of(token)
        return None if own is None else list(own)

    def _decode(self, *tokens: int) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
