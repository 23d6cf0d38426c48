"""Anthropic's messages, /v1/messages, in and out; Claude Code uses them.

Tools have a schema; other types, which Anthropic's own servers run, are ignored with a warning.
Thoughts are sent, and accepted, as thinking blocks without a signature. `max_tokens` is required,
and is reduced to what fits.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checks import Count, show
from dms_jax.generation import Completion
from dms_jax.generation.answer_readers import Arguments, CallStart, Piece, Text, Tool
from dms_jax.serving.chats import (
    Chat,
    call_of,
    content_text,
    result_of,
    template_variables,
    with_leading_system,
)
from dms_jax.serving.fields import SAMPLING, Table, sampling_of
from dms_jax.serving.formatting import Formatter, named_event
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import Asked, GenerationRequest, response_format_rule
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.service import Delta
from dms_jax.serving.tools import Tools, check_tools, make_tool

_FIELDS = Table(
    SAMPLING
    | {
        "messages": Any,
        "system": Any,
        "max_tokens": Count,
        "stop_sequences": list,
        "tools": Any,
        "tool_choice": dict,
        "thinking": dict,
        "output_config": dict,
        "output_format": dict,
        "chat_template_kwargs": Any,
    },
)
_STOP_REASONS = {"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def read(body: bytes, served: ServedModel) -> Asked:
    """Parses a body; raises RefusalError."""
    given, unknown = _FIELDS.read(body, served.models)
    if "max_tokens" not in given:
        raise RefusalError("max_tokens is missing.", param="max_tokens")
    return _asked(given, unknown)


def read_to_count(body: bytes, served: ServedModel) -> Asked:
    """Parses a body for /v1/messages/count_tokens; raises RefusalError."""
    return _asked(*_FIELDS.read(body, served.models))


def _asked(given: Mapping[str, Any], unknown: tuple[str, ...]) -> Asked:
    tools, left_out = _tools(given.get("tools", []))
    choice = given.get("tool_choice", {"type": "auto" if tools else "none"})
    variables = template_variables(given)
    thinking = given.get("thinking", {}).get("type")
    if thinking in ("enabled", "adaptive", "disabled"):
        variables = {"enable_thinking": thinking != "disabled"} | dict(variables)
    effort = given.get("output_config", {}).get("effort")
    if isinstance(effort, str):
        variables = {"reasoning_effort": effort} | dict(variables)
    field = "output_format" if "output_format" in given else "output_config"
    output = given.get("output_format", given.get("output_config", {}).get("format"))
    return Asked.of(
        given,
        (*unknown, *left_out),
        prompts=Chat(_messages(given), _with_choice(tools, choice), variables),
        sampling=sampling_of(given, stop="stop_sequences"),
        max_new_tokens=given.get("max_tokens"),
        output=response_format_rule(output, field),
        output_field=field,
        cuts_max=True,
    )


def _tools(tools: Any) -> tuple[list[Tool], list[str]]:
    """Returns the tools with a schema, and descriptions of the ignored ones."""
    found, left_out = [], []
    for place, tool in enumerate(check_tools(tools)):
        kind = tool.get("type") or "custom" if isinstance(tool, dict) else "custom"
        if kind == "custom":
            found.append(make_tool(tool, f"tools[{place}]", schema="input_schema"))
        else:
            left_out.append(f"tools of type {kind}")
    return found, left_out


def _with_choice(tools: list[Tool], choice: Mapping[str, Any]) -> Tools:
    kinds = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    kind, name = choice.get("type"), choice.get("name")
    if not isinstance(kind, str) or kind not in kinds or (kind == "tool") != isinstance(name, str):
        raise RefusalError(
            'tool_choice must have the type "auto", "any", "none", or "tool" with a name, got '
            f"{show(dict(choice))}.",
            param="tool_choice",
        )
    parallel = choice.get("disable_parallel_tool_use") is not True
    return Tools.of(tools, kinds[kind], named=name, parallel=parallel)


# -- messages ------------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "system" in given:
        system = given["system"]
        text = system if isinstance(system, str) else content_text(system, "system", "system")
        messages.append({"role": "system", "content": text})
    asked = given.get("messages")
    if not isinstance(asked, list) or not asked:
        raise RefusalError("messages must be a list that is not empty.", param="messages")
    for place, message in enumerate(asked):
        _add(messages, message, f"messages[{place}]")
    return with_leading_system(messages)


def _add(messages: list[dict[str, Any]], message: Any, where: str) -> None:
    """Adds a message; its tool results become separate messages."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RefusalError(
            f"{where} must have content, and the role user, assistant or system, got "
            f"{show(message)}.",
            param="messages",
        )
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RefusalError(
            f"{where}: content must be a text or a list of blocks, got {show(content)}.",
            param="messages",
        )
    texts, calls, thoughts = list[str](), list[dict[str, Any]](), list[str]()
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(content_text([_text_only(block)], where))
            case "tool_result" if role == "user":
                result = _result_text(block.get("content"), where)
                messages.append(result_of(block.get("tool_use_id"), result, messages))
            case "tool_use" if role == "assistant":
                name, input = block.get("name"), block.get("input")
                calls.append(call_of(block.get("id"), name, input, where, "messages"))
            case "thinking" if role == "assistant":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking" if role == "assistant":
                pass  # encrypted by another server
            case kind:
                raise RefusalError(
                    f"{where}: blocks of type {show(kind)} are not supported in a message of the "
                    f"{role}.",
                    param="messages",
                )
    if role == "user" and not texts and blocks:
        return  # it had only tool results
    added: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        added["tool_calls"] = calls
    if thought := "".join(thoughts):
        added["reasoning_content"] = thought
    messages.append(added)


def _text_only(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a block without cache and citation fields."""
    return {"type": "text", "text": block.get("text")}


def _result_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        content = [_text_only(each) if _is_text(each) else each for each in content]
    return content_text(content, where)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text"


# -- answers -------------------------------------------------------------------------------------


class MessageFormatter(Formatter):
    """Writes answers as messages of Anthropic's API, whole or as a stream of events."""

    def __init__(self, request: GenerationRequest, served: ServedModel):
        super().__init__(request, served)
        self._blocks: list[str] = []  # types of the blocks
        self._open = False

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        answer = self.answer(completion)
        content: list[dict[str, Any]] = []
        if answer.thought:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            content.append(block | {"input": _parsed(call.arguments)})
        message = self._message(content, self._usage(completions))
        return message | self._stop(completion, called=bool(answer.calls))

    def opening(self) -> list[str]:
        usage = {"input_tokens": sum(map(len, self.request.prompts)), "output_tokens": 0}
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return [named_event({"type": "message_start", "message": message})]

    def events(self, delta: Delta) -> list[str]:
        return [event for piece in self.read(delta) for event in self._piece(piece)]

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        called = "tool_use" in self._blocks
        events = (
            self._close() if self._blocks else self._begin("text", {"text": ""}) + self._close()
        )
        delta = self._stop(completions[0], called=called)
        usage = self._usage(completions)
        ended = named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return [*events, ended, named_event({"type": "message_stop"})]

    def failure(self, error: RefusalError) -> list[str]:
        return [named_event(error_body(error))]

    def _piece(self, piece: Piece) -> list[str]:
        match piece:
            case CallStart(_, id, name):
                return self._begin("tool_use", {"id": id, "name": name, "input": {}})
            case Text(text, thought=True):
                kind, empty = "thinking", {"thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": text}
            case Text(text):
                kind, empty, delta = "text", {"text": ""}, {"type": "text_delta", "text": text}
            case Arguments(_, text):
                kind, empty = "tool_use", {}
                delta = {"type": "input_json_delta", "partial_json": text}
        events = []
        if not self._open or self._blocks[-1] != kind:
            events = self._begin(kind, empty)
        place = {"type": "content_block_delta", "index": len(self._blocks) - 1}
        return [*events, named_event(place | {"delta": delta})]

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[str]:
        events = self._close()
        self._blocks.append(kind)
        self._open = True
        place = {"type": "content_block_start", "index": len(self._blocks) - 1}
        return [*events, named_event(place | {"content_block": {"type": kind, **fields}})]

    def _close(self) -> list[str]:
        if not self._open:
            return []
        self._open = False
        return [named_event({"type": "content_block_stop", "index": len(self._blocks) - 1})]

    def _message(self, content: list[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.request.asked.model,
            "content": content,
            "usage": usage,
        }

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        figures = self.usage(completions)
        return {
            "input_tokens": figures.prompt_tokens - figures.cached_tokens,
            "cache_read_input_tokens": figures.cached_tokens,
            "output_tokens": figures.new_tokens,
            "kv_cache": dict(figures.cache),
        }

    def _stop(self, completion: Completion, *, called: bool) -> dict[str, Any]:
        reason, sequence = _STOP_REASONS[completion.finish_reason], None
        if reason == "stop_sequence":
            sequence = self._stopped_by(completion)
        elif called and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stopped_by(self, completion: Completion) -> str | None:
        """Returns the stop string that ended an answer: it follows the answer's text."""
        stops = self.request.sampling.stop_strings
        whole = self.served.tokenizer.decode(completion.tokens)
        place = max(len(completion.text) - 1, 0)  # the first token may have lost a space
        found = [each for each in stops if each in whole[place:]]
        return min(found, key=whole[place:].find, default=stops[0] if stops else None)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:  # the answer was truncated
        return {}


def error_body(error: RefusalError) -> dict[str, Any]:
    """Returns Anthropic's form of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else _KINDS[400])
    return {"type": "error", "error": {"type": kind, "message": error.message}}
