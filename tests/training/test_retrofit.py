"""`retrofit` end to end on a tiny model: files, resumption, refusals and reports."""

import dataclasses
import itertools
import json
import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.checkpoint import load
from dms_jax.errors import ConfigError, DataError, TrainingDivergedError
from dms_jax.policies import Quest, Vanilla
from dms_jax.training import retrofit
from dms_jax.training.display import Display
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.support.models import random_tokens
from tests.training.tiny import ADAPTER, EAGER, LENGTH, NEURON, documents, language_model, recipe

# One program for the whole file: schedules are inputs of the step.
RECIPE = recipe(Stage("ramp", 6, 1e-3, 4.0, adapter_learning_rate=1e-2), batch_size=4)


@pytest.fixture(scope="module")
def reference(model):
    """The parameters after an uninterrupted run, and the records of its steps."""
    records = []
    result = run(model, on_step=records.append)
    arrays = jax.device_get(parameters(result.transformer))
    chex.assert_tree_all_finite(arrays)
    return arrays, records


def run(model, policy=EAGER, **options):
    options = dict(recipe=RECIPE, data=documents(), progress=False) | options
    return retrofit(model, policy, **options)


def forever():
    return itertools.repeat({"tokens": random_tokens(0, 4, LENGTH)})


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_run_reports_every_step(reference):
    _, records = reference
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for index, record in enumerate(records):
        ratio = 1 + 3 * index / 6
        assert record["target_ratio"] == pytest.approx(ratio)
        assert record["target"] == pytest.approx(1 - 1 / ratio)
        assert record["loss"] == pytest.approx(
            record["distillation_loss"] + record["compression_loss"], rel=1e-5
        )
        assert record["compression_ratio"] == pytest.approx(1 / (1 - record["evicted"]))
        assert record["tokens"] == 4 * LENGTH
        assert record["stage"] == "ramp"
    assert 0 < records[0]["evicted"] < 1


def test_an_interrupted_run_resumes_bit_for_bit(model, reference, tmp_path, monkeypatch):
    """Ctrl-C twice: at a checkpoint's step and between checkpoints."""
    said = []
    monkeypatch.setattr(Display, "say", lambda self, line: said.append(line))
    expected, records = reference
    handler = signal.getsignal(signal.SIGINT)  # the parent shell may ignore the signal
    for stop in (1, 3):

        def interrupt(record, stop=stop):
            if record["step"] == stop:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt, match="stopped after step"):
            run(model, out=tmp_path / "run", checkpoint_every=2, on_step=interrupt)
        assert "3 at most, then a checkpoint is written" in said.pop()
        assert not (tmp_path / "run" / "model").exists()
        assert signal.getsignal(signal.SIGINT) is handler
    result = run(model, out=tmp_path / "run", checkpoint_every=2)
    chex.assert_trees_all_equal(jax.device_get(parameters(result.transformer)), expected)
    timing = ("seconds", "data_seconds", "tokens_per_second")
    without = [{k: v for k, v in record.items() if k not in timing} for record in records]
    logged = [
        {k: v for k, v in record.items() if k not in timing} for record in log(tmp_path / "run")
    ]
    assert logged == without

    # A finished run is only restored; its export declares the policy.
    steps = []
    again = run(model, out=tmp_path / "run", on_step=steps.append)
    assert not steps
    chex.assert_trees_all_equal(jax.device_get(parameters(again.transformer)), expected)
    loaded = load(tmp_path / "run" / "model")
    assert loaded.policy == EAGER
    chex.assert_trees_all_equal(jax.device_get(parameters(loaded.transformer)), expected)

    changed = dataclasses.replace(RECIPE, clip=0.5)
    with pytest.raises(ConfigError, match=r"another recipe \(`clip` 1.0, not 0.5\), `seed` 0, not"):
        run(model, out=tmp_path / "run", recipe=changed, seed=1)
    with pytest.raises(ConfigError, match=r"another policy \(`window` \d+, not 4\)"):
        run(model, dataclasses.replace(EAGER, window=4), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run at step 6"):
        run(model, out=tmp_path / "run", resume=False)
    with pytest.raises(ConfigError, match="another model"):
        run(language_model(num_layers=1), out=tmp_path / "run")


def test_snapshots_are_the_models_at_their_ratios(model, reference, tmp_path):
    """The snapshot at ratio 2.5 equals a run of the first three of the six steps."""
    snapshots = {}
    options = dataclasses.replace(RECIPE, snapshots=(4, 2.5))
    result = run(
        model,
        recipe=options,
        out=tmp_path,
        on_snapshot=lambda ratio, m: snapshots.update({ratio: m}),
    )
    assert list(snapshots) == [2.5, 4]
    expected, _ = reference
    chex.assert_trees_all_equal(jax.device_get(parameters(result.transformer)), expected)
    chex.assert_trees_all_equal(jax.device_get(parameters(snapshots[4].transformer)), expected)
    half = parameters(snapshots[2.5].transformer)
    chex.assert_tree_all_finite(half)
    assert any((half[name] != expected[name]).any() for name in expected)
    chex.assert_trees_all_equal(
        parameters(load(tmp_path / "snapshots" / "2.5").transformer), jax.device_get(half)
    )
    assert snapshots[2.5].policy == EAGER
    assert result.policy == EAGER


def test_the_borrowed_neuron_decays_and_is_zeroed(model):
    """If its weights were not zeroed, half of the decisions would be saturated."""
    options = recipe(Stage("neuron_decay", 3, 1e-4), Stage("ramp", 3, 1e-4, 4.0), trainable="auto")
    records = []
    # The same batch at every step, because the divergence varies more between batches.
    result = run(model, NEURON, recipe=options, data=forever(), on_step=records.append)
    assert [record["stage"] for record in records] == ["neuron_decay"] * 3 + ["ramp"] * 3
    assert [record["evicted"] for record in records[:3]] == [0, 0, 0]
    divergences = [record["distillation_loss"] for record in records[:3]]
    assert abs(divergences[0]) < 1e-6
    assert divergences[0] < divergences[1] < divergences[2]
    # A share of sigmoid(-5) of the 2 x 2 x 4 x 12 noisy decisions evicts: about one.
    assert records[3]["evicted"] < 0.05
    assert not result.transformer.has_adapter
    with pytest.raises(ConfigError, match="cannot be the teacher"):
        run(result, NEURON, recipe=options)


def test_the_data_may_be_an_iterator(model):
    records = []
    run(model, data=forever(), on_step=records.append)
    assert len(records) == 6
    with pytest.raises(DataError, match="The data ended before step 2"):
        run(model, data=iter([{"tokens": random_tokens(0, 4, LENGTH)}]))
    with pytest.raises(DataError, match=r"must hold tokens of shape \(4, 12\), got \(4, 5\)"):
        run(model, data=iter([{"tokens": random_tokens(0, 4, 5)}]))


def test_iterators_without_a_state_cannot_be_resumed(model, tmp_path):
    run(model, data=forever(), out=tmp_path)
    with pytest.raises(DataError, match="no set_state"):
        run(model, data=forever(), out=tmp_path)


def broken_at(model, token=None):
    """The model with NaN in its last norm, or in the embedding of one token."""
    broken = jax.tree.map(jnp.copy, model.transformer)
    if token is None:
        broken.final_norm.scale[...] = broken.final_norm.scale[...].at[0].set(jnp.nan)
    else:
        broken.embedding[...] = broken.embedding[...].at[token].set(jnp.nan)
    return dataclasses.replace(model, transformer=broken)


def test_divergence_is_an_error(model, tmp_path):
    message = r"Step 4 is not finite: .*loss nan.* The 3 before it were skipped"
    with pytest.raises(TrainingDivergedError, match=message):
        run(broken_at(model), out=tmp_path / "broken", checkpoint_every=1)
    assert not (tmp_path / "broken" / "model").exists()
    assert [line["loss"] for line in log(tmp_path / "broken")] == [None] * 3
    with pytest.raises(TrainingDivergedError, match=r"Step 1 is not finite: .*Lower the learning"):
        run(broken_at(model), most_skipped=0)


def test_a_step_with_nan_is_skipped_and_counted():
    broken = broken_at(language_model(tied=False), token=30)
    tokens = random_tokens(0, 4, LENGTH) % 30
    bad = tokens.copy()
    bad[2, 5] = 30
    arrays = []
    for at in (2, 3, None):  # the bad step is followed by others, or by none
        batches = [{"tokens": bad if step == at else tokens} for step in range(6)]
        records = []
        result = run(broken, data=iter(batches), on_step=records.append)
        assert [record["skipped"] for record in records] == [step == at for step in range(6)]
        assert records[-1]["skipped_steps"] == (at is not None)
        arrays.append(jax.device_get(parameters(result.transformer)))
    for array in arrays[:2]:
        assert all(np.isfinite(x).all() for name, x in array.items() if name != "embedding")
        kernel = "layers.attention.o_proj.kernel"
        assert (array[kernel] != arrays[2][kernel]).any()


def test_skipped_steps_are_counted_across_resumes(model, tmp_path):
    with pytest.raises(KeyboardInterrupt, match="stopped after step 1"):
        run(model, out=tmp_path, stop_after=1e-9)
    # As if step 1 had been skipped; step 2 runs again.
    lines = ({"step": step, "skipped": True, "skipped_steps": step} for step in (1, 2))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(model, out=tmp_path)
    assert [line["skipped_steps"] for line in log(tmp_path)] == [1] * 6


def test_skipped_step_changes_only_the_step_number():
    broken = broken_at(language_model(tied=False), token=30)
    trainer = Trainer(broken, EAGER, RECIPE, seed=0, mesh=None)
    tokens = random_tokens(0, 4, LENGTH) % 30
    batch = {"tokens": tokens, "loss_mask": np.ones(tokens.shape, bool)}
    trainer.step([batch], RECIPE.progress(0, EAGER))
    before = jax.device_get(trainer.state)
    bad = batch | {"tokens": np.where(np.arange(LENGTH) == 3, 30, tokens)}
    metrics = trainer.step([bad], RECIPE.progress(1, EAGER))
    assert metrics["skipped"]
    after = jax.device_get(trainer.state)
    assert (before.step, after.step) == (1, 2)
    chex.assert_trees_all_equal(after.parameters, before.parameters)
    chex.assert_trees_all_equal(after.optimizer, before.optimizer)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (Vanilla(), {}, "Vanilla has nothing to learn"),
        (Quest(over=NEURON), {}, "Quest has nothing to learn"),
        (NEURON, dict(trainable="adapter"), "trains only the adapter"),
        (ADAPTER, dict(stages=(Stage("train", 1, 1e-3),)), "The recipe tiny has no ramp"),
        (ADAPTER, dict(sequence_length=600), "600 tokens do not fit the model's 512 positions"),
    ],
)
def test_impossible_calls_are_refused(model, policy, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(model, policy, recipe=recipe(**changes))


def test_a_retrofit_reaches_its_target(model):
    """A new adapter learns to evict about its target share, half of the tokens.

    Decisions are softer than the paper's, so that gradients reach them within a few steps. The
    target stays as long as the ramp took, and the compression loss outweighs distillation. Over ten
    seeds of weights, data and noise, small and large, the share is 0.551, standard deviation 0.029,
    and that of hard decisions 0.542, standard deviation 0.033. The bounds are five deviations away.
    """
    policy = dataclasses.replace(ADAPTER, temperature=1.0)
    stages = (
        Stage("ramp", 30, 0.0, 2.0, adapter_learning_rate=3e-2),
        Stage("train", 30, 0.0, adapter_learning_rate=1e-2),
    )
    options = recipe(*stages, trainable="adapter", batch_size=4, compression_weight=30.0)
    records = []
    result = run(model, policy, recipe=options, on_step=records.append)
    # A share of sigmoid(-5) of the 2 x 2 x 4 x 12 noisy decisions evicts: about one, at most ten.
    assert records[0]["evicted"] < 0.05
    assert records[-1]["target"] == 0.5
    assert 0.4 < np.mean([record["evicted"] for record in records[-10:]]) < 0.7
    tokens = jnp.asarray(random_tokens(5, 8, LENGTH))
    hard = result.transformer(tokens, policy).decisions
    assert 0.37 < hard.mean() < 0.71
