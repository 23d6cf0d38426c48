"""What a request to the server asks for: OpenAI's fields, read one by one, and nothing ignored.

A field that changes nothing at its neutral value (`presence_penalty: 0`) is accepted there and
refused at any other; one that nobody knows is refused, because an answer that silently leaves out
what was asked for is worse than none.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

from dms_jax.checkpoint.messages import text_of
from dms_jax.checks import Count, Number, Range, Seed, Share, Whole, check, check_names, show
from dms_jax.errors import ConfigError, DataError, DmsJaxError, TooLongError, plain
from dms_jax.generation import Sampling
from dms_jax.generation.prompts import (
    Encoder,
    check_characters,
    check_messages_length,
    encode_prompt,
)
from dms_jax.model.template_variables import check_template_variables

TOO_LONG = "context_length_exceeded"  # OpenAI's word, by which clients shorten what they send
MOST_CHOICES = 128
MOST_STOPS = 16
_LONGEST_MESSAGE = 2000


class RefusalError(DmsJaxError):
    """A request that is not served, with what HTTP and OpenAI's clients are told of it.

    Args:
      message: what is wrong and what to do.
      status: of HTTP.
      param: the field that is wrong.
      code: a word for programs.
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


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a request asks for.

    Attributes:
      prompts: token ids, one list for each prompt.
      choices: answers to each.
      sampling: how they are drawn.
      stream: whether they are sent as they are written.
      include_usage: whether a last chunk of the stream says what was used.
    """

    prompts: list[list[int]]
    choices: int
    sampling: Sampling
    stream: bool
    include_usage: bool


# What a field may be.
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

# Fields that are not served, each with the values that ask for nothing.
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
# Fields that are about the caller, and say nothing of the answer.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_ROLES = ("system", "user", "assistant")


def read_body(body: bytes) -> Mapping[str, Any]:
    """The fields of a body, without those that are null.

    Raises:
      RefusalError: it is no JSON object.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RefusalError(f"The body must be a JSON object, got {show(fields)}.")
    return {name: value for name, value in fields.items() if value is not None}


def check_model(fields: Mapping[str, Any], name: str) -> None:
    """Raises RefusalError if another model than the one of this name is asked for."""
    if fields.get("model", name) != name:
        raise unknown_model(fields["model"], name)


def unknown_model(asked: Any, name: str) -> RefusalError:
    """Returns what is said of a model that is not the one of this name."""
    return RefusalError(
        f"There is no model {show(asked)} here, only {name!r}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def read_ask(
    fields: Mapping[str, Any],
    *,
    chat: bool,
    model: Encoder,
    defaults: Sampling,
    max_tokens: int,
    most: int,
    seed: int,
) -> Ask:
    """Reads what is asked for.

    Args:
      fields: of the body.
      chat: whether it is for /v1/chat/completions.
      model: whose tokenizer, template and vocabulary apply.
      defaults: of requests that do not say how to draw; its `max_new_tokens` applies as far as
        there is room.
      max_tokens: the most tokens of a sequence.
      most: the most answers of a request; they are counted before a prompt is read.
      seed: of a request that gives none.

    Raises:
      RefusalError: a field is unknown, not served, missing, or of another kind.
      DataError: a prompt cannot be used.
    """
    known = _CHAT if chat else _COMPLETION
    given = _checked(fields, known)
    sent = [] if chat else _completion_prompts(given)
    choices = given.get("n", 1)
    _check_answers(1 if chat else len(sent), choices, most)
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
    drawn = {name: given[name] for name in ("temperature", "top_p", "min_p") if name in given}
    if "top_k" in given:
        drawn["top_k"] = max(given["top_k"], 0)  # -1 is all of them too
    if "stop" in given:
        drawn["stop"] = _stop(given["stop"])
    sampling = dataclasses.replace(
        defaults,
        **drawn,
        max_new_tokens=asked or min(defaults.max_new_tokens, max_tokens - longest),
        seed=given.get("seed", seed),
        logprobs=given["logprobs"] is not False if "logprobs" in given else False,
    )
    stream = given.get("stream", False)
    return Ask(prompts, choices, sampling, stream, _include_usage(given, stream))


def _too_long(what: object, chat: bool) -> RefusalError:
    return RefusalError(what, param="messages" if chat else "prompt", code=TOO_LONG)


def _check_answers(prompts: int, choices: int, most: int) -> None:
    """Refuses more answers than can run or wait: 16 MB of prompts can ask for a hundred million."""
    if (asked := prompts * choices) > most:
        raise RefusalError(
            f"{asked:,} answers ({prompts:,} prompt{'s'[: prompts > 1]}, n={choices}) are asked "
            f"for at once, and at most {most:,} can run or wait here. Ask for fewer.",
            param="n" if choices > 1 else "prompt",
        )


def _checked(fields: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are served, each of its kind."""
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
    return {name: _field(name, value, known[name]) for name, value in served.items()}


def _field(name: str, value: Any, kind: Any) -> Any:
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
    return _field("stream_options.include_usage", options.get("include_usage", False), bool)


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
    """The prompts: a text, token ids, or a list of either."""
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
    """The token ids of a conversation, as the checkpoint's template writes it."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusalError("messages must be a list that is not empty.", param="messages")
    said = [_message(message, place) for place, message in enumerate(messages)]
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
    check_messages_length(said, most, name)
    try:
        text = tokenizer.apply_chat_template(said, **variables)
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
    """The text of a message, which may come in parts."""
    try:
        return text_of(content)
    except DataError as error:
        raise RefusalError(f"{where}: {error}", param="messages") from None
