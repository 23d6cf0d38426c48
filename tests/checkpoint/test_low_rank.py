"""Low-rank updates as files: beside the base or merged, checked against it, in PEFT's layout."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dms_jax import sharding
from dms_jax.checkpoint import load, save
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model import low_rank
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import TOVA, Vanilla
from dms_jax.training.parameters import is_low_rank, parameters
from tests.checkpoint.gguf_files import convert
from tests.checkpoint.support import copy, tensors
from tests.checkpoint.test_adapter import FILES, POLICY, changed
from tests.checkpoint.test_gguf import assert_same
from tests.support.instances import further

SIZE = LowRank(rank=2, alpha=3.0)
TOKENS = np.arange(2 * 20).reshape(2, 20)


def updated(model, policy=POLICY):
    """A model as after low-rank training; if the policy reads an adapter, it is nonzero."""
    model = changed(model) if policy.retrofit.adapter else model
    random = np.random.default_rng(7)
    factors = {
        path: jax.device_put((random.normal(size=param.get_value().shape) / 4).astype(np.float32))
        for path, param in low_rank.factor_parameters(model.transformer, SIZE).items()
    }
    transformer = low_rank.add_factors(model.transformer, SIZE, factors)
    return dataclasses.replace(model, transformer=transformer, policy=policy)


def assert_equal(model, other):
    chex.assert_trees_all_equal(
        jax.device_get(parameters(model.transformer)), jax.device_get(parameters(other.transformer))
    )


@pytest.fixture
def base(tmp_path):
    return copy("families/qwen3", tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    save(updated(load(base)), POLICY, tmp_path / "adapter", adapter_only=True)
    return tmp_path / "adapter"


def test_updates_are_loaded_beside_the_weights(base, adapter, tmp_path):
    assert sorted(file.name for file in adapter.iterdir()) == FILES
    fields = json.loads((adapter / FILES[0]).read_text())
    assert fields["low_rank"] == {"rank": 2, "alpha": 3.0}
    content = load_file(adapter / FILES[1])
    assert all("dms_proj_alpha" in name or ".lora_" in name for name in content)
    model = load(base, adapter=adapter)
    assert low_rank.low_rank_of(model.transformer) == SIZE
    assert model.policy == POLICY
    assert_equal(model, updated(load(base)))
    save(model, model.policy, tmp_path / "again", adapter_only=True)
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (adapter / name).read_bytes()


@pytest.mark.nightly
def test_merged_updates_equal_separate_ones(base, adapter, tmp_path):
    model, merged = load(base, adapter=adapter), load(base, adapter=adapter, merge=True)
    assert low_rank.low_rank_of(merged.transformer) is None
    logits = np.asarray(model.logits(TOKENS))
    chex.assert_trees_all_close(np.asarray(merged.logits(TOKENS)), logits, rtol=1e-3, atol=1e-4)
    plain = np.asarray(load(base).logits(TOKENS))
    assert np.abs(logits - plain).max() > 0.05
    save(model, POLICY, tmp_path / "whole")
    assert_same(load(tmp_path / "whole"), merged)
    with pytest.raises(CheckpointError, match="low-rank updates were merged"):
        save(merged, POLICY, tmp_path / "refused", adapter_only=True)


def test_layout_is_that_of_peft(base, adapter):
    """W + alpha / r B A of each matrix, as PEFT merges them."""
    content, weights = load_file(adapter / FILES[1]), tensors(base)
    model = load(base, adapter=adapter, merge=True)
    save(model, POLICY, base.parent / "whole")
    merged = tensors(base.parent / "whole")
    for layer in range(2):
        for part in "qkvo":
            name = f"model.layers.{layer}.self_attn.{part}_proj."
            update = content[name + "lora_B.weight"] @ content[name + "lora_A.weight"]
            chex.assert_trees_all_close(
                merged[name + "weight"].astype(np.float32),
                weights[name + "weight"].astype(np.float32) + 1.5 * update,
                rtol=1e-5,
                atol=1e-5,
            )
    assert content["model.layers.0.self_attn.k_proj.lora_B.weight"].shape[1] == 2


def test_without_a_dms_adapter(base, tmp_path):
    """The control of a retrofit: the vanilla cache, or a training-free policy."""
    model = updated(load(base), Vanilla())
    save(model, TOVA(budget=8), tmp_path / "adapter", adapter_only=True)
    again = load(base, adapter=tmp_path / "adapter")
    assert again.policy == TOVA(budget=8)
    assert not again.transformer.has_adapter
    assert_equal(again, model)


@pytest.mark.parametrize("dtype", ["bfloat16", *further("float32")])
def test_updates_keep_their_dtype(base, adapter, dtype):
    model = load(base, dtype=dtype, adapter=adapter)
    types = {name: x.dtype.name for name, x in parameters(model.transformer).items()}
    assert {kind for name, kind in types.items() if is_low_rank(name)} == {"float32"}
    assert types["embedding"] == dtype
    merged = parameters(load(base, dtype=dtype, adapter=adapter, merge=True).transformer)
    assert merged["layers.attention.o_proj.kernel"].dtype == dtype


def test_under_a_mesh(base, adapter, tmp_path):
    mesh = sharding.make_mesh(4, 2)
    model = load(base, mesh=mesh, adapter=adapter)
    assert_equal(model, load(base, adapter=adapter))
    b = parameters(model.transformer)["layers.attention.qkv_proj.q.lora_b"]
    assert b.sharding.spec[2] == "model"
    save(model, POLICY, tmp_path / "again", adapter_only=True)
    assert (tmp_path / "again" / FILES[1]).read_bytes() == (adapter / FILES[1]).read_bytes()
    merged = load(base, mesh=mesh, adapter=adapter, merge=True)
    kernel = parameters(merged.transformer)["layers.attention.qkv_proj.kernel"]
    assert kernel.sharding.spec[2] == "model"


def test_updates_on_a_gguf(tmp_path, base, adapter):
    convert(base, tmp_path / "base.gguf")
    assert_equal(load(tmp_path / "base.gguf", adapter=adapter), load(base, adapter=adapter))


def test_decision_neurons_are_not_saved_in_an_adapter(base, tmp_path):
    model = updated(load(base), Vanilla())
    policy = dataclasses.replace(POLICY, source="query_neuron")
    with pytest.raises(ConfigError, match="neurons of the base"):
        save(model, policy, tmp_path / "adapter", adapter_only=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low_rank": {"rank": 3, "alpha": 3.0}}, "do not fit rank 3 and the base"),
        ({"low_rank": {"rank": 0, "alpha": 3.0}}, "rank must be"),
        ({"low_rank": [2]}, "does not name the adapter's policy and base"),
        ({"low_rank": {"rank": 2, "beta": 1}}, "LowRank has no option beta"),
    ],
)
def test_damaged_fields(base, adapter, fields, message):
    file = adapter / FILES[0]
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match=message):
        load(base, adapter=adapter)


@pytest.mark.nightly
def test_damaged_tensors(base, adapter):
    content = load_file(adapter / FILES[1])
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    for damaged, message in (
        ({key: value for key, value in content.items() if key != name}, "missing, expected"),
        (content | {"model.layers.9.self_attn.v_proj.lora_B.weight": content[name]}, "nothing"),
        (content | {name: content[name] * np.nan}, "holds NaN"),
        (content | {"model.norm.weight": np.ones(24, np.float32)}, "of no adapter"),
    ):
        save_file(damaged, adapter / FILES[1])
        with pytest.raises(CheckpointError, match=message):
            load(base, adapter=adapter)
    fields = json.loads((adapter / FILES[0]).read_text())
    del fields["low_rank"]
    (adapter / FILES[0]).write_text(json.dumps(fields))
    save_file(content, adapter / FILES[1])
    with pytest.raises(CheckpointError, match="of no adapter"):
        load(base, adapter=adapter)
