"""Normalising chat messages, and rendering tool calls."""

import json

import pytest

from dms_jax.checkpoint.chat import render_chat
from dms_jax.checkpoint.messages import messages_in, read_messages
from dms_jax.errors import DataError

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
# A template that writes content unchanged and ignores calls, like many fine-tuned checkpoints.
PLAIN = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
# Writes calls like Qwen2.5's template.
CALLING = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if call.function %}{% set call = call.function %}"
    "{% endif %}<call>{{ call.name }} {{ call.arguments | tojson }}</call>{% endfor %}</s>"
    "{% endfor %}"
)


def assistant(**fields):
    return [{"role": "user", "content": "Now?"}, {"role": "assistant", **fields}]


def test_parts_are_joined():
    parts = [{"type": "text", "text": "Now"}, {"type": "text", "text": "?", "image": None}]
    assert read_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "Now?"}
    ]
    assert render_chat(PLAIN, messages=[{"role": "user", "content": parts}]) == "<s>user: Now?</s>"


def test_null_fields_are_removed():
    """A template that tests `'tool_calls' in message` would iterate over null."""
    (read,) = read_messages([{"role": "user", "content": "x", "tool_calls": None, "name": None}])
    assert read == {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"content": None}, r"turn 1 \(assistant\) has no content"),
        ({}, r"turn 1 \(assistant\) has no content"),
        ({"content": None, "tool_calls": []}, "has no content"),
        ({"content": 5}, "content must be a text, or parts of type text, got 5"),
        ({"content": {"type": "text", "text": "x"}}, "content must be a text"),
        ({"content": ["x"]}, "got 'x'"),
        ({"content": [{"text": "x"}]}, "content must be a text"),
        ({"content": []}, r"got \[\]"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "got {'type': 'image_url'"),
        ({"content": [{"type": "text", "text": None}]}, "content must be a text"),
        ({"content": "x", "function_call": {"name": "f"}}, "write it as tool_calls"),
        ({"content": None, "tool_calls": {"name": "f"}}, "tool_calls must be a list"),
        ({"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}, "a tool call is"),
    ],
)
def test_other_content_is_refused(fields, message):
    with pytest.raises(DataError, match=message):
        read_messages(assistant(**fields))


@pytest.mark.parametrize("turns", ["text", {"role": "user"}, [3], [{"content": "x"}], None])
def test_malformed_conversation_is_refused(turns):
    with pytest.raises(DataError, match=r"a chat message is a dict|a list of messages"):
        read_messages(turns)


@pytest.mark.parametrize("content", [None, "", "I look."])
@pytest.mark.parametrize("arguments", [{"city": "Bonn"}, '{"city": "Bonn"}'])
def test_tool_calls(content, arguments):
    """Templates expect arguments as data; OpenAI's clients send them as JSON text."""
    calls = [{"function": {"name": "weather", "arguments": arguments}}]
    text = render_chat(CALLING, messages=assistant(content=content, tool_calls=calls))
    said = content or ""
    assert text == (
        f'<s>user: Now?</s><s>assistant: {said}<call>weather {{"city": "Bonn"}}</call></s>'
    )


def test_arguments_are_text_if_the_template_needs_it():
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c."
    template += "function.arguments }}{% endfor %}{% endfor %}"
    text = render_chat(template, messages=assistant(content=None, tool_calls=[CALL]))
    assert text == 'weather{"city": "Bonn"}'


def test_null_content_is_not_written_as_none():
    template = CALLING.replace("{% if m.content %}{{ m.content }}{% endif %}", "{{ m.content }}")
    text = render_chat(template, messages=assistant(content=None, tool_calls=[CALL]))
    assert "None" not in text
    assert "<s>assistant: <call>weather" in text


def test_template_can_ask_for_null_content():
    template = "{% for m in messages if m.content is none %}{{ m.tool_calls[0].function.name }}"
    template += "{% endfor %}"
    text = render_chat(template, messages=assistant(content=None, tool_calls=[CALL]))
    assert text == "weather"


@pytest.mark.parametrize("content", [None, "I look."])
def test_template_without_tool_calls_is_refused(content):
    with pytest.raises(DataError, match=r"leaves out the tool calls of turn 1 \(weather\)"):
        render_chat(PLAIN, messages=assistant(content=content, tool_calls=[CALL]))


def test_messages_as_json_text():
    turns = assistant(content="Yes.")
    assert messages_in(json.dumps(turns)) == turns
    for text in ("Once upon", "[1, 2]", "[]", "[", '[{"content": "x"}]', '{"role": "user"}'):
        assert messages_in(text) is None
