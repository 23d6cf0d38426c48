"""GGUF files whose types of tokens are wrong or missing: turns stay whole, as in llama.cpp."""

import warnings

import pytest

from dms_jax.checkpoint import Tokenizer
from dms_jax.model.language_model import GenerationDefaults
from tests.checkpoint import test_gguf_tokenizers as gguf_tokenizers
from tests.checkpoint.tokenizer_layouts import CHATML

TURNS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "[PAD]", "<b>"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TEXT = "<|im_start|>user\nHello<|im_end|>"


def read(path, **entries) -> tuple[Tokenizer, GenerationDefaults]:
    tokenizer, defaults = gguf_tokenizers.read(path, **entries)
    assert tokenizer is not None
    return tokenizer, defaults


def smol(types: list[int] | None, **changes) -> dict:
    """SmolLM2's turns after GPT-2's vocabulary."""
    entries = gguf_tokenizers.byte_level("gpt2")
    first = len(entries["tokens"])
    entries["tokens"] = entries["tokens"] + TURNS
    entries["token_type"] = entries["token_type"] + (types or [])
    if types is None:
        del entries["token_type"]
    usual = {"bos_token_id": first + 1, "eos_token_id": first + 2, "chat_template": CHATML}
    return entries | usual | changes


@pytest.mark.parametrize("turns", [NORMAL, UNUSED, None])
@pytest.mark.parametrize("end", [None, 0])
def test_turns_typed_as_text(turns, end, tmp_path):
    types = None if turns is None else [CONTROL, turns, turns, NORMAL, NORMAL, NORMAL]
    entries = smol(types)
    first = len(entries["tokens"]) - len(TURNS)
    if end is not None:  # the metadata declare only the end of a text
        entries |= {"eos_token_id": first + end, "bos_token_id": first + end}
    with pytest.warns(UserWarning, match=r"types as text .*'<\|im_start\|>', '<\|im_end\|>'"):
        tokenizer, defaults = read(tmp_path, **entries)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert [ids[0], ids[-1]] == [first + 1, first + 2]
    assert set(defaults.eos_token_ids) == {first, first + 2}
    assert tokenizer.decode(ids) == "user\nHello"
    # Tokens that are neither declared nor in the template keep their type.
    assert len(tokenizer.encode("<b>", add_special_tokens=False)) == 3


def test_no_template_and_no_declaration(tmp_path):
    """Tokens that always end an answer are control tokens, as in llama.cpp."""
    entries = smol([NORMAL] * len(TURNS), chat_template=None)
    for key in ("bos_token_id", "eos_token_id", "chat_template"):
        del entries[key]
    with pytest.warns(UserWarning, match=r"'<\|endoftext\|>', '<\|im_end\|>'\."):
        tokenizer, defaults = read(tmp_path, **entries)
    first = len(entries["tokens"]) - len(TURNS)
    assert set(defaults.eos_token_ids) == {first, first + 2}
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False)[-1] == first + 2


def test_think_tokens_are_decoded(tmp_path):
    entries = smol([CONTROL] * 3 + [NORMAL] * 3, chat_template=CHATML + "<think>")
    with pytest.warns(UserWarning, match="'<think>'"):
        tokenizer, _ = read(tmp_path, **entries)
    ids = tokenizer.encode("<think>Hello", add_special_tokens=False)
    assert ids[0] == tokenizer.backend.token_to_id("<think>")
    assert tokenizer.decode(ids) == "<think>Hello"


def test_correct_types_are_unchanged(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer, _ = read(tmp_path, **smol([CONTROL] * 3 + [USER_DEFINED, UNUSED, NORMAL]))
    assert len(tokenizer.encode("[PAD]<b>", add_special_tokens=False)) > 2


def test_token_made_by_merges_is_text(tmp_path):
    entries = smol([CONTROL] * 3 + [NORMAL] * 3, chat_template=CHATML + "<b>")
    entries["tokens"] = [*entries["tokens"], "<b"]
    entries["token_type"] = [*entries["token_type"], NORMAL]
    entries["merges"] = [*entries["merges"], "< b", "<b >"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer, _ = read(tmp_path, **entries)
    assert len(tokenizer.encode("<b>", add_special_tokens=False)) == 3  # three words of GPT-2's


@pytest.mark.parametrize("typed", [True, False])
def test_pieces_of_sentencepiece(typed, tmp_path):
    entries = gguf_tokenizers.sentencepiece("mistral")
    size = len(entries["tokens"])
    entries["tokens"] += ["<|im_start|>", "<|im_end|>"]
    entries["scores"] += [-1000.0, -1000.0]
    entries["token_type"] += [NORMAL, NORMAL]
    entries |= {"bos_token_id": 1, "eos_token_id": 2, "chat_template": CHATML}
    if not typed:
        del entries["token_type"]
    with pytest.warns(UserWarning, match=r"'<\|im_start\|>', '<\|im_end\|>'"):
        tokenizer, defaults = read(tmp_path, **entries)
    ids = tokenizer.encode(TEXT)
    assert ids[:2] == [1, size]
    assert ids[-1] == size + 1
    assert defaults.eos_token_ids == (2, size + 1)
    assert tokenizer.decode(tokenizer.encode("\u00e9 \u6f22", False)) == "\u00e9 \u6f22"  # by bytes
