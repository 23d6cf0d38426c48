"""Adapters as files: saved beside their base, and loaded onto it again."""

import dataclasses
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from dms_jax import sharding
from dms_jax.checkpoint import load, save
from dms_jax.checkpoint.weights import Weights
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMS, TOVA, Vanilla
from dms_jax.training import retrofit
from dms_jax.training.parameters import add_adapter, is_adapter, parameters, rebuilder
from tests.checkpoint.gguf_files import convert
from tests.checkpoint.support import GOLDEN, copy, rewrite, tensors
from tests.checkpoint.test_gguf import KINDS, assert_same, wide
from tests.support.instances import further
from tests.training.tiny import EAGER, documents, language_model, recipe

POLICY = DMS(window=4, shift=0, source="adapter")
FILES = ["dms_adapter.json", "dms_adapter.safetensors"]


def changed(model: LanguageModel) -> LanguageModel:
    """A model with a nonzero adapter."""
    transformer = add_adapter(model.transformer)
    arrays = parameters(transformer)
    for place, (name, x) in enumerate(sorted(arrays.items())):
        if is_adapter(name):
            noise = np.random.default_rng(place).normal(size=x.shape)
            arrays[name] = jax.device_put((x + noise).astype(x.dtype), x.sharding)
    return dataclasses.replace(model, transformer=rebuilder(transformer)(arrays), policy=POLICY)


@pytest.fixture
def base(tmp_path) -> pathlib.Path:
    return copy("families/qwen3", tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path) -> pathlib.Path:
    save(changed(load(base)), POLICY, tmp_path / "adapter", adapter_only=True)
    return tmp_path / "adapter"


def test_only_the_adapter_is_written(base, adapter):
    assert sorted(file.name for file in adapter.iterdir()) == FILES
    content = load_file(adapter / FILES[1])
    assert all("dms_proj_alpha" in name for name in content)
    assert sum(file.stat().st_size for file in adapter.iterdir()) < 20_000
    assert json.loads((adapter / FILES[0]).read_text())["policy"] == POLICY.to_dict()


def test_round_trip(base, adapter, tmp_path):
    model = changed(load(base))
    again = load(base, adapter=adapter)
    assert_same(again, model)
    assert again.policy == POLICY
    save(model, POLICY, tmp_path / "whole")
    tokens = np.arange(2 * 20).reshape(2, 20)
    expected = np.asarray(load(tmp_path / "whole").logits(tokens))
    chex.assert_trees_all_equal(np.asarray(again.logits(tokens)), expected)
    assert np.abs(expected - np.asarray(again.logits(tokens, policy=Vanilla()))).max() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", *further("float16", "float32")])
def test_adapter_keeps_its_dtype(base, adapter, tmp_path, dtype):
    model = load(base, dtype=dtype, adapter=adapter)
    types = {name: x.dtype for name, x in parameters(model.transformer).items()}
    # The adapter's output is compared with a threshold, so it keeps the dtype of its training.
    assert {x for name, x in types.items() if is_adapter(name)} == {jnp.dtype(jnp.float32)}
    assert {x for name, x in types.items() if not is_adapter(name)} == {jnp.dtype(dtype)}
    save(model, model.policy, tmp_path / "again", adapter_only=True)
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (adapter / name).read_bytes()


@pytest.mark.nightly
def test_under_a_mesh(base, adapter, tmp_path):
    mesh = sharding.make_mesh(4, 2)
    model = load(base, mesh=mesh, adapter=adapter)
    assert_same(model, load(base, adapter=adapter))
    save(model, POLICY, tmp_path / "again", adapter_only=True)
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (adapter / name).read_bytes()


@pytest.mark.nightly
def test_adapter_on_a_quantised_gguf(tmp_path):
    convert(wide(tmp_path / "model", "llama2"), tmp_path / "base.gguf", KINDS["mixed"])
    model = changed(load(tmp_path / "base.gguf", dtype="bfloat16"))
    save(model, POLICY, tmp_path / "adapter", adapter_only=True)
    again = load(tmp_path / "base.gguf", dtype="bfloat16", adapter=tmp_path / "adapter")
    assert_same(again, model)
    assert load(tmp_path / "base.gguf", adapter=tmp_path / "adapter").dtype == jnp.float32


@pytest.mark.nightly
def test_base_is_the_same_in_another_format(tmp_path, base, adapter):
    convert(base, tmp_path / "base.gguf")
    assert_same(load(tmp_path / "base.gguf", adapter=adapter), load(base, adapter=adapter))
    convert(base, tmp_path / "half.gguf", lambda name: Kind.F16)
    with pytest.raises(CheckpointError, match=r"another base: other numbers in .*mlp\.up_proj"):
        load(tmp_path / "half.gguf", adapter=adapter)


def test_base_of_another_shape_is_refused(adapter, tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        load(GOLDEN / "families" / "llama2", adapter=adapter)
    message = str(refusal.value)
    assert "trained on another base: " in message
    assert "num_kv_heads is 4 in the base, and 2 for the adapter" in message
    assert "qk_norm is False in the base, and True for the adapter" in message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "self_attn.k_proj.weight"),
        ("model.layers.0.input_layernorm.weight", "input_layernorm.weight"),
    ],
)
def test_base_with_other_numbers_is_refused(base, adapter, name, kind):
    content = tensors(base)
    content[name] = content[name] * np.float32(1.01)
    rewrite(base, content)
    with pytest.raises(CheckpointError, match=f"another base: other numbers in {kind}. Load it"):
        load(base, adapter=adapter)


def test_wrong_directory_says_what_to_load(base, adapter):
    with pytest.raises(CheckpointError, match=r"an adapter and no model: .* as `adapter`$"):
        load(adapter)
    with pytest.raises(
        CheckpointError, match=r"dms_adapter\.json does not exist; it holds a whole"
    ):
        load(base, adapter=base)
    with pytest.raises(CheckpointError, match="no directory"):
        load(base, adapter=base / "absent")
    (base.parent / "peft").mkdir()
    (base.parent / "peft" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it holds an adapter of PEFT: merge it"):
        load(base, adapter=base.parent / "peft")


def test_save_without_its_base_is_refused(base, tmp_path):
    model = changed(load(base))
    for source, message in (
        (str(tmp_path / "gone"), "cannot be read|does not exist|No such file"),
        (None, "it was not loaded from one"),
    ):
        other = dataclasses.replace(model, source=source)
        with pytest.raises(CheckpointError, match=message):
            save(other, POLICY, tmp_path / "adapter", adapter_only=True)
    with pytest.raises(ConfigError, match="has no adapter"):
        save(load(base), TOVA(budget=8), tmp_path / "adapter", adapter_only=True)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.nightly
def test_given_adapter_replaces_the_bases_own(base, adapter, tmp_path):
    """Also if the given adapter was trained further from the base's own."""
    whole = tmp_path / "whole"
    save(changed(load(base)), POLICY, whole)
    content = tensors(whole)
    for name in content:
        if "dms_proj_alpha" in name:
            content[name] = content[name] * 0
    rewrite(whole, content)
    assert_same(load(whole, adapter=adapter), load(base, adapter=adapter))
    save(changed(load(whole)), POLICY, tmp_path / "further", adapter_only=True)
    assert load(base, adapter=tmp_path / "further").policy == POLICY


def test_base_with_decision_neurons_is_refused(adapter):
    with pytest.raises(CheckpointError, match="decision neurons"):
        load(GOLDEN / "dms" / "query_neuron", adapter=adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format 2, which is not supported"),
        ({"base": 3}, "does not name the adapter's policy and base"),
        ({"base": {"shape": {}}}, "does not name the adapter's policy and base"),
        ({"policy": {"name": "Nonesuch"}}, "Nonesuch"),
        ({"policy": {"name": "TOVA", "budget": 8}}, "has no adapter"),
        ({"base": {"shape": {}, "sha256": {}}}, "vocab_size is 61 in the base, and None"),
    ],
)
def test_damaged_fields(base, adapter, fields, message):
    file = adapter / FILES[0]
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match=message):
        load(base, adapter=adapter)


def test_damaged_tensors(base, adapter):
    content = load_file(adapter / FILES[1])
    name = sorted(content)[0]
    save_file({**content, "model.norm.weight": np.ones(24, np.float32)}, adapter / FILES[1])
    with pytest.raises(CheckpointError, match=r"of no adapter: model\.norm\.weight"):
        load(base, adapter=adapter)
    save_file({key: value for key, value in content.items() if key != name}, adapter / FILES[1])
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load(base, adapter=adapter)
    (adapter / FILES[1]).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(base, adapter=adapter)
    (adapter / FILES[1]).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load(base, adapter=adapter)


def test_only_an_adapter_is_replaced(base, adapter):
    model = changed(load(base))
    (adapter / "README.md").write_text("kept")
    save(model, dataclasses.replace(POLICY, window=9), adapter, adapter_only=True)
    assert load(base, adapter=adapter).policy == dataclasses.replace(POLICY, window=9)
    assert (adapter / "README.md").read_text() == "kept"
    with pytest.raises(CheckpointError, match="holds more than an adapter"):
        save(model, POLICY, base, adapter_only=True)
    with pytest.raises(CheckpointError, match=r"dms_adapter\.safetensors"):
        save(model, POLICY, adapter)
    (adapter / FILES[0]).unlink()
    with pytest.raises(CheckpointError, match=r"no dms_adapter\.json"):
        save(model, POLICY, adapter, adapter_only=True)


def test_identity_reads_three_rows_of_a_matrix(base, adapter, monkeypatch):
    """The identity takes three rows of a matrix, not the matrix."""
    read, taken = Weights.read, {}

    def record(self, name, index=(), dtype=None):
        result = read(self, name, index, dtype)
        taken[name] = taken.get(name, 0) + result.size
        return result

    monkeypatch.setattr(Weights, "read", record)
    load(base, adapter=adapter)
    name = "model.layers.0.mlp.up_proj.weight"
    assert taken[name] == (36 + 3) * 24


@pytest.mark.nightly
def test_retrofit_of_frozen_weights_and_of_all(tmp_path):
    """`save` accepts a base that `retrofit` left unchanged."""
    model = language_model()
    save(model, Vanilla(), tmp_path / "base")
    model = load(tmp_path / "base")
    options = dict(data=documents(), progress=False)
    frozen = retrofit(model, EAGER, recipe=recipe(trainable="adapter"), **options)
    save(frozen, EAGER, tmp_path / "adapter", adapter_only=True)
    assert_same(load(tmp_path / "base", adapter=tmp_path / "adapter"), frozen)
    trained = retrofit(model, EAGER, recipe=recipe(trainable="all"), **options)
    with pytest.raises(CheckpointError, match="all its weights were trained"):
        save(trained, EAGER, tmp_path / "all", adapter_only=True)
    assert not (tmp_path / "all").exists()
