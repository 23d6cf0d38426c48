"""Content other than text: converted, or refused with its file and line."""

import json

import numpy as np
import pytest

from dms_jax import assets, load
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.data import Exchange, Fields, as_source, encode_answers
from dms_jax.errors import DataError
from tests.checkpoint.test_messages import CALL, CALLING, assistant


def read(tmp_path, *records, **fields):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return as_source(path, **fields)


def test_messages_may_be_a_json_text(tmp_path):
    turns = assistant(content="Yes.")
    source = read(tmp_path, {"messages": json.dumps(turns)}, {"messages": turns})
    assert source[0] == source[1] == turns
    assert read(tmp_path, {"talk": json.dumps(turns)}, fields=Fields(field="talk"))[0] == turns
    prompt = {"prompt": json.dumps(turns[:1]), "response": "Yes."}
    assert read(tmp_path, prompt)[0] == Exchange(turns[:1], "Yes.")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "[1, 2]"}, "'messages' must be a list of messages"),
        ({"messages": assistant(content=5)}, "must be a text, or parts of type text, got 5"),
        ({"messages": json.dumps(assistant(content=None))}, "has no content"),
        ({"prompt": assistant(content=None), "response": "x"}, "has no content"),
        ({"prompt": "x", "response": 5}, "'response': content must be a text"),
        ({"prompt": None, "response": "x"}, "'prompt' must be a text or a list of messages"),
    ],
)
def test_non_text_content_is_refused_with_its_line(tmp_path, record, message):
    with pytest.raises(DataError, match=rf"data.jsonl, line 2: .*{message}"):
        read(tmp_path, {"messages": assistant(content="Yes.")}, record)[1]


def test_parts_of_responses_are_joined(tmp_path):
    parts = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]
    assert read(tmp_path, {"prompt": "Now?", "response": parts})[0] == Exchange("Now?", "Yes.")
    assert read(tmp_path, {"messages": assistant(content=parts)})[0] == assistant(content="Yes.")


@pytest.mark.parametrize("value", [None, ["x"], {"a": 1}, True, float("nan")])
def test_templates_take_texts_and_numbers(value):
    fields = Fields(prompt="{q}", response="{a}")
    with pytest.raises(DataError, match=r"asks for \{a\}, which must be a text or a number, got"):
        fields.document({"q": "x", "a": value})
    assert fields.document({"q": 3, "a": 0.5}) == Exchange("3", "0.5")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load(assets.path("stories260k")).tokenizer
    tokenizer.chat_template = CALLING + "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    return tokenizer


@pytest.mark.parametrize("content", [None, "I look."])
def test_tool_calls_belong_to_the_answer(tokenizer, content):
    ids, answer = encode_answers(assistant(content=content, tool_calls=[CALL]), tokenizer)
    text = tokenizer.decode(np.asarray(ids)[answer].tolist(), skip_special_tokens=False)
    assert text.strip() == f'{content or ""}<call>weather {{"city": "Bonn"}}</call></s>'
