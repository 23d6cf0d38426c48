"""Low-rank training: changed arrays, moments, and bit-equal resumption."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.checkpoint import load, save
from dms_jax.errors import ConfigError
from dms_jax.model import low_rank
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMC, Vanilla
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit, train
from dms_jax.training.parameters import is_adapter, is_low_rank, parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.training.tiny import EAGER, NEURON, documents, language_model, recipe

SIZE = LowRank(rank=2, alpha=4.0)
RAMP = Stage("ramp", 3, 1e-2, 4.0, adapter_learning_rate=1e-2)
LOW_RANK = recipe(RAMP, trainable="low_rank", low_rank=SIZE)
COMMON = dict(data=documents(), progress=False)


@pytest.fixture(scope="module")
def trained(model):
    records = []
    result = retrofit(model, EAGER, recipe=LOW_RANK, on_step=records.append, **COMMON)
    return result, records


def arrays_of(model):
    return jax.device_get(parameters(model.transformer))


def test_only_factors_and_adapter_change(model, trained):
    result, _ = trained
    before, after = arrays_of(model), arrays_of(result)
    assert low_rank.low_rank_of(result.transformer) == SIZE
    start = low_rank.initial_factors(
        Trainer(model, EAGER, LOW_RANK, 0, None).model().transformer, SIZE, jax.random.key(0)
    )
    start = {".".join(path): np.asarray(value) for path, value in start.items()}
    added = after.keys() - before.keys()
    assert added == start.keys() | {name for name in after if is_adapter(name)}
    for name, value in after.items():
        if name in before:
            chex.assert_trees_all_equal(value, before[name])
        elif is_low_rank(name):
            assert (value != start[name]).any(), name


def test_only_trained_parameters_have_moments(model):
    trainer = Trainer(model, EAGER, LOW_RANK, seed=0, mesh=None)
    names = {
        name
        for name in parameters(trainer.model().transformer)
        if is_adapter(name) or is_low_rank(name)
    }
    assert len(names) == 8 + sum(map(is_adapter, names))
    assert trainer.state.parameters.keys() == names
    (adam,) = [state for state in trainer.state.optimizer if hasattr(state, "mu")]
    assert adam.mu.keys() == adam.nu.keys() == names
    sizes = {name: x.size for name, x in trainer.state.parameters.items()}
    held = sum(leaf.size for leaf in jax.tree.leaves(trainer.state) if leaf.ndim)
    assert held == 3 * sum(sizes.values())


def test_factors_and_adapter_have_their_rates(model):
    """The factors take the rate of the weights, the adapter its own."""
    for rates, moved in (((0.0, 1e-2), is_adapter), ((1e-2, 0.0), is_low_rank)):
        stage = Stage("ramp", 2, rates[0], 4.0, adapter_learning_rate=rates[1])
        options = dataclasses.replace(LOW_RANK, stages=(stage,))
        start = parameters(Trainer(model, EAGER, options, 0, None).model().transformer)
        result = parameters(retrofit(model, EAGER, recipe=options, **COMMON).transformer)
        changed = {name for name, x in result.items() if (x != start[name]).any()}
        assert changed
        assert all(map(moved, changed))


def test_factors_and_moments_are_spread_over_the_mesh():
    mesh = make_mesh(2, 4)
    model = language_model(adapter=True, num_heads=8, num_kv_heads=4)
    with jax.set_mesh(mesh):
        trainer = Trainer(model, EAGER, LOW_RANK, seed=0, mesh=mesh)
    (adam,) = [state for state in trainer.state.optimizer if hasattr(state, "mu")]
    for arrays in (trainer.state.parameters, adam.mu, adam.nu):
        a = arrays["layers.attention.o_proj.o.lora_a"]  # [L, H, D, r]: H over `model`
        chex.assert_shape(a.addressable_shards[0].data, (2, 2, 8, 2))
        b = arrays["layers.attention.o_proj.o.lora_b"]  # [L, r, E]: too small to be gathered
        chex.assert_shape(b.addressable_shards[0].data, (2, 2, 16))


def test_a_stopped_run_ends_in_the_same_bits(model, trained, tmp_path):
    def stop(record):
        if record["step"] == 1:
            raise KeyboardInterrupt

    options = dict(recipe=LOW_RANK, out=tmp_path, checkpoint_every=1, **COMMON)
    with pytest.raises(KeyboardInterrupt):
        retrofit(model, EAGER, on_step=stop, **options)
    result = retrofit(model, EAGER, **options)
    chex.assert_trees_all_equal(arrays_of(result), arrays_of(trained[0]))
    other = dataclasses.replace(LOW_RANK, low_rank=LowRank(rank=3))
    with pytest.raises(ConfigError, match=r"another recipe .*`rank` 2, not 3"):
        retrofit(model, EAGER, **options | dict(recipe=other))
    # The exported checkpoint has the updates in its weights.
    whole = load(tmp_path / "model")
    assert low_rank.low_rank_of(whole.transformer) is None
    merged = low_rank.merge(result.transformer)
    chex.assert_trees_all_equal(arrays_of(whole), jax.device_get(parameters(merged)))


def test_further_training_and_merging(model, trained):
    """For a model with factors the teacher is the base, for any trained parameters."""
    result, _ = trained
    losses = {}
    still = Stage("ramp", 1, 0.0, 4.0)
    for trainable in ("adapter", "low_rank", "all"):
        records = []
        options = recipe(still, trainable=trainable, low_rank=SIZE)
        again = retrofit(result, EAGER, recipe=options, on_step=records.append, **COMMON)
        losses[trainable] = records[0]["distillation_loss"]
        kept = low_rank.low_rank_of(again.transformer)
        assert kept == (None if trainable == "all" else SIZE)
    assert losses["adapter"] == losses["low_rank"]
    assert losses["all"] == pytest.approx(losses["adapter"], rel=1e-4)
    # After merging, the model is its own teacher: only evictions cause a loss.
    own = dataclasses.replace(result, transformer=low_rank.merge(result.transformer))
    records = []
    retrofit(own, EAGER, recipe=recipe(still), on_step=records.append, **COMMON)
    assert abs(records[0]["distillation_loss"] - losses["all"]) > 1e-5
    other = recipe(still, trainable="low_rank", low_rank=LowRank(rank=5))
    with pytest.raises(ConfigError, match="rank 2 and alpha 4"):
        retrofit(result, EAGER, recipe=other, **COMMON)


def test_control_trains_low_rank(model):
    control = LOW_RANK.control(EAGER)
    assert control.trainable == "low_rank"
    result = train(model, recipe=control, **COMMON)
    assert result.policy == Vanilla()
    assert low_rank.low_rank_of(result.transformer) == SIZE
    before, after = arrays_of(model), arrays_of(result)
    chex.assert_trees_all_equal({name: after[name] for name in before}, before)


@pytest.mark.parametrize("policy", [NEURON, DMC(offset=0.3, window=4)])
def test_borrowed_neurons_are_refused(model, policy):
    with pytest.raises(ConfigError, match=r"neurons whose weights are set to zero"):
        retrofit(model, policy, recipe=LOW_RANK, **COMMON)


@pytest.mark.parametrize("trainable", ["low_rank", "adapter"])
def test_run_writes_only_adapters(tmp_path, trainable):
    """The model and its snapshots; impossible ones are refused before the first step."""
    save(language_model(), Vanilla(), tmp_path / "base")
    base = load(tmp_path / "base")
    options = recipe(RAMP, trainable=trainable, low_rank=SIZE, snapshots=(2.5,))
    common = dict(adapter_only=True, **COMMON)
    result = retrofit(base, EAGER, recipe=options, out=tmp_path / "run", **common)
    for name in ("model", "snapshots/2.5"):
        folder = tmp_path / "run" / name
        assert sorted(file.name for file in folder.iterdir()) == [
            "dms_adapter.json",
            "dms_adapter.safetensors",
        ]
    again = load(tmp_path / "base", adapter=tmp_path / "run" / "model")
    chex.assert_trees_all_equal(arrays_of(again), arrays_of(result))
    stop = dict(on_step=lambda record: pytest.fail("it trained"))
    with pytest.raises(ConfigError, match="this recipe trains all weights"):
        retrofit(base, EAGER, recipe=recipe(RAMP), out=tmp_path / "all", **common, **stop)
    unsaved = dataclasses.replace(base, source=None)
    with pytest.raises(ConfigError, match="was not loaded from one"):
        retrofit(unsaved, EAGER, recipe=options, out=tmp_path / "new", **common, **stop)


@pytest.mark.nightly
def test_factors_stay_float32_in_bfloat16_passes():
    model = language_model(dtype=jnp.bfloat16)
    options = dataclasses.replace(LOW_RANK, compute_dtype="bfloat16", remat="everything")
    result = retrofit(model, EAGER, recipe=options, **COMMON)
    for name, x in parameters(result.transformer).items():
        wide = is_adapter(name) or is_low_rank(name)
        chex.assert_type(x, jnp.float32 if wide else jnp.bfloat16)
