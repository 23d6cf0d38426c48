"""OpenAI's Responses API, /v1/responses, in and out; Codex uses only this one.

Nothing is stored: every request has the whole conversation, and `previous_response_id` is refused.
Tools are functions; the model sees functions of a namespace with its name as a prefix. Other types,
which OpenAI's own servers run, are ignored with a warning.

An answer is a list of items, and a stream has events of each, in this order:

    response.created, response.in_progress
      response.output_item.added            an item begins: reasoning, message or function_call
        response.content_part.added         of the first two
        response.reasoning_text.delta | output_text.delta | function_call_arguments.delta ...
        ... .done, response.content_part.done
      response.output_item.done             the whole item
    response.completed | response.incomplete | response.failed
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dms_jax.checks import Count, show
from dms_jax.generation import Completion
from dms_jax.generation.answer_readers import Arguments, CallStart, Piece, Text, Tool
from dms_jax.serving.chat_api import effort_variables
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
from dms_jax.serving.tools import Tools, check_tools, make_tool, read_choice

_FIELDS = Table(
    SAMPLING
    | {
        "input": Any,
        "instructions": str,
        "max_output_tokens": Count,
        "tools": Any,
        "tool_choice": Any,
        "parallel_tool_calls": bool,
        "text": dict,
        "reasoning": dict,
        "chat_template_kwargs": Any,
    },
    why={"prompt": "send instructions and input"},
)
_SERVED_TOOLS = ("function", "namespace")
_SEPARATOR = "."
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def read(body: bytes, served: ServedModel) -> Asked:
    """Parses a body; raises RefusalError."""
    given, unknown = _FIELDS.read(body, served.models)
    tools, left_out = _tools(given.get("tools", []))
    choice, named = read_choice(given, tools)
    parallel = given.get("parallel_tool_calls", True)
    variables = template_variables(given)
    effort = given.get("reasoning", {}).get("effort")
    if isinstance(effort, str):
        variables = effort_variables(effort) | dict(variables)
    chat = Chat(
        _messages(given),
        Tools.of(tools, choice, named=named, parallel=parallel),
        variables,
        field="input",
    )
    echoed = {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "parallel_tool_calls": parallel,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [tool for tool in given.get("tools", []) if tool["type"] in _SERVED_TOOLS],
        "text": given.get("text", {"format": {"type": "text"}}),
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
    }
    return Asked.of(
        given,
        (*unknown, *left_out),
        prompts=chat,
        sampling=sampling_of(given),
        max_new_tokens=given.get("max_output_tokens"),
        output=response_format_rule(given.get("text", {}).get("format"), "text.format"),
        output_field="text.format",
        max_field="max_output_tokens",
        details=echoed,
    )


def _tools(tools: Any) -> tuple[list[Tool], list[str]]:
    """Returns the functions, and descriptions of the ignored tools."""
    found, left_out = [], []
    for place, tool in enumerate(check_tools(tools)):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise RefusalError(f"tools[{place}] must have a type, got {show(tool)}.", param="tools")
        match kind:
            case "function":
                found.append(make_tool(tool, f"tools[{place}]"))
            case "namespace":
                own, more = _tools(tool.get("tools"))
                prefix = _in_namespace(tool.get("name"), "", f"tools[{place}]")
                found += [dataclasses.replace(each, name=prefix + each.name) for each in own]
                left_out += more
            case _:
                left_out.append(f"tools of type {kind}")
    return found, left_out


def _in_namespace(namespace: Any, name: Any, where: str) -> str:
    """Returns the name that the model sees for a function of a namespace."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        raise RefusalError(
            f"{where}: a namespace and a function have names, which are texts, got "
            f"{show(namespace)} and {show(name)}.",
            param="tools",
        )
    return f"{namespace}{_SEPARATOR}{name}"


# -- items ---------------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the items of `input` as messages; items of one answer form one message."""
    messages: list[dict[str, Any]] = []
    if "instructions" in given:
        messages.append({"role": "system", "content": given["instructions"]})
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RefusalError(
            f"input must be a text, or a list of items that is not empty, got {show(items)}.",
            param="input",
        )
    for place, item in enumerate(items):
        _add(messages, item, f"input[{place}]")
    return with_leading_system(messages)


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Adds an item to the messages."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise RefusalError(
                    f"{where}: role must be {', '.join(_ROLES)}, got {show(role)}.", param="input"
                )
            text = content_text(item.get("content"), where, "input")
            if role == "assistant":
                answer = _answer(messages)
                answer["content"] += text
            else:
                messages.append({"role": _ROLES[role], "content": text})
        case "reasoning":
            content = item.get("content") or item.get("summary") or []
            parts = content if isinstance(content, list) else []
            texts = [part.get("text", "") for part in parts if isinstance(part, dict)]
            if thought := "".join(text for text in texts if isinstance(text, str)):
                _answer(messages, new=True)["reasoning_content"] = thought
        case "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            if item.get("namespace"):
                name = _in_namespace(item["namespace"], name, where)
            call = call_of(item.get("call_id"), name, arguments, where, "input")
            _answer(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else content_text(output, where, "input")
            messages.append(result_of(item.get("call_id"), text, messages))
        case _:
            raise RefusalError(
                f"{where}: items of type {show(kind)} are not supported; there are message, "
                "reasoning, function_call and function_call_output.",
                param="input",
            )


def _answer(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Returns the last message if it is the assistant's, else a new one."""
    ends = bool(messages) and messages[-1]["role"] == "assistant"
    if not ends or (new and (messages[-1]["content"] or "tool_calls" in messages[-1])):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# -- answers -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Item:
    """An item of an answer, while it is written."""

    kind: str
    id: str
    text: str = ""
    name: str = ""
    namespace: str = ""
    call_id: str = ""

    def written(self, status: str) -> dict[str, Any]:
        """Returns it as JSON."""
        head = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "function_call":
                call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
                return head | call | ({"namespace": self.namespace} if self.namespace else {})
            case "reasoning":
                return head | {"summary": [], "content": self.parts}
        return head | {"role": "assistant", "content": self.parts}

    @property
    def part(self) -> dict[str, Any]:
        """The only content part of the item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Its parts; none before its text begins."""
        return [self.part] if self.text else []


_DELTAS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ResponseFormatter(Formatter):
    """Formats responses; `request.asked.details` are the fields to echo."""

    def __init__(self, request: GenerationRequest, served: ServedModel):
        super().__init__(request, served)
        tools = request.asked.details["tools"]
        self._namespaces = [
            _in_namespace(tool["name"], "", "tools")
            for tool in tools
            if tool["type"] == "namespace"
        ]
        self._items: list[_Item] = []
        self._open = False  # whether the last item may continue
        self._number = 0  # sequence number of the next event

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        self._read(Delta(0, completion.text, [], [], completion), lambda *given, **more: None)
        return self._ended(completions)

    def opening(self) -> list[str]:
        response = self._response("in_progress")
        return [
            self._event(f"response.{kind}", response=response)
            for kind in ("created", "in_progress")
        ]

    def events(self, delta: Delta) -> list[str]:
        events: list[str] = []
        self._read(delta, lambda kind, **data: events.append(self._event(kind, **data)))
        return events

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        response = self._ended(completions)
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: RefusalError) -> list[str]:
        told = {"code": error.code or error.kind, "message": error.message}
        return [self._event("response.failed", response=self._response("failed", error=told))]

    # -- items ------------------------------------------------------------------------------------

    def _read(self, delta: Delta, tell: Callable[..., None]) -> None:
        """Adds a delta to the items, and calls `tell` with its events."""
        for piece in self.read(delta):
            self._add(piece, tell)
        if delta.completion is not None:
            self._close(tell)

    def _add(self, piece: Piece, tell: Callable[..., None]) -> None:
        match piece:
            case CallStart(_, id, name):
                namespace = next((n for n in self._namespaces if name.startswith(n)), "")
                own = name.removeprefix(namespace)
                namespace = namespace.removesuffix(_SEPARATOR)
                self._begin("function_call", tell, name=own, namespace=namespace, call_id=id)
                return
            case Text(_, thought=True):
                kind = "reasoning"
            case Text():
                kind = "message"
            case Arguments():
                kind = "function_call"
        if not self._open or self._items[-1].kind != kind:
            self._begin(kind, tell)
        item = self._items[-1]
        more = {} if kind == "function_call" else {"content_index": 0}
        if kind != "function_call" and not item.text:
            tell("response.content_part.added", **self._place(item), **more, part=item.part)
        item.text += piece.text
        more |= {"logprobs": []} if kind == "message" else {}
        tell(f"{_DELTAS[kind]}.delta", **self._place(item), **more, delta=piece.text)

    def _begin(self, kind: str, tell: Callable[..., None], **fields: str) -> None:
        self._close(tell)
        number = len(self._items)
        self._items.append(_Item(kind, f"{_PREFIXES[kind]}_{self.id}_{number}", **fields))
        self._open = True
        added = self._items[-1].written("in_progress")
        tell("response.output_item.added", output_index=number, item=added)

    def _close(self, tell: Callable[..., None]) -> None:
        """Ends the last item."""
        if not self._open:
            return
        item, self._open = self._items[-1], False
        place = self._place(item)
        if item.kind == "function_call":
            tell(f"{_DELTAS[item.kind]}.done", **place, name=item.name, arguments=item.text)
        elif item.text:
            more = {"logprobs": []} if item.kind == "message" else {}
            tell(f"{_DELTAS[item.kind]}.done", **place, content_index=0, **more, text=item.text)
            tell("response.content_part.done", **place, content_index=0, part=item.part)
        done = item.written("completed")
        tell("response.output_item.done", output_index=place["output_index"], item=done)

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items) - 1}

    # -- responses --------------------------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> str:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **data})

    def _ended(self, completions: Sequence[Completion]) -> dict[str, Any]:
        figures = self.usage(completions)
        usage = {
            "input_tokens": figures.prompt_tokens,
            "input_tokens_details": {"cached_tokens": figures.cached_tokens},
            "output_tokens": figures.new_tokens,
            "output_tokens_details": {"reasoning_tokens": figures.thought_tokens},
            "total_tokens": figures.total_tokens,
            "kv_cache": dict(figures.cache),
        }
        if completions[0].finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=details, usage=usage)
        return self._response("completed", usage=usage)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        sampling = self.request.sampling
        response = {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.asked.model,
            "output": [item.written("completed") for item in self._items],
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
        }
        return response | self.request.asked.details | more
