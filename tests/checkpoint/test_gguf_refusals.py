"""Damaged and unserved GGUF files are refused by name."""

import pathlib
import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from dms_jax.checkpoint import load
from dms_jax.checkpoint.gguf import file
from dms_jax.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf_files import convert, encode, write
from tests.checkpoint.support import GOLDEN
from tests.checkpoint.test_gguf import TOKENIZER, TOKENIZER_OF_61

LLAMA = GOLDEN / "families" / "llama2"
F32 = Kind.F32
Refusal = (CheckpointError, ConfigError)


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(Refusal) as caught:
        load(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def with_entries(tmp_path: pathlib.Path, **entries) -> pathlib.Path:
    """A small model with changed metadata; `__` stands for a full stop."""
    path = tmp_path / "model.gguf"
    convert(LLAMA, path, extra={key.replace("__", "."): value for key, value in entries.items()})
    return path


def with_tensors(tmp_path: pathlib.Path, change) -> pathlib.Path:
    path = tmp_path / "model.gguf"
    convert(LLAMA, path, change=change)
    return path


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2moe", "clip"])
def test_unknown_architecture_is_refused(architecture, tmp_path):
    path = write(tmp_path / "model.gguf", architecture, {}, {"a": (np.ones(2, np.float32), F32)})
    assert f"{architecture!r}, which is not supported; supported: llama, qwen2" in refusal(path)


@pytest.mark.parametrize(
    ("kind", "message"), [("adapter", "LoRA"), ("mmproj", "vision"), ("imatrix", "not a model")]
)
def test_file_without_a_model_is_refused(kind, message, tmp_path):
    assert message in refusal(with_entries(tmp_path, general__type=kind))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"llama__expert_count": 8}, "mixture of experts (llama.expert_count)"),
        ({"llama__attention__sliding_window": 16}, "sliding window of 16 tokens"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ({"llama__pooling_type": 3}, "llama.pooling_type = 3"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"llama__attention__value_length": 4}, "llama.attention.value_length is 4"),
        ({"llama__vocab_size": 60}, "llama.vocab_size is 60"),
        ({"llama__block_count": None}, "lacks llama.block_count"),
        ({"llama__block_count": "two"}, "llama.block_count must be a whole number"),
        ({"llama__attention__head_count": [4, 2]}, "differs from layer to layer"),
        ({"llama__attention__key_length": None, "llama__embedding_length": 25}, "not a multiple"),
        ({"llama__rope__freq_base": 0.5}, "theta must be"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base must be"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5},
            "yarn_ext_factor is 0.5",
        ),
        ({"llama__rope__scaling__yarn_attn_factor": 0.8}, "yarn_attn_factor = 0.8"),
        ({"general__alignment": 48}, "general.alignment is 48, not a power of two"),
        ({"llama__block_count": 3}, "missing: blk.2.attn_norm.weight"),
        ({"llama__block_count": 1}, "unexpected: blk.1.attn_norm.weight"),
        ({"llama__feed_forward_length": 35}, "mis-shaped: blk.0.ffn_down.weight"),
        ({"split__count": 2}, "split over 2 files, and its name does not say so"),
    ],
)
def test_unserved_metadata_are_refused(entries, message, tmp_path):
    assert message in refusal(with_entries(tmp_path, **entries))


def test_neutral_metadata_are_accepted(tmp_path):
    path = with_entries(
        tmp_path,
        llama__expert_count=0,
        llama__use_parallel_residual=False,
        llama__attention__sliding_window=64,
        llama__attention__head_count=[4, 4],
        llama__rope__scaling__type="none",
        llama__rope__scaling__factor=0.0,
        llama__rope__scaling__attn_factor=1.0,
        llama__rope__scaling__yarn_attn_factor=1.0,
        llama__embedding_scale=1.0,
        llama__tensor_data_layout="Meta AI original pth",
    )
    assert load(path).config.num_heads == 4


@pytest.mark.parametrize(("kind", "original"), [("linear", None), ("yarn", 64)])
def test_scaled_rope_adds_positions(kind, original, tmp_path):
    entries = {"type": kind, "factor": 4.0, "original_context_length": original}
    entries = {f"llama__rope__scaling__{name}": value for name, value in entries.items()}
    assert load(with_entries(tmp_path, **entries)).config.max_position_embeddings == 256


def renamed(old: str, new: str):
    def change(content):
        content[new] = content.pop(old)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight"), "(blk.0.ffn_up_exps.weight)"),
        (renamed("output_norm.weight", "token_types.weight"), "(token_types.weight)"),
        (lambda c: c.pop("blk.1.attn_k.weight"), "missing: blk.1.attn_k.weight"),
        (
            lambda c: c.update({"rope_freqs.weight": (np.array([1, 3, 5], np.float32), F32)}),
            "not of the kind that Llama 3 has",
        ),
        (
            lambda c: c.update({"rope_freqs.weight": (np.array([1, 2], np.float32), F32)}),
            "rope_freqs.weight is [2], the metadata ask for [3]",
        ),
        (
            lambda c: c.update({"rope_freqs.weight": (np.array([1, 0.5, 2], np.float32), F32)}),
            "below 1 or NaN",
        ),
        (
            lambda c: c.update({"output_norm.weight": (np.full(24, np.nan, np.float32), F32)}),
            "output_norm.weight holds NaN",
        ),
    ],
)
def test_unserved_tensors_are_refused(change, message, tmp_path):
    assert message in refusal(with_tensors(tmp_path, change))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.TQ1_0, "holds TQ1_0 (ternary weights)"),
        (Kind.TQ2_0, "holds TQ2_0 (ternary weights)"),
        (None, "holds I8 (integers)"),
    ],
)
def test_ternary_weights_and_integers_are_refused(kind, message, tmp_path):
    data = np.ones((24, 24), np.int8) if kind is None else encode(np.ones((24, 256)), kind)
    path = with_tensors(tmp_path, lambda c: c.update({"blk.0.attn_q.weight": (data, kind)}))
    assert f"blk.0.attn_q.weight {message}" in refusal(path)


def with_kind(tmp_path: pathlib.Path, kind: int) -> pathlib.Path:
    """A file whose first matrix declares this type."""
    path = tmp_path / "model.gguf"
    convert(LLAMA, path)
    data = bytearray(path.read_bytes())
    place = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    data[place : place + 4] = struct.pack("<I", kind)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (36, "type 36, which the package gguf does not know"),
        (int(Kind.Q4_0), "rows of 24 numbers, which blocks of 32 (Q4_0) do not divide"),
    ],
)
def test_unknown_type_of_numbers_is_refused(kind, message, tmp_path):
    assert message in refusal(with_kind(tmp_path, kind))


def test_type_without_dequantisation_is_refused(tmp_path, monkeypatch):
    data = encode(np.ones((24, 32)), Kind.Q5_1)

    def refuse(*_):
        raise NotImplementedError("Dequantization for Q5_1 is not yet implemented")

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    path = tmp_path / "model.gguf"
    entries = {"blk.0.attn_q.weight": (data, Kind.Q5_1)}
    convert(LLAMA, path, change=lambda c: c.update(entries))
    assert "quantised as Q5_1, which the package gguf cannot" in refusal(path)


def test_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    convert(LLAMA, path, extra=TOKENIZER_OF_61)
    data = path.read_bytes()
    start = file.GgufFile(path).tensors["output.weight"].offset
    for keep in (0, 3, 4, 9, 23, 24, 40, 100, *range(200, start, 397), start - 1, len(data) - 33):
        path.write_bytes(data[:keep])
        message = refusal(path)
        assert "cut short" in message or "empty" in message, (keep, message)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"GGUF" + struct.pack("<I", 1), "version 1 of GGUF"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGML" + struct.pack("<I", 3), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), "type 99"),
    ],
)
def test_damaged_header_is_refused(header, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(header)
    assert message in refusal(path)


def test_text_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(CheckpointError, match="no GGUF"):
        load(tmp_path / "notes.txt")


def test_directory_with_a_gguf_names_it(tmp_path):
    convert(LLAMA, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"give the GGUF file itself.*model\.gguf"):
        load(tmp_path)


def test_missing_parts_are_named(tmp_path):
    convert(LLAMA, tmp_path / "model.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[1].unlink()
    assert "1 are not beside it: model-00002-of-00003.gguf" in refusal(parts[0])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "t5"}, "the kind 't5'"),
        ({"pre": "poro-chat"}, "says 'poro-chat' for how text is cut into words"),
        ({"pre": None}, "does not say how text is cut into words"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["h e", "hello"]}, "holds 'hello' (number 1), which is not a pair"),
        ({"tokens": None}, "tokens is not a list of texts"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' twice"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 261 tokens"),
        ({"token_type": [9] * 261}, "an unknown token type"),
        ({"token_type": 1}, "token_type is not a list"),
        ({"eos_token_id": 261}, "eos_token_id is 261, beyond the 261 tokens"),
        ({"eos_token_id": "end"}, "eos_token_id must be a whole number"),
        ({"add_bos_token": True}, "asks for a begin token"),
        ({"model": "llama"}, "scores is not a list"),
        ({"model": "llama", "scores": [-1000.0] * 261}, "scores are equal"),
    ],
)
def test_unserved_tokenizer_is_refused(entries, message, tmp_path):
    entries = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    path = tmp_path / "model.gguf"
    convert(LLAMA, path, extra=TOKENIZER | entries)
    assert message in refusal(path)


def test_tokenizer_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    convert(LLAMA, path, extra=TOKENIZER_OF_61 | {"tokenizer.chat_template": 3})
    assert "tokenizer.chat_template must be a text" in refusal(path)
    convert(LLAMA, path, extra=TOKENIZER)
    assert "has 261 tokens, and token_embd.weight 61 rows" in refusal(path)
