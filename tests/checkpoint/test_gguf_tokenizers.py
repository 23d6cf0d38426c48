"""Tokenizers of GGUF files, against the ids that other programs give."""

import json
import pathlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from dms_jax.checkpoint import Tokenizer
from dms_jax.checkpoint.gguf import GgufFiles, read_tokenizer
from dms_jax.checkpoint.gguf.backends import PieceType
from dms_jax.errors import CheckpointError
from tests.checkpoint.gguf_files import write
from tests.checkpoint.test_gguf import TEMPLATE, TOKENIZER, VOCABULARY
from tests.checkpoint.test_tokenizer import GOLDEN, expected

LETTERS = sorted(ByteLevel.alphabet())


def read(path: pathlib.Path, **entries):
    """The tokenizer of a file with these entries of tokenizer.ggml and nothing else."""
    entries = {
        key if key.startswith("chat") else f"ggml.{key}": value for key, value in entries.items()
    }
    entries = {f"tokenizer.{key}": value for key, value in entries.items()}
    write(path / "vocab.gguf", "llama", entries, {"a": (np.ones(2, np.float32), Kind.F32)})
    return read_tokenizer(GgufFiles(path / "vocab.gguf"), 10**6)


def byte_level(kind: str) -> dict:
    """A golden vocabulary of bytes as GGUF holds it."""
    model = json.loads((GOLDEN / kind / "tokenizer.json").read_text())["model"]
    tokens = {index: token for token, index in model["vocab"].items()}
    size = max(tokens) + 1
    return {
        "model": "gpt2",
        "pre": {"qwen2": "qwen2", "gpt2": "gpt-2"}[kind],
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [1 if index in tokens else 5 for index in range(size)],
        "merges": [" ".join(pair) for pair in model["merges"]],
    }


def sentencepiece(kind: str) -> dict:
    """A golden sentencepiece model as GGUF holds it."""
    model = json.loads((GOLDEN / kind / "pieces.json").read_text())
    tokens, scores, types = map(list, zip(*model.pop("pieces"), strict=True))
    return model | {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_byte_level_ids_are_those_of_llama_cpp(kind, tmp_path):
    tokenizer, _ = read(tmp_path, **byte_level(kind))
    assert tokenizer is not None
    for text, ids in expected(kind):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["mistral", "stories260k", "gemma"])
def test_sentencepiece_ids_are_those_of_the_reference(kind, tmp_path):
    entries = sentencepiece(kind)
    tokenizer, defaults = read(tmp_path, **entries, bos_token_id=1, eos_token_id=2)
    assert tokenizer is not None
    for text, ids in expected(kind):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.encode("a")[0] == 1
    turn = (entries["tokens"].index("<end_of_turn>"),) if kind == "gemma" else ()
    assert (defaults.bos_token_id, defaults.eos_token_ids) == (1, (2, *turn))


def test_unknown_token_typed_as_control(tmp_path):
    """As in files of Gemma."""
    entries = sentencepiece("stories260k")
    unknown = entries["token_type"].index(PieceType.UNKNOWN)
    entries["token_type"][unknown] = int(PieceType.CONTROL)
    with pytest.raises(CheckpointError, match="of the type for unknown text"):
        read(tmp_path, **entries)
    tokenizer, _ = read(tmp_path, **entries, unknown_token_id=unknown, bos_token_id=1)
    assert tokenizer is not None
    text, ids = expected("stories260k")[0]
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def words(tmp_path, pre: str, text: str) -> list[str]:
    """Returns the words into which a text is split."""
    tokenizer, _ = read(tmp_path, model="gpt2", pre=pre, tokens=[*LETTERS, "he"], merges=["h e"])
    assert tokenizer is not None
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("llama-bpe", "I'LL pay 12345 now", ["I", "'LL", " pay", " ", "123", "45", " now"]),
        ("smaug-bpe", "1234  x", ["123", "4", " ", " x"]),
        ("qwen2", "pay 12 (a)\n\n b", ["pay", " ", "1", "2", " (", "a", ")\n\n", " b"]),
        ("smollm", "pay 12x's", ["pay", " ", "1", "2", "x", "'s"]),
        ("gpt-2", "pay 1234, x\n y", ["pay", " 1234", ",", " x", "\n", " y"]),
        ("default", "f(x)=12345!", ["f", "(", "x", ")=", "123", "45", "!"]),
        (
            "gpt-4o",
            "I'LL say helloWorld's 1234/\n\n x",
            ["I'LL", " say", " hello", "World's", " ", "123", "4", "/\n\n", " x"],
        ),
        ("tekken", "helloWorld 12/\n", ["hello", "World", " ", "1", "2", "/\n"]),
        ("deepseek-coder", "a b1 中文\nc", ["a", " b", "1", " ", "中文", "\n", "c"]),
    ],
)
def test_text_is_split_into_words(pre, text, cut, tmp_path):
    assert words(tmp_path, pre, text) == cut


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", True), ("tekken", True), ("gpt-4o", True), ("gpt-2", False)]
)
def test_word_that_is_a_token_needs_no_merges(pre, ids, tmp_path):
    tokenizer, _ = read(
        tmp_path, model="gpt2", pre=pre, tokens=[*LETTERS, "he", "hey"], merges=["h e"]
    )
    assert tokenizer is not None
    assert (tokenizer.encode("hey", add_special_tokens=False) == [257]) == ids


def without(key: str) -> dict:
    prefix = "tokenizer.ggml."
    entries = {k.removeprefix(prefix): v for k, v in TOKENIZER.items() if k.startswith(prefix)}
    return {name: value for name, value in entries.items() if name != key}


def test_end_tokens(tmp_path):
    size = len(VOCABULARY)
    _, both = read(tmp_path, **without(""))
    assert both.eos_token_ids == (size - 2, size - 1)
    # <|end|> ends an answer regardless of the file, as in llama.cpp; <|turn|> does not.
    _, one = read(tmp_path, **(without("eot_token_id") | {"eos_token_id": 5}))
    assert one.eos_token_ids == (5, size - 2)
    _, none = read(tmp_path, **(without("eos_token_id") | {"eot_token_id": 2**32 - 1}))
    assert none.eos_token_ids == (size - 2,)
    with pytest.warns(UserWarning, match=r"types as text .*'<\|end\|>', '<\|turn\|>'\."):
        _, plain = read(tmp_path, **(without("eos_token_id") | {"token_type": [1] * size}))
    assert plain.eos_token_ids == (size - 1, size - 2)


def test_harmony_message_end_does_not_end_an_answer(tmp_path):
    ends = ["<|return|>", "<|call|>", "<|end|>"]
    entries = dict(model="gpt2", pre="gpt-4o", merges=["h e"], tokens=[*LETTERS, "he", *ends])
    size = len(LETTERS) + 1
    entries |= dict(token_type=[1] * size + [3] * 3, eot_token_id=size + 2)
    _, defaults = read(tmp_path, **entries)
    assert defaults.eos_token_ids == (size, size + 1)


def test_special_tokens_are_encoded_and_skipped_in_decoding(tmp_path):
    types = [1] * (len(VOCABULARY) - 2) + [4, 3]
    tokenizer, _ = read(tmp_path, **(without("") | {"token_type": types}))
    assert tokenizer is not None
    ids = tokenizer.encode("he<|end|>he<|turn|>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "he<|end|>he"  # user-defined, and control
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|end|>he<|turn|>"


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"add_bos_token": True, "add_eos_token": True}, True),
        ({"add_bos_token": False, "add_eos_token": True}, False),
        ({"pre": "llama-bpe"}, True),  # by default
    ],
)
def test_ends_of_a_sequence(fields, begin, tmp_path):
    tokenizer, defaults = read(tmp_path, **(without("") | {"bos_token_id": 7} | fields))
    assert tokenizer is not None
    ids = tokenizer.encode("h")
    assert (ids[0] == 7, ids[-1] == len(VOCABULARY) - 2) == (begin, False)
    assert defaults.bos_token_id == 7
    tokenizer.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert again is not None
    assert again.encode("he llo<|turn|>") == tokenizer.encode("he llo<|turn|>")


def test_chat_templates(tmp_path):
    messages = [{"role": "user", "content": "hey"}]
    tokenizer, _ = read(tmp_path, **without(""), chat_template=TEMPLATE)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(messages) == "<|turn|>hey"
    named = {"chat_templates": ["tool_use"], "chat_template.tool_use": "tools"}
    tokenizer, _ = read(tmp_path, **without(""), chat_template=TEMPLATE, **named)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(messages) == "<|turn|>hey"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "tools"
    tokenizer, _ = read(tmp_path, **without(""))
    assert tokenizer is not None
    assert tokenizer.chat_template is None


def test_no_tokenizer(tmp_path):
    tokenizer, defaults = read(tmp_path, model="no_vocab")
    assert tokenizer is None
    assert defaults.eos_token_ids == ()
