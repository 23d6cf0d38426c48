"""Tokenizers of Hugging Face directories."""

import json
import pathlib
import shutil

import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.checkpoint import tokenizer as tokenizer_module
from dms_jax.errors import CheckpointError, DataError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
KINDS = ["qwen2", "gpt2", "mistral", "stories260k", "gemma"]
CHATML = (
    "{% for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def expected(kind: str) -> list:
    return json.loads((GOLDEN / kind / "expected.json").read_text())


@pytest.fixture
def stories(tmp_path) -> pathlib.Path:
    """A directory with the tokenizer of stories260K, to be changed."""
    shutil.copy(GOLDEN / "stories260k" / "tokenizer.json", tmp_path)
    write_config(tmp_path)
    return tmp_path


def write_config(directory: pathlib.Path, **fields) -> None:
    fields = {"tokenizer_class": "LlamaTokenizer"} | fields
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_reference_and_back(kind):
    tokenizer = Tokenizer.from_directory(GOLDEN / kind)
    for text, ids in expected(kind):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        # stories260K's tokenizer merges runs of spaces, so they cannot come back.
        if kind == "gemma" and "\u2581" in text:  # which it takes for a space
            text = text.replace("\u2581", " ")
        if kind != "stories260k" or (text == text.strip(" ") and "  " not in text):
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral", "stories260k"])
def test_bytes_of_tokens_are_the_text(kind):
    """Also for characters of several tokens."""
    tokenizer = Tokenizer.from_directory(GOLDEN / kind)
    text = "na\u00efve \u4f60\u597d \U0001f642\n\ufffd end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.decode([index]) for index in ids)  # parts of characters
    parts = [tokenizer.bytes_of(index) for index in ids]
    assert b"".join(parts).removeprefix(b" ").decode() == text


def test_bytes_of_special_and_unknown_tokens():
    tokenizer = Tokenizer.from_directory(GOLDEN / "mistral")
    assert tokenizer.bytes_of(tokenizer.bos_token_id) == b"<s>"
    assert tokenizer.bytes_of(tokenizer.vocab_size) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_saved_as_tokenizer_json(kind, tmp_path):
    tokenizer = Tokenizer.from_directory(GOLDEN / kind)
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    again = Tokenizer.from_directory(tmp_path)
    assert again.special_tokens == tokenizer.special_tokens
    for text, _ in expected(kind):
        assert again.encode(text) == tokenizer.encode(text)


def test_shipped_tokenizer():
    shipped = Tokenizer.from_directory(assets.path("stories260k"))
    assert (shipped.bos_token_id, shipped.eos_token_id, shipped.vocab_size) == (1, 2, 512)
    ids = shipped.encode("Once upon a time, Lily")
    assert ids[0] == 1
    assert shipped.decode(ids) == "Once upon a time, Lily"
    assert shipped.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert shipped.encode("Once upon a time, Lily", add_special_tokens=False) == ids[1:]


def test_long_text_has_the_same_ids():
    """It is encoded without Python's lock."""
    text = "Once upon a time there was a little dog. " * 2000
    assert len(text) > tokenizer_module._LONG
    shipped = Tokenizer.from_directory(assets.path("stories260k"))
    assert shipped.encode(text) == shipped.backend.encode(text).ids


@pytest.mark.parametrize(
    ("fields", "text_ids"),
    [
        ({}, [1]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [1]),  # the text may continue
        ({"add_eos_token": True, "add_bos_token": False}, []),
    ],
)
def test_ends_of_a_sequence(stories, fields, text_ids):
    write_config(stories, **fields)
    assert Tokenizer.from_directory(stories).encode("") == text_ids


def test_truncation_and_padding_of_training_are_dropped(stories, tmp_path):
    tokenizer = Tokenizer.from_directory(stories)
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.enable_padding(length=9)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_directory(tmp_path).encode("Once upon a time", add_special_tokens=False)
    assert len(ids) > 3
    assert len(ids) < 9


def test_no_tokenizer_at_all(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", b"[1]", "not a JSON object"),
        ("tokenizer_config.json", b"\xff\xfe", "cannot be read as JSON"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "eos_token must be a text"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template"),
    ],
)
def test_damaged_file_is_named(stories, name, content, message):
    (stories / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_directory(stories)


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt"])
def test_tokenizer_in_another_layout_is_refused(name, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"has {name} but no tokenizer.json.*: python -c"):
        Tokenizer.from_directory(tmp_path)
    shutil.copy(GOLDEN / "gpt2" / "tokenizer.json", tmp_path)
    assert Tokenizer.from_directory(tmp_path) is not None


def test_chat_template(stories):
    write_config(stories, chat_template=CHATML)
    tokenizer = Tokenizer.from_directory(stories)
    messages = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hé"}]
    turns = "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\nHé<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == turns
    assert tokenizer.apply_chat_template(messages) == turns + "<|im_start|>assistant\n"
    with pytest.raises(DataError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(DataError, match=r"turn 0 \(user\) has no content"):
        tokenizer.apply_chat_template([{"role": "user"}])


def test_template_variables_and_helpers(stories):
    source = "{{ bos_token }}{{ tools | tojson }}{% generation %}{{ mood }}{% endgeneration %}"
    (stories / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_directory(stories)
    text = tokenizer.apply_chat_template([], tools=[{"name": "é<"}], mood="calm")
    assert text == '<s>[{"name": "é<"}]calm'
    tokenizer.save(stories)
    assert Tokenizer.from_directory(stories).chat_template == source


def test_named_templates(stories):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_config(stories, chat_template=named)
    tokenizer = Tokenizer.from_directory(stories)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{}]) == "tools"


def test_template_of_a_processor(stories):
    (stories / "chat_template.json").write_text('{"chat_template": "pictures"}')
    assert Tokenizer.from_directory(stories).chat_template == "pictures"
    write_config(stories, chat_template="text")
    assert Tokenizer.from_directory(stories).chat_template == "text"
    write_config(stories)
    (stories / "chat_template.json").write_text('{"chat_template": [1]}')
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template must be"):
        Tokenizer.from_directory(stories)


def test_no_chat_template(stories):
    with pytest.raises(DataError, match="no chat template"):
        Tokenizer.from_directory(stories).apply_chat_template([])


def test_shown_special_tokens_are_decoded():
    tokenizer = Tokenizer.from_directory(GOLDEN / "qwen2")
    texts = ["<|call|>", "<|end|>"]
    tokenizer.backend.add_special_tokens(texts)
    special = [tokenizer.backend.token_to_id(text) for text in texts]
    shown = tokenizer.with_shown([texts[0], "no token"])
    assert shown.decode(special) == texts[0]
    assert shown.decode(special, skip_special_tokens=False) == "".join(texts)
    for text, ids in expected("qwen2"):
        assert shown.encode(texts[0] + text) == [special[0], *ids]
    assert tokenizer.decode(special) == ""
    assert tokenizer.with_shown(["no token"]) is tokenizer
    assert shown.with_shown([texts[0]]) is shown
