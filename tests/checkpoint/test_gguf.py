"""A GGUF file gives the same model as its Hugging Face directory."""

import dataclasses
import json
import pathlib

import chex
import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import dms_jax
from dms_jax.checkpoint import load
from dms_jax.checkpoint.gguf import weights
from dms_jax.config import Rope
from dms_jax.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf_files import NAMES, convert, permute
from tests.checkpoint.support import GOLDEN, copy, edit_config, tensors
from tests.support.instances import further, nightly_but

FAMILIES = [
    "llama2",
    "llama31",
    "llama32_tied",
    "llama_biases",
    "llama_linear",
    "mistral",
    "qwen2",
    "qwen25_yarn",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
]
TOLERANCE = 1e-4  # as of the directories: float32, two orders of summation


def parameters(model) -> dict:
    state = nnx.to_flat_state(nnx.state(model.transformer, nnx.Param))
    return {path: np.asarray(param.get_value()) for path, param in state}


def assert_same(model, other) -> None:
    ours, theirs = parameters(model), parameters(other)
    chex.assert_trees_all_equal_dtypes(ours, theirs)
    chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize("family", nightly_but({"llama31", "mistral", "gpt_oss"}, FAMILIES))
def test_logits_equal_those_of_transformers(family, tmp_path):
    folder = GOLDEN / "families" / family
    convert(folder, tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf")
    directory = load(folder)
    expected = load_file(folder / "expected.safetensors")
    got = np.asarray(model.logits(expected["plain.tokens"]))
    assert np.abs(got - expected["plain.logits"]).max() < TOLERANCE
    config = directory.config
    if family == "mistral":
        config = dataclasses.replace(config, model_type="llama")
    assert model.config == config
    assert_same(model, directory)


def test_gemma3(tmp_path):
    """Files store norms plus 1; weights with an exact sum come back unchanged."""
    folder = copy("families/gemma3", tmp_path / "model")
    edit_config(folder, query_pre_attn_scalar=8)  # a head's own: files have no other
    content = tensors(folder)
    for name, values in content.items():
        if name.endswith("norm.weight"):
            content[name] = (np.round(values * 256) / 256).astype(np.float32)
    save_file(content, folder / "model.safetensors")
    convert(folder, tmp_path / "model.gguf")
    model, directory = load(tmp_path / "model.gguf"), load(folder)
    assert model.config == directory.config
    assert_same(model, directory)
    assert model.config.kinds[0].window == 7
    without = {"gemma3.attention.sliding_window": None}
    convert(folder, tmp_path / "none.gguf", extra=without)
    with pytest.raises(ConfigError, match=r"lacks a window \(gemma3.attention.sliding_window\)"):
        load(tmp_path / "none.gguf")


def test_mxfp4_experts(tmp_path):
    """The order of numbers in a block differs from safetensors; nothing is rounded."""
    folder = GOLDEN / "families" / "gpt_oss_mxfp4"
    convert(folder, tmp_path / "model.gguf")
    model, directory = load(tmp_path / "model.gguf", dtype="float32"), load(folder, dtype="float32")
    assert model.config == directory.config
    assert_same(model, directory)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt_oss", dict(cut=lambda gate: gate[:4]), r"missing: blk\.0\.ffn_gate_exps\.weight"),
        ("gpt_oss", dict(cut=lambda gate: gate[0, 0]), r"weight \[24\] does not stack those"),
        ("gpt_oss", dict(expert_count=6), r"missing: blk\.0\.ffn_down_exps\.weight"),
        ("gpt_oss", dict(expert_gating_func=2), "gpt-oss.expert_gating_func is 2"),
        ("qwen3_moe", dict(expert_count=6), r"missing: blk\.0\.ffn_down_exps\.weight"),
        ("qwen3_moe", dict(expert_shared_count=1), r"qwen3moe\.expert_shared_count = 1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(family, options, message, tmp_path):
    gate = "blk.0.ffn_gate_exps.weight"
    cut = options.get("cut", lambda gate: gate)
    extra = {f"{NAMES[family]}.{key}": value for key, value in options.items() if key != "cut"}
    convert(
        GOLDEN / "families" / family,
        tmp_path / "model.gguf",
        extra=extra,
        change=lambda content: content.update({gate: (cut(content[gate][0]), Kind.F32)}),
    )
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(tmp_path / "model.gguf")


def test_permutation_is_the_converters():
    """llama.cpp: reshape(heads, 2, rows / heads / 2).swapaxes(1, 2)."""
    rows = np.random.default_rng(0).normal(size=(24, 5))
    chex.assert_trees_all_equal(
        permute(rows, 3), rows.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    )
    assert permute(np.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


VOCABULARY = [
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "he",
    "ll",
    "hell",
    "<|end|>",
    "<|turn|>",
]
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [1] * (len(VOCABULARY) - 2) + [3, 3],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": len(VOCABULARY) - 2,
    "tokenizer.ggml.eot_token_id": len(VOCABULARY) - 1,
    "tokenizer.chat_template": TEMPLATE,
}


def wide(directory: pathlib.Path, family: str, dtype=np.float32) -> pathlib.Path:
    """A random model wide enough for blocks of 256 numbers, with a tokenizer."""
    config = json.loads((GOLDEN / "families" / family / "config.json").read_text())
    source = tensors(GOLDEN / "families" / family)
    config |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(VOCABULARY)}
    config |= {"max_position_embeddings": 256, "bos_token_id": None, "pad_token_id": None}
    config["eos_token_id"] = [len(VOCABULARY) - 2, len(VOCABULARY) - 1]
    size = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "gate_proj": 512, "up_proj": 512}
    random = np.random.default_rng(0)
    content = {}
    for name, value in source.items():
        part = name.split(".")[-2]
        rows = size.get(part, len(VOCABULARY) if part in ("embed_tokens", "lm_head") else 256)
        rows = 64 if part in ("q_norm", "k_norm") else rows
        shape = (rows, 512 if part == "down_proj" else 256)[: value.ndim]
        values = random.normal(size=shape) / (16 if value.ndim == 2 else 4)
        content[name] = (values + 1 if "norm" in name else values).astype(dtype)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=dict([*ids.items()][:-2]), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {ids[token]: {"content": token, "special": True} for token in VOCABULARY[-2:]}
    fields = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": special}
    fields |= {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    save_file(content, directory / "model.safetensors")
    return directory


KINDS = {
    "F16": lambda name: Kind.F16,
    "Q8_0": lambda name: Kind.Q8_0,
    "Q4_0": lambda name: Kind.Q4_0,
    # Mixed as by llama.cpp: other kinds for the embedding, the values and the down projection.
    "mixed": lambda name: (
        Kind.BF16
        if "token_embd" in name
        else Kind.Q6_K
        if "attn_v" in name or "down" in name
        else Kind.Q4_K
        if "attn_q" in name or "gate" in name
        else Kind.Q5_K
        if "attn_k" in name
        else Kind.Q5_1
    ),
}


@pytest.mark.parametrize("kinds", nightly_but({"F16", "Q8_0", "Q4_0"}, KINDS))
@pytest.mark.parametrize("family", ["llama2", *further("mistral", "qwen2", "qwen3")])
def test_quantised_model_equals_its_dequantised_weights(family, kinds, tmp_path):
    directory = wide(tmp_path / "model", family)
    read = convert(directory, tmp_path / "model.gguf", KINDS[kinds], TOKENIZER)
    save_file(
        {name: value.astype(np.float32) for name, value in read.items()},
        directory / "model.safetensors",
    )
    model = load(tmp_path / "model.gguf", dtype="float32")
    other = load(directory)
    assert_same(model, other)
    assert model.generation == other.generation
    assert model.tokenizer.chat_template == other.tokenizer.chat_template
    text = "hello, hell of a world 12"
    assert model.tokenizer.encode(text) == other.tokenizer.encode(text)


def test_dtype_is_that_of_the_file_unless_asked(tmp_path):
    directory = wide(tmp_path / "model", "qwen2")
    convert(directory, tmp_path / "half.gguf", lambda name: Kind.F16)
    half = load(tmp_path / "half.gguf")
    assert half.dtype == jnp.float16
    assert half.transformer.final_norm.scale[...].dtype == jnp.float32
    mixed = lambda name: Kind.F16 if "embd" in name else Kind.Q8_0  # noqa: E731
    convert(directory, tmp_path / "mixed.gguf", mixed)
    types = {value.dtype for value in parameters(load(tmp_path / "mixed.gguf")).values()}
    assert types == {np.dtype(np.float32)}
    asked = load(tmp_path / "mixed.gguf", dtype="bfloat16")
    assert {value.dtype for value in parameters(asked).values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.nightly
def test_each_device_reads_its_part(tmp_path, monkeypatch):
    directory = wide(tmp_path / "model", "llama2")
    convert(directory, tmp_path / "model.gguf", KINDS["mixed"])
    mesh = dms_jax.make_mesh(model=2)
    whole = load(tmp_path / "model.gguf")
    quants, taken = gguf.quants, []
    dequantize = quants.dequantize
    monkeypatch.setattr(
        quants, "dequantize", lambda *args: taken.append(out := dequantize(*args)) or out
    )
    model = load(tmp_path / "model.gguf", mesh=mesh)
    assert_same(model, whole)
    # Two layers of down_proj, whose columns are cut: no number is dequantised twice.
    assert sum(part.size for part in taken if part.size == 256 * 256) >= 2 * 256 * 512
    sizes = sum(x.size for x in tensors(directory).values() if x.ndim == 2)
    assert sum(part.size for part in taken) <= sizes + 10 * 256
    kernel = model.transformer.layers.attention.qkv_proj.kernel[...]
    assert kernel.addressable_shards[0].data.shape[2] * 2 == kernel.shape[2]


@pytest.mark.nightly
def test_dequantisation_makes_no_float32_copy(tmp_path, monkeypatch):
    """A tensor is dequantised in groups of rows, directly into the requested dtype."""
    directory = wide(tmp_path / "model", "qwen2")
    convert(directory, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    monkeypatch.setattr(weights, "_CHUNK", 1024)
    largest = []
    quants = gguf.quants
    dequantize = quants.dequantize
    monkeypatch.setattr(
        quants, "dequantize", lambda *args: largest.append(out := dequantize(*args)) or out
    )
    model = load(tmp_path / "model.gguf", dtype="bfloat16")
    assert max(part.size for part in largest) <= 1024
    monkeypatch.undo()
    assert_same(model, load(tmp_path / "model.gguf", dtype="bfloat16"))


@pytest.mark.parametrize("given", [0, 2])
def test_split_model(given, tmp_path):
    folder = GOLDEN / "families" / "llama2"
    convert(folder, tmp_path / "model.gguf", split_max_tensors=8, extra=TOKENIZER_OF_61)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    model = load(parts[given])
    assert_same(model, load(folder))
    assert model.tokenizer is not None


def test_merged_split_model(tmp_path):
    """llama-gguf-split keeps the metadata of the first part, and sets split.count to 0."""
    folder = GOLDEN / "families" / "llama2"
    extra = {"split.no": 0, "split.count": 0, "split.tensors.count": len(tensors(folder))}
    convert(folder, tmp_path / "model.gguf", extra=extra)
    assert_same(load(tmp_path / "model.gguf"), load(folder))


def test_split_model_in_a_hub_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    folder = GOLDEN / "families" / "llama2"
    convert(folder, tmp_path / "blobs" / "model.gguf", split_max_tensors=8)
    for number, part in enumerate(sorted((tmp_path / "blobs").iterdir())):
        part.rename(tmp_path / "blobs" / f"{number}abc")
        (tmp_path / "snapshots" / "0123" / part.name).symlink_to(f"../../blobs/{number}abc")
    first = sorted((tmp_path / "snapshots" / "0123").iterdir())[0]
    assert_same(load(first), load(folder))


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 32.0, "original": 8192},
        *further({"factor": 8.0, "original": 1024}),
    ],
)
def test_rotary_factors_of_llama3(rope, tmp_path):
    directory = copy("families/llama31", tmp_path / "model")
    content = tensors(directory)
    for name, value in content.items():
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            content[name] = np.tile(value[:4], (16, 1))[: len(value) // 6 * 16]
        if name.split(".")[-2] == "o_proj":
            content[name] = np.tile(value[:, :4], (1, 16))
    (directory / "model.safetensors").unlink()
    save_file(content, directory / "model.safetensors")
    fields = {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": rope["factor"],
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": rope["original"],
    }
    edit_config(directory, head_dim=16, rope_parameters=fields, max_position_embeddings=131072)
    convert(directory, tmp_path / "model.gguf")
    model, other = load(tmp_path / "model.gguf"), load(directory)
    assert model.config.rope == other.config.rope
    tokens = np.arange(40)[None]
    chex.assert_trees_all_close(
        np.asarray(model.logits(tokens)), np.asarray(other.logits(tokens)), rtol=0, atol=1e-5
    )


def test_rotary_factors_of_one(tmp_path):
    convert(
        GOLDEN / "families" / "llama2",
        tmp_path / "model.gguf",
        change=lambda c: c.update({"rope_freqs.weight": (np.ones(3, np.float32), Kind.F32)}),
    )
    assert load(tmp_path / "model.gguf").config.rope == Rope(theta=10_000.0)


def test_save_and_load_again(tmp_path):
    directory = wide(tmp_path / "model", "llama2")
    convert(directory, tmp_path / "model.gguf", KINDS["Q4_0"], TOKENIZER)
    model = load(tmp_path / "model.gguf")
    dms_jax.save(model, model.policy, tmp_path / "again")
    again = load(tmp_path / "again")
    assert_same(again, model)
    assert again.config == model.config
    assert again.generation == model.generation
    text = "hello  wörld 123"
    assert again.tokenizer.encode(text) == model.tokenizer.encode(text)


TOKENIZER_OF_61 = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *"▁abcde",
        *"fghijklmnopqrstuvwxyz0123456789",
    ],
    "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(37)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 37,
}


def test_without_the_package(tmp_path, monkeypatch):
    convert(GOLDEN / "families" / "llama2", tmp_path / "model.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dms-jax\[gguf\]'"):
        load(tmp_path / "model.gguf")
