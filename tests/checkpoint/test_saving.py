"""Saved checkpoints load again."""

import dataclasses
import json
import os

import chex
import jax
import jax.numpy as jnp
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from dms_jax import assets, sharding
from dms_jax.checkpoint import load, save
from dms_jax.checkpoint.contents import read_checkpoint
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.policies import DMS, TOVA, Vanilla
from tests.checkpoint.support import GOLDEN, copy, rewrite, tensors

FAMILIES = sorted(folder.name for folder in (GOLDEN / "families").iterdir())
SOURCES = [f"families/{family}" for family in FAMILIES if family != "gpt_oss_mxfp4"]
SOURCES += [f"dms/{folder.name}" for folder in sorted((GOLDEN / "dms").iterdir())]


@pytest.mark.parametrize("source", SOURCES)
def test_round_trip(source, tmp_path):
    model = load(GOLDEN / source)
    save(model, model.policy, tmp_path / "out")
    written, read = tensors(tmp_path / "out"), tensors(copy(source, tmp_path / "source"))
    chex.assert_trees_all_equal_dtypes(written, read)
    chex.assert_trees_all_equal(written, read)
    again = load(tmp_path / "out")
    assert again.config == model.config
    assert again.policy == model.policy
    assert again.generation == model.generation


def test_mxfp4_experts_are_saved_as_bfloat16(tmp_path):
    """`tests/model/test_parity.py` compares their logits with transformers."""
    model = load(GOLDEN / "families" / "gpt_oss_mxfp4")
    kernel = model.transformer.layers.mlp.gate_up_proj.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    save(model, model.policy, tmp_path / "out")
    written = tensors(tmp_path / "out")
    assert not any(name.endswith(("_blocks", "_scales")) for name in written)
    again = load(tmp_path / "out")
    chex.assert_trees_all_equal(again.transformer.layers.mlp.gate_up_proj.kernel[...], kernel)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_mxfp4_blocks_without_scales_are_refused(tmp_path):
    directory = copy("families/gpt_oss_mxfp4", tmp_path / "model")
    content = tensors(directory)
    del content["model.layers.0.mlp.experts.down_proj_scales"]
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match=r"down_proj_scales missing are not matrices"):
        load(directory)


def test_slice_of_an_mxfp4_matrix():
    weights = read_checkpoint(GOLDEN / "families" / "gpt_oss_mxfp4").weights
    name = "model.layers.1.mlp.experts.gate_up_proj"
    part = slice(1, 3), slice(5, 20), slice(2, 60)
    chex.assert_trees_all_equal(weights.read(name, part), weights.read(name)[part])
    by_hand = weights.read(name)[1, 5, 2]
    file = load_file(GOLDEN / "families" / "gpt_oss_mxfp4" / "model.safetensors")
    half = int(file[f"{name}_blocks"][1, 2, 0, 2]) >> 4  # number 5 is the second of byte 2
    sign, size = -1 if half > 7 else 1, (0, 0.5, 1, 1.5, 2, 3, 4, 6)[half % 8]
    assert float(by_hand) == sign * size * 2.0 ** (int(file[f"{name}_scales"][1, 2, 0]) - 127)


def test_checkpoint_has_the_expected_files(stories, tmp_path):
    save(stories, stories.policy, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # A spelling that both transformers 4 and 5 read.
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    assert (config["torch_dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
    assert "cache_policy" not in config
    assert not any(name.startswith("dms_") for name in config)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [1, 2]}
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
    text = "Once upon a time"
    assert load(tmp_path / "out").tokenizer.encode(text) == stories.tokenizer.encode(text)


def test_shards_and_their_index(stories, tmp_path):
    save(stories, stories.policy, tmp_path / "out", max_shard_bytes=300_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(set(index["weight_map"].values())) == names
    assert index["metadata"]["total_size"] == 260_032 * 4
    for name in names:
        size = (tmp_path / "out" / name).stat().st_size
        assert size < 310_000
        with safe_open(tmp_path / "out" / name, "numpy") as file:
            assert all(index["weight_map"][tensor] == name for tensor in file.keys())  # noqa: SIM118
    expected = tensors(assets.path("stories260k"))
    written = tensors(tmp_path / "out")
    assert written.keys() == expected.keys() == index["weight_map"].keys()
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_equal(written, expected)


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (
            DMS(window=16, shift=0),
            {"dms_window_size": 16, "dms_separate_alpha": False, "dms_decision_shift": 0},
        ),
        (
            DMS(window=8, per="layer", alpha_scale=10.0, alpha_offset=2.0, temperature=0.5),
            {
                "dms_window_size": 8,
                "dms_separate_alpha": False,
                "dms_alpha_per": "layer",
                "dms_alpha_scale": 10.0,
                "dms_initial_alpha_offset": 2.0,
                "dms_tau": 0.5,
            },
        ),
        (TOVA(budget=64), {"cache_policy": TOVA(budget=64).to_dict()}),
    ],
)
def test_policy_is_saved_in_the_config(stories, tmp_path, policy, fields):
    save(dataclasses.replace(stories, untrained=True), policy, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields.items() <= config.items()
    assert ("dms_decision_shift" in config) == ("dms_decision_shift" in fields)
    assert load(tmp_path / "out").policy == policy


def test_adapter_is_saved_whatever_the_policy(tmp_path):
    model = load(GOLDEN / "dms" / "adapter")
    save(model, Vanilla(), tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.policy == Vanilla()
    assert again.transformer.has_adapter


def test_policy_without_its_adapter_is_refused(stories, tmp_path):
    with pytest.raises(ConfigError, match="adapter, which this model does not have"):
        save(stories, DMS(source="adapter"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_decision_neurons_are_not_saved_for_another_policy(stories, tmp_path):
    borrowing = dataclasses.replace(stories, policy=DMS(window=8))
    with pytest.raises(ConfigError, match="was made for DMS"):
        save(borrowing, Vanilla(), tmp_path / "out")
    save(borrowing, DMS(window=64), tmp_path / "out")  # the same neurons, another window
    with pytest.raises(ConfigError, match=r"shift=1.*would be read as.*shift=0"):
        save(borrowing, DMS(window=64, shift=0), tmp_path / "other")


def test_sharded_model_is_saved_whole(tmp_path):
    model = load(GOLDEN / "families" / "qwen3", mesh=sharding.make_mesh(4, 2))
    save(model, model.policy, tmp_path / "out")
    expected = tensors(copy("families/qwen3", tmp_path / "source"))
    written = tensors(tmp_path / "out")
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_equal(written, expected)


def test_permissions_are_those_of_the_umask(stories, tmp_path):
    before = os.umask(0o027)
    try:
        save(stories, stories.policy, tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o640}


def test_bfloat16_is_kept(tmp_path):
    model = load(GOLDEN / "families" / "llama31", dtype=jax.numpy.bfloat16)
    save(model, model.policy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    written = tensors(tmp_path / "out")
    assert {tensor.dtype.name for tensor in written.values()} == {"bfloat16"}


def test_untrained_model_is_not_saved_for_dms(stories, tmp_path):
    with pytest.raises(ConfigError, match="DMS learns what to evict, and this model was never"):
        save(stories, "DMS", tmp_path / "out")
    assert not (tmp_path / "out").exists()
