r"""How models write tool calls: the call format of each family.

    hermes         <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
    qwen3-coder    <tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function> ...
    llama3         {"name": "f", "parameters": {"x": 1}}         the answer begins so
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]
    mistral-args   [TOOL_CALLS]f[ARGS]{"x": 1}                   several in a row
    harmony        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}

In harmony an answer is messages in channels, so its reader finds thoughts too:

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.

A format has a parser of streamed answers (`answer_readers`), and `rules`, the grammar of an answer
that must call a tool, or whose calls must match their schemas.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dms_jax.generation.answer_readers import (
    MESSAGE_ENDS,
    CallReader,
    HarmonyReader,
    HermesReader,
    LlamaReader,
    MistralReader,
    ParametersReader,
    Tool,
)
from dms_jax.generation.grammar import json_rule


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """A call format.

    Attributes:
      reader: its parser.
      shown: markers that the text must contain, even if they are special tokens.
      before, between, behind: text before the first call, between two, and after the last;
        `between` is None if an answer has at most one call.
      head, tail: text before and after the arguments of a call; {name} is the function's name.
      trigger: the start of `before`, which content never contains; empty if an answer starts with
        calls.
      header: text before content.
      prose: a Lark rule of content without calls, if an answer starts with calls.
    """

    reader: type[CallReader]
    shown: tuple[str, ...]
    before: str
    between: str | None
    behind: str
    head: str
    tail: str
    trigger: str
    header: str = ""
    prose: str = "TEXT"

    def rules(self, tools: Sequence[Tool], *, parallel: bool, forced: bool) -> Iterator[str]:
        """Yields rules of a Lark grammar, one of them `calls`; TEXT is any text.

        Args:
          tools: the tools that may be called. Arguments match their schema, or are any object if
            the tool is not strict and the call is not forced.
          parallel: whether there may be several calls.
          forced: whether the answer is only calls; else text may come before and after.
        """
        names = []
        for place, tool in enumerate(tools):
            bound = tool.strict or forced
            yield from self.arguments(place, tool.parameters if bound else None)
            head = self.head.replace("{name}", json.dumps(tool.name, ensure_ascii=False)[1:-1])
            names.append(f"{literal(head)} arguments_{place} {literal(self.tail)}")
        yield f"call: {' | '.join(names)}"
        several = parallel and self.between is not None
        more = f" ({literal(self.between or '')} call)*" if several else ""
        called = f"{literal(self.before)} call{more} {literal(self.behind)}"
        if forced:
            yield f"calls: {called}"
        elif self.trigger:
            rest = self.before.removeprefix(self.trigger)
            yield f"opening[lazy]: TEXT {literal(self.trigger)}"
            yield f"called: opening {literal(rest)} call{more} {literal(self.behind)}"
            yield "calls: called? TEXT"
        else:
            yield f"calls: {called} | {literal(self.header)} {self.prose}"

    def arguments(self, place: int, schema: Mapping[str, Any] | None) -> Iterator[str]:
        """Yields the rule `arguments_{place}`, and the rules that it needs.

        Args:
          place: the number of the tool.
          schema: schema of the arguments; None for any object.
        """
        yield f"arguments_{place}: {json_rule({'type': 'object', **(schema or {})})}"


class ParametersFormat(CallFormat):
    """The format of Qwen3-Coder: strings are free except `enum` and `const`; all else is JSON."""

    def arguments(self, place: int, schema: Mapping[str, Any] | None) -> Iterator[str]:
        end = literal("\n</parameter>\n")
        yield f"text_{place}[lazy]: TEXT {end}"
        if schema is None:
            name = f"{literal('<parameter=')} /[^>\\n]+/ {literal('>' + chr(10))}"
            yield f"arguments_{place}: ({name} text_{place})*"
            return
        shared = {each: schema[each] for each in ("$defs", "definitions") if each in schema}
        required, parts = schema.get("required", ()), []
        for number, (name, own) in enumerate(schema.get("properties", {}).items()):
            value, own = f"value_{place}_{number}", own if isinstance(own, dict) else {}
            texts = own.get("enum", [own["const"]] if "const" in own else [])
            if texts and all(isinstance(each, str) and each for each in texts):
                yield f"{value}: ({' | '.join(map(literal, texts))}) {end}"
            elif own.get("type") == "string":
                value = f"text_{place}"
            else:
                yield f"{value}: {value}_json {end}"
                yield f"{value}_json: {json_rule(shared | own)}"
            part = f"{literal(f'<parameter={name}>' + chr(10))} {value}"
            parts.append(part if name in required else f"({part})?")
        yield f"arguments_{place}: {' '.join(parts) or '/ ?/'}"


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(
        reader=HermesReader,
        shown=("<tool_call>", "</tool_call>"),
        before="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        behind="\n</tool_call>",
        head='{"name": "{name}", "arguments": ',
        tail="}",
        trigger="<tool_call>",
    ),
    "qwen3-coder": ParametersFormat(
        reader=ParametersReader,
        shown=("<tool_call>", "</tool_call>"),
        before="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        behind="\n</tool_call>",
        head="<function={name}>\n",
        tail="</function>",
        trigger="<tool_call>",
    ),
    "llama3": CallFormat(
        reader=LlamaReader,
        shown=("<|python_tag|>",),
        before="",
        between="; ",
        behind="",
        head='{"name": "{name}", "parameters": ',
        tail="}",
        trigger="",
        prose=r"/([^{](.|\n)*)?/",
    ),
    "mistral": CallFormat(
        reader=MistralReader,
        shown=("[TOOL_CALLS]",),
        before="[TOOL_CALLS][",
        between=", ",
        behind="]",
        head='{"name": "{name}", "arguments": ',
        tail="}",
        trigger="[TOOL_CALLS]",
    ),
    "mistral-args": CallFormat(
        reader=MistralReader,
        shown=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        before="[TOOL_CALLS]",
        between="[TOOL_CALLS]",
        behind="",
        head="{name}[ARGS]",
        tail="",
        trigger="[TOOL_CALLS]",
    ),
    "harmony": CallFormat(
        reader=HarmonyReader,
        shown=(*MESSAGE_ENDS, "<|channel|>", "<|message|>", "<|constrain|>"),
        before="<|channel|>commentary to=functions.",
        between=None,  # an end token ends the call and the answer
        behind="",
        head="{name} <|constrain|>json<|message|>",
        tail="",
        trigger="",
        header="<|channel|>final<|message|>",
    ),
}


def format_of(template: str, model: str) -> str | None:
    """Returns the name of a model's call format; None if unknown.

    Args:
      template: source of its chat template, which renders earlier calls in that format.
      model: its name, for templates that render none.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "<tool_call>" in template and "<function=" in template:
        return "qwen3-coder"
    if "[TOOL_CALLS]" in template:
        return "mistral-args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama3"
    for part, form in (
        ("hermes", "hermes"),
        ("qwen3-coder", "qwen3-coder"),
        ("qwen", "hermes"),
        ("llama-3", "llama3"),
        ("llama3", "llama3"),
        ("mistral", "mistral"),
        ("ministral", "mistral-args"),
        ("gpt-oss", "harmony"),
    ):
        if part in model.lower():
            return form
    return None


def literal(text: str) -> str:
    """Returns a text as a Lark terminal; "" for an empty one, which Lark does not allow."""
    return json.dumps(text, ensure_ascii=False) if text else ""
