"""Render the chat template of a checkpoint, in jinja2's sandbox.

A template is code from the checkpoint's author. As in transformers, the sandbox prevents it from
changing its inputs and from reaching files and Python's internals. Its time and memory are not
limited.
"""

import datetime
import functools
import json
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from dms_jax.checkpoint.messages import call_names, read_messages, with_written_arguments
from dms_jax.errors import DataError, plain


def render_chat(template: str, *, messages: Sequence[Any], **variables: Any) -> str:
    """Renders `template` with `messages`, `add_generation_prompt` and its other variables.

    Messages are normalised by `read_messages`. Null content beside tool calls stays null for the
    template; if the template prints it as "None", it becomes an empty text.

    Raises:
        DataError: the template does not compile, rejects these messages, or drops tool calls.
    """
    read = read_messages(messages)
    calling = [place for place, message in enumerate(read) if message.get("tool_calls")]
    if not calling:
        return _render(template, messages=read, **variables)
    try:
        text = _render(template, messages=read, **variables)
    except DataError:  # some templates expect arguments as JSON strings
        read = with_written_arguments(read)
        text = _render(template, messages=read, **variables)
    emptied = [{**message, "content": message["content"] or ""} for message in read]
    if emptied != read:
        other = _render(template, messages=emptied, **variables)
        text = other if text.count("None") > other.count("None") else text
    for place in calling:
        if missing := [name for name in call_names(read[place]) if name not in text]:
            raise DataError(
                f"the chat template leaves out the tool calls of turn {place} ({missing[0]}). "
                "Leave such conversations out, or set a template that writes them "
                "(model.tokenizer.chat_template)."
            )
    return text


def _render(template: str, **variables: Any) -> str:
    try:
        return _compile(template).render(**variables)
    except jinja2.TemplateError as error:
        raise _failed(f"it says: {plain(error, 1000)}") from error
    except Exception as error:  # a template can raise anything
        raise _failed(f"{type(error).__name__}: {plain(error, 1000)}") from error


def _failed(why: str) -> DataError:
    return DataError(f"the chat template failed on the conversation: {why}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Compiles a template in the same environment as transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
