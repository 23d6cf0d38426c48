"""OpenAI's chat completions, /v1/chat/completions, in and out.

Thoughts before an answer are `reasoning_content`, as in DeepSeek, vLLM and SGLang.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checks import Count, show
from dms_jax.generation import Completion
from dms_jax.generation.answer_readers import Arguments, CallStart, Text, Tool
from dms_jax.generation.answers import Call
from dms_jax.serving.chats import (
    Chat,
    call_of,
    content_text,
    result_of,
    template_variables,
    with_leading_system,
)
from dms_jax.serving.completions_api import FINISH_REASONS, CompletionFormatter
from dms_jax.serving.fields import (
    COMPLETING,
    Table,
    include_usage,
    sampling_of,
)
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import Asked, output_rule
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.service import Delta
from dms_jax.serving.tools import Tools, check_tools, make_tool, read_choice

_FIELDS = Table(
    COMPLETING
    | {
        "messages": Any,
        "max_completion_tokens": Count,
        "logprobs": bool,
        "tools": Any,
        "tool_choice": Any,
        "parallel_tool_calls": bool,
        "reasoning_effort": str,
        "chat_template_kwargs": Any,
    },
    why={
        "prompt": "/v1/completions takes a prompt",
        "system": "send a message with the role system",
    },
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read(body: bytes, served: ServedModel) -> Asked:
    """Parses a body; raises RefusalError."""
    given, unknown = _FIELDS.read(body, served.models)
    output, output_field = output_rule(given)
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return Asked.of(
        given,
        unknown,
        prompts=read_chat(given),
        sampling=sampling_of(given) | {"logprobs": given.get("logprobs", False)},
        max_new_tokens=given.get(name),
        choices=given.get("n", 1),
        output=output,
        output_field=output_field,
        max_field=name,
        details=include_usage(given),
    )


def read_chat(given: Mapping[str, Any], *, begins_answer: bool = True) -> Chat:
    """Returns the conversation of a request; raises RefusalError."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusalError("messages must be a list that is not empty.", param="messages")
    checked: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        checked.append(_message(message, f"messages[{place}]", checked))
    variables = template_variables(given)
    effort = given.get("reasoning_effort")
    return Chat(
        with_leading_system(checked),
        read_tools(given),
        ({} if effort is None else effort_variables(effort)) | dict(variables),
        begins_answer=begins_answer,
    )


def effort_variables(effort: str) -> dict[str, Any]:
    """Returns the template variables that set how much a model thinks."""
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def read_tools(given: Mapping[str, Any]) -> Tools:
    """Returns the tools of a request; raises RefusalError."""
    tools = [
        _tool(tool, f"tools[{n}]") for n, tool in enumerate(check_tools(given.get("tools", [])))
    ]
    choice, named = read_choice(given, tools)
    parallel = given.get("parallel_tool_calls", True)
    return Tools.of(tools, choice, named=named, parallel=parallel)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" not in tool:
        raise RefusalError(
            f'{where} must be {{"type": "function", "function": {{...}}}}, got {show(tool)}.',
            param="tools",
        )
    return make_tool(tool["function"], f"{where}.function")


def _message(message: Any, where: str, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise RefusalError(
            f"{where} must have role and content, got {show(message)}.", param="messages"
        )
    role = message["role"]
    if role not in _ROLES:
        raise RefusalError(
            f"{where}: role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, got {show(role)}.",
            param="messages",
        )
    for name in ("function_call", "audio"):
        if message.get(name):
            raise RefusalError(f"{where}: {name} is not supported.", param="messages")
    calls = _calls(message.get("tool_calls"), where) if role == "assistant" else []
    content = message.get("content")
    if content is None and role != "assistant":
        raise RefusalError(
            f"{where} must have role and content, got {show(message)}.", param="messages"
        )
    text = "" if content is None else content_text(content, where)
    if role == "tool":
        return result_of(message.get("tool_call_id"), text, before)
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if calls:
        read["tool_calls"] = calls
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(thought, str):
        read["reasoning_content"] = thought
    return read


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RefusalError(
            f"{where}: tool_calls must be a list of calls, got {show(calls)}.", param="messages"
        )
    found = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict):
            raise RefusalError(
                f"{where}: a tool call has a function, got {show(call)}.", param="messages"
            )
        name, arguments = function.get("name"), function.get("arguments")
        found.append(call_of(call.get("id"), name, arguments, where, "messages"))
    return found


class ChatFormatter(CompletionFormatter):
    """Writes answers as chat completions, whole or as a stream of chunks."""

    names = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._calling: set[int] = set()  # choices that have called a tool

    def opening(self) -> list[str]:
        role = {"role": "assistant", "content": ""}
        return [
            self.chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
            for index in range(self.request.answers)
        ]

    def whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        answer = self.answer(completion)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_written(call) for call in answer.calls]
        return {
            "message": message,
            "logprobs": self.logprobs(index, completion.tokens, completion.logprobs or []),
            "finish_reason": _reason(completion, bool(answer.calls)),
        }

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        told, calls = dict[str, Any](), dict[int, dict[str, Any]]()
        for piece in self.read(delta):
            match piece:
                case Text(text, thought):
                    name = "reasoning_content" if thought else "content"
                    told[name] = told.get(name, "") + text
                case CallStart(index, id, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id, "type": "function"}
                    calls[index]["function"] = function
                    self._calling.add(delta.choice)
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            told["tool_calls"] = list(calls.values())
        ended = delta.completion
        if not (told or delta.logprobs or ended):
            return None
        return {
            "delta": told,
            "logprobs": self.logprobs(delta.choice, delta.tokens, delta.logprobs),
            "finish_reason": None
            if ended is None
            else _reason(ended, delta.choice in self._calling),
        }

    def logprobs(
        self, choice: int, tokens: list[int], logprobs: list[float]
    ) -> dict[str, Any] | None:
        if not self.request.sampling.logprobs:
            return None
        texts = self.token_texts.of(choice, self.prompt_of(choice), tokens)
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": self.token_texts.bytes_of(token),
                "top_logprobs": [],
            }
            for text, token, logprob in zip(texts, tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _reason(completion: Completion, called: bool) -> str:
    reason = FINISH_REASONS[completion.finish_reason]
    return "tool_calls" if called and reason == "stop" else reason


def _written(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
