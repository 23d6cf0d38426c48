"""Tensors whose names a wrapper of PyTorch has changed."""

import chex
import numpy as np
import pytest

from dms_jax.checkpoint import load
from dms_jax.checkpoint.wrappers import parameter_names
from dms_jax.errors import CheckpointError
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
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"model.{name}",
        lambda name: f"policy.{name}",
        headless,
        lambda name: f"module.{headless(name)}",
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
def test_names_that_are_left_as_they_are(stored):
    assert parameter_names(stored) == {name: name for name in stored}


def test_two_tensors_of_one_name():
    with pytest.raises(CheckpointError, match=r"a\.weight and _orig_mod\.a\.weight are both"):
        parameter_names(["a.weight", "_orig_mod.a.weight"])


def renamed(target, wrap):
    directory = copy("families/llama2", target)
    rewrite(directory, {wrap(name): tensor for name, tensor in tensors(directory).items()})
    return directory


def test_a_wrapped_model_is_the_model(tmp_path):
    usual = load(copy("families/llama2", tmp_path / "usual"))
    wrapped = load(renamed(tmp_path / "wrapped", lambda name: f"_orig_mod.{name}"))
    tokens = np.array([[1, 5, 9]])
    chex.assert_trees_all_equal(usual.logits(tokens), wrapped.logits(tokens))


def test_an_unknown_prefix_is_named_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"begin with 'gpt\.inner\.', and those") as refusal:
        load(renamed(tmp_path / "model", lambda name: f"gpt.inner.{headless(name)}"))
    assert "\n" not in str(refusal.value)


def test_a_wrapped_tensor_of_the_wrong_shape_is_told_by_its_stored_name(tmp_path):
    directory = renamed(tmp_path / "model", lambda name: f"module.{name}")
    content = tensors(directory)
    content["module.model.norm.weight"] = np.ones(3, np.float32)
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match=r"mis-shaped: module\.model\.norm\.weight is"):
        load(directory)
