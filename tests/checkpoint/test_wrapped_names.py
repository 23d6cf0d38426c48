"""Tensor names changed by wrappers: those of PyTorch, and vision models."""

import json
import pathlib

import chex
import numpy as np
import pytest
from flax import nnx

from dms_jax.checkpoint import load
from dms_jax.checkpoint.wrappers import parameter_names
from dms_jax.config import ModelConfig, Rope
from dms_jax.errors import CheckpointError, ConfigError
from tests.checkpoint.support import copy, rewrite, tensors

PLAIN = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
HEAD = "lm_head.weight"


def headless(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("head", [[], [HEAD]])
@pytest.mark.parametrize(
    "wrap",
    [
        str,
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"model.{name}",
        lambda name: f"policy.{name}",
        headless,
        lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    ],
)
def test_names_without_wrappers(wrap, head):
    stored = {name: wrap(name) for name in [*PLAIN, *head]}
    assert parameter_names(stored.values()) == stored


@pytest.mark.parametrize(
    "stored",
    [
        ["module.model.norm.weight", "model.embed_tokens.weight"],  # not every name has it
        ["transformer.h.0.weight", "transformer.wte.weight"],
        ["vision.layers.0.weight", "layers.0.weight"],
        ["weight"],
        [],
    ],
)
def test_unwrapped_names_are_unchanged(stored):
    assert parameter_names(stored) == {name: name for name in stored}


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match=r"a\.weight and _orig_mod\.a\.weight are both"):
        parameter_names(["a.weight", "_orig_mod.a.weight"])


def test_wrapped_model_is_loaded_and_its_stored_names_are_in_messages(tmp_path):
    directory = copy("families/llama2", tmp_path / "model")
    usual = load(directory)
    content = {f"module.{name}": tensor for name, tensor in tensors(directory).items()}
    rewrite(directory, content)
    chex.assert_trees_all_equal(
        *(nnx.to_pure_dict(nnx.state(each.transformer)) for each in (usual, load(directory)))
    )
    content["module.model.norm.weight"] = np.ones(3, np.float32)
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match=r"mis-shaped: module\.model\.norm\.weight is"):
        load(directory)


# -- vision models -------------------------------------------------------------------------------


def around(name: str) -> str:
    return f"language_model.{name}"


def within(name: str) -> str:
    head, dot, rest = name.partition(".")
    return name if head == "lm_head" else f"{head}.language_model{dot}{rest}"


# The vision model, the family of its language model, the class in transformers, and the names of
# the released tensors.
IMAGES = [
    ("gemma3", "gemma3", "Gemma3ForConditionalGeneration", around),
    ("mistral3", "mistral", "Mistral3ForConditionalGeneration", around),
    ("qwen3_vl", "qwen3", "Qwen3VLForConditionalGeneration", within),
]


def reading_images(
    target: pathlib.Path, kind: str, family: str, architecture: str, rename
) -> pathlib.Path:
    """A tiny model of a family, as the language model of a vision model."""
    directory = copy(f"families/{family}", target)
    content = {rename(name): tensor for name, tensor in tensors(directory).items()}
    for part in ("vision_tower", "multi_modal_projector", "visual", "model.visual"):
        content[f"{part}.layers.0.weight"] = np.ones((2, 2), np.float32)
    rewrite(directory, content)
    text = json.loads((directory / "config.json").read_text())
    text.pop("architectures")
    if kind != "mistral3":
        text["model_type"] = f"{kind}_text"
    if kind == "qwen3_vl":
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = {"architectures": [architecture], "model_type": kind, "text_config": text}
    config |= {"vision_config": {"hidden_size": 2}, "eos_token_id": [2, 7]}
    config |= {"tie_word_embeddings": text["tie_word_embeddings"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("kind", "family", "architecture", "rename"), IMAGES)
def test_language_model_of_a_vision_model_is_loaded(kind, family, architecture, rename, tmp_path):
    usual = load(copy(f"families/{family}", tmp_path / "usual"))
    directory = reading_images(tmp_path / "images", kind, family, architecture, rename)
    with pytest.warns(UserWarning, match="reads images; its language model alone") as warned:
        model = load(directory)
    assert len(warned) == 1
    assert model.config == usual.config
    assert model.generation.eos_token_ids == (2, 7)
    chex.assert_trees_all_equal(
        *(nnx.to_pure_dict(nnx.state(each.transformer)) for each in (model, usual))
    )


def test_gemma3_text_config_without_defaults():
    """Like Gemma 3 4B, whose config omits the defaults of transformers."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.window, config.num_full_layers) == (256, 1024, 5)
    assert (config.rope.factor, config.local_rope) == (8.0, Rope(theta=10_000.0))


def test_mistral3_text_config_without_window():
    """Like Mistral Small 3.1; the default of the family is 4,096 tokens."""
    text = {"model_type": "mistral", "sliding_window": None, "vocab_size": 131072}
    config = ModelConfig.from_hf({"model_type": "mistral3", "text_config": text})
    assert (config.vocab_size, config.window) == (131072, None)


def test_qwen3_vl_text_config_without_rope():
    text = {"model_type": "qwen3_vl_text", "hidden_size": 2048, "tie_word_embeddings": False}
    config = {"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": True}
    found = ModelConfig.from_hf(config)
    assert (found.rope, found.max_position_embeddings) == (Rope(theta=5e6), 128000)
    assert found.tie_embeddings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "text_config must be a JSON object"),
        ({"text_config": {"model_type": "ministral3"}}, "'ministral3' is not supported"),
        ({"architectures": ["Mistral3ForSequenceClassification"]}, "of this kind Mistral3ForCond"),
        ({"text_config": [1]}, "text_config must be a JSON object"),
        (
            {"text_config": {"vocab_size": 9}, "quantization_config": {"quant_method": "fp8"}},
            "quantized",
        ),
    ],
)
def test_unserved_vision_model_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({"model_type": "mistral3"} | fields)


def test_unknown_tensor_of_a_vision_model_is_named(tmp_path):
    directory = reading_images(tmp_path / "m", *IMAGES[0])
    rewrite(directory, tensors(directory) | {"audio_tower.weight": np.ones(2, np.float32)})
    with (
        pytest.warns(UserWarning, match="reads images"),
        pytest.raises(CheckpointError, match=r"unexpected: audio_tower\.weight"),
    ):
        load(directory)
