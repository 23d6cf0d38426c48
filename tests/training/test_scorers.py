"""Training from attention: the scorers of KVzap and KVpop, and DMS after a warm-up."""

import dataclasses
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.checkpoint import load, save
from dms_jax.errors import ConfigError, DataError
from dms_jax.model import low_rank
from dms_jax.model.attention import Relaxation
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.supervision import Supervision
from dms_jax.policies import DMS, TOVA, KVpop, KVzap, Vanilla
from dms_jax.policies.values import FutureAttention
from dms_jax.training import Stage, calibrate, recipes, retrofit, train, trainer
from dms_jax.training.parameters import is_adapter, parameters
from dms_jax.training.supervised_loss import supervised_loss
from tests.laws.simulations import scorer_outputs
from tests.oracles import importance as oracle
from tests.oracles import transformer, vanilla
from tests.support.instances import further
from tests.support.models import VOCABULARY, oracle_weights, random_model, tiny_config
from tests.training.tiny import language_model, recipe

WINDOW, LENGTH = 4, 40
ZAP, POP = KVzap(window=WINDOW, hidden=16), KVpop(budget=12, window=WINDOW, hidden=16)
WARM = DMS(window=WINDOW, source="adapter", shift=1)


def batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (4, LENGTH))
    return {"tokens": tokens.astype(np.int32)}


def supervised(steps: int, rate: float = 5e-3, **changes: Any):
    stage = Stage("supervise", steps, rate, final_learning_rate=0.0)
    options = dict(sequence_length=LENGTH, trainable="adapter", loss="language_modeling")
    return recipe(stage, **options | changes)


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return language_model()


@pytest.fixture(scope="module")
def trained(base):
    """Returns the scorers after a short training, with their losses."""

    def run(policy):
        losses: list[float] = []
        model = retrofit(
            base,
            policy,
            recipe=supervised(150),
            data=iter([batch(seed) for seed in range(150)]),
            progress=False,
            on_step=lambda record: losses.append(record["supervised_loss"]),
        )
        return model, losses

    return {policy.name: run(policy) for policy in (ZAP, POP)}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("policy", [ZAP, POP, *further(WARM, KVzap(window=3, hidden=0))], ids=repr)
def test_scorer_targets_equal_the_oracle(policy):
    """Predictions and targets of every layer against the NumPy transformer."""
    model = random_model(tiny_config(), adapter=policy.retrofit.adapter, seed=2)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, (2, 21))
    seen = jax.jit(lambda m, t: m(t, policy, relaxation=Relaxation(supervised=True)).supervision)(
        model, tokens
    )
    learned = policy.retrofit.supervision
    for row in range(2):
        done = transformer.run(
            oracle_weights(model), tokens[row], lambda layer: vanilla.simulate(*layer.rotated)
        )
        for layer in done.inputs:
            normed = transformer.rms_norm(
                layer.residual, layer.weights.attention_norm, layer.epsilon
            )
            want, known = oracle.log_importance(
                *layer.rotated,
                normed,
                layer.weights.o.kernel,
                window=learned.window,
                reduction=learned.reduction,
                sinks=learned.sinks,
                sinks_known=isinstance(policy, DMS),
            )
            chex.assert_trees_all_equal(np.asarray(seen.known[layer.index, row]), known)
            got = np.asarray(seen.importance[layer.index, row]).T
            chex.assert_trees_all_close(got[known], want[known], rtol=1e-9)
            own, late = scorer_outputs(layer)
            if isinstance(policy, KVpop):
                own[: -policy.window] += late[policy.window :]
            if isinstance(policy, DMS):
                raw = (own - oracle.LEVEL) / oracle.SCALE
                own = np.roll(raw, -1, 0) * policy.alpha_scale - policy.alpha_offset
            predicted = np.asarray(seen.predicted[layer.index, row]).T
            chex.assert_trees_all_close(predicted[known], own[known], rtol=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("policy", [ZAP, WARM], ids=repr)
def test_sinks_are_the_first_tokens_of_each_document(policy):
    """KVzap always keeps them and learns nothing from them; DMS learns to keep them."""
    model = random_model(tiny_config(), adapter=policy.retrofit.adapter, seed=2)
    ids = jnp.repeat(jnp.asarray([[1, 2, 0]]), np.array([12, 15, 3]), axis=1)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, ids.shape)
    see = lambda m, t: m(t, policy, segment_ids=ids, relaxation=Relaxation(supervised=True))  # noqa: E731
    seen = jax.jit(see)(model, tokens).supervision
    known, sinks = np.asarray(seen.known[:, 0]), [0, 1, 2, 3, 12, 13, 14, 15]
    if policy is WARM:
        assert known[:, sinks].all()
        assert not np.asarray(seen.importance[:, 0])[..., sinks].any()
    else:
        assert not known[:, sinks].any()
    assert known[:, [4, 6, 16, 21]].all()
    assert (np.asarray(seen.importance[:, 0])[..., [4, 6, 16, 21]] < 0).all()


def test_importance_includes_low_rank_updates():
    """Importance is the same after merging the updates."""
    model = random_model(tiny_config(), adapter=ZAP.retrofit.adapter, seed=2)
    size = low_rank.LowRank(2, 4.0)
    factors = low_rank.initial_factors(model, size, jax.random.key(0))
    factors = jax.tree.map(lambda x: x + 0.3, factors)
    model = low_rank.add_factors(model, size, factors)
    tokens = jnp.asarray(batch(5)["tokens"])
    see = jax.jit(lambda m, t: m(t, ZAP, relaxation=Relaxation(supervised=True)).supervision)
    found, wanted = (see(each, tokens).importance for each in (model, low_rank.merge(model)))
    chex.assert_trees_all_close(found, wanted, rtol=1e-3)


@pytest.mark.usefixtures("float64")
def test_supervised_losses_equal_numpy():
    random = np.random.default_rng(0)
    predicted, wanted = random.normal(size=(2, 2, 1, 1, 6))
    known = np.array([[True] * 4 + [False] * 2])[None].repeat(2, 0)
    seen = Supervision(*(jnp.asarray(x) for x in (predicted, wanted, known)))
    got = supervised_loss(FutureAttention(0), seen, 0.0)
    want = ((predicted - wanted)[..., :4] ** 2).mean()
    chex.assert_trees_all_close(np.asarray(got), np.array([want]), rtol=1e-12)
    # 5 of 8 keys, over both layers.
    least = np.zeros(8)
    least[np.argsort(wanted[..., :4].ravel())[:5]] = 1
    logits = predicted[..., :4].ravel()
    entropy = np.log1p(np.exp(logits)) - logits * least
    got = supervised_loss(FutureAttention(0, "least_important"), seen, 5 / 8)
    chex.assert_trees_all_close(np.asarray(got), np.array([entropy.mean()]), rtol=1e-12)
    nothing = Supervision(seen.predicted, seen.importance, jnp.zeros_like(seen.known))
    assert float(supervised_loss(FutureAttention(0), nothing, 0.0)[0]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["KVzap", "KVpop"])
def test_loss_falls_and_only_the_scorer_changes(base, trained, name):
    model, losses = trained[name]
    # Seen: KVzap 16.5 to 0.54, KVpop 6.8 to 0.19.
    assert np.mean(losses[-5:]) < 0.1 * losses[0]
    before, after = parameters(base.transformer), parameters(model.transformer)
    assert {key for key in after if not is_adapter(key)} == set(before)
    chex.assert_trees_all_equal({key: after[key] for key in before}, before)
    assert model.policy.name == name


@pytest.mark.nightly
def test_calibration_keeps_the_requested_share(trained):
    model, _ = trained["KVzap"]
    held_out = [batch(seed) for seed in range(2000, 2004)]
    kept = {}
    for ratio in (1, 2, 4):
        policy = calibrate(model, held_out, compression_ratio=ratio)
        assert policy == dataclasses.replace(ZAP, threshold=policy.threshold)
        decisions = model.transformer(
            jnp.asarray(held_out[0]["tokens"]), policy, relaxation=Relaxation(supervised=True)
        ).decisions
        kept[ratio] = 1 - float(decisions[..., : LENGTH - WINDOW - 1].mean())
    assert kept[1] == 1
    assert abs(kept[2] - 1 / 2) < 0.08
    assert abs(kept[4] - 1 / 4) < 0.08
    # In packed documents, tokens of other documents and padding do not count.
    ids = np.array([[1] * 20 + [2] * 15 + [0] * 5] * 4)
    packed = calibrate(model, [batch(0) | {"segment_ids": ids}], compression_ratio=2)
    assert packed.threshold != calibrate(model, [batch(0)], compression_ratio=2).threshold
    model = dataclasses.replace(model, policy=Vanilla())
    with pytest.raises(ConfigError, match=r"TOVA.*none that it could set"):
        calibrate(model, held_out, compression_ratio=2, policy=TOVA())
    with pytest.raises(DataError, match="leaves the window of 99"):
        calibrate(model, held_out, compression_ratio=2, policy=dataclasses.replace(ZAP, window=99))


def test_calibration_refuses_iterators():
    model = language_model(adapter=True)
    with pytest.raises(ConfigError, match=r"calibrate: batches must be a list of .*islice"):
        calibrate(model, map(batch, itertools.count()), compression_ratio=4, policy=WARM)


@pytest.mark.nightly
def test_calibration_moves_dms_to_other_ratios():
    model = language_model(adapter=True)
    held_out = [batch(seed) for seed in range(4)]
    policy = calibrate(model, held_out, compression_ratio=4, policy=WARM)
    decisions = model.transformer(
        jnp.asarray(held_out[0]["tokens"]), policy, relaxation=Relaxation(supervised=True)
    ).decisions
    assert abs(float(decisions.mean()) - 3 / 4) < 0.08
    assert policy == dataclasses.replace(WARM, alpha_offset=policy.alpha_offset)


def test_warm_up_trains_adapter_then_ramp_trains_all(monkeypatch):
    monkeypatch.setattr(trainer, "peak_operations", lambda mesh: 1e12)
    base = language_model(biases=True)
    records: list[dict[str, Any]] = []
    stages = (
        Stage("supervise", 30, 3e-3, final_learning_rate=0.0),
        Stage("ramp", 2, 1e-3, 4.0),
    )
    before = parameters(base.transformer)
    model = retrofit(
        base,
        WARM,
        recipe=recipe(*stages, sequence_length=LENGTH, weight_decay=0.5),
        data=iter([batch(seed) for seed in range(32)]),
        progress=False,
        on_step=records.append,
    )
    warm = [record["supervised_loss"] for record in records[:30]]
    assert np.mean(warm[-5:]) < 0.3 * warm[0]
    assert [record["stage"] for record in records[28:]] == ["supervise"] * 2 + ["ramp"] * 2
    # The adapter has learned to evict the final share of the ramp.
    assert abs(records[29]["evicted"] - 3 / 4) < 0.2
    assert "supervised_loss" not in records[30]
    # Operations a token: once through the layers; then four times through the whole model.
    of_layers, of_ramp = (
        1e12 * each["model_flops_utilisation"] * each["seconds"] / each["tokens"]
        for each in (records[29], records[31])
    )
    output = 2 * base.config.hidden_size * base.config.vocab_size
    assert of_ramp == pytest.approx(4 * (of_layers + output))
    after = parameters(model.transformer)
    assert all(np.abs(after[name] - before[name]).max() > 0 for name in before)
    halfway = train(
        base,
        policy=WARM,
        recipe=recipe(stages[0], sequence_length=LENGTH, weight_decay=0.5),
        data=iter([batch(seed) for seed in range(30)]),
        progress=False,
    )
    untouched = parameters(halfway.transformer)
    chex.assert_trees_all_equal({name: untouched[name] for name in before}, before)


def test_recipes_of_scorers_and_of_dms():
    zap = recipes.kvzap(tokens=10 * 64 * 8, sequence_length=64, batch_size=8)
    assert [(stage.kind, stage.steps) for stage in zap.stages] == [("supervise", 10)]
    assert zap.trained_for(KVzap()) == "adapter"
    assert zap.supervises
    pop = recipes.kvpop(tokens=10 * 64 * 8, sequence_length=64, batch_size=8)
    assert pop == dataclasses.replace(zap, name="kvpop")
    sizes: dict[str, Any] = dict(tokens=20 * 64 * 8, sequence_length=64, batch_size=8)
    warm = recipes.dms_warm_up(4.0, share=0.25, **sizes)
    assert [(stage.kind, stage.steps) for stage in warm.stages] == [
        ("supervise", 5),
        ("ramp", 5),
        ("train", 10),
    ]
    assert warm.compression_ratio == 4
    for wrong in (
        lambda: recipes.dms_warm_up(4.0, share=0.0),
        lambda: recipes.dms_warm_up(4.0, tokens=1),
        lambda: recipes.kvzap(tokens=0),
        lambda: recipes.kvpop(batch_size=0),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_mismatched_recipes_and_policies_are_refused(base):
    data = iter([batch(0)])
    with pytest.raises(ConfigError, match="KVpop learns from attention alone"):
        retrofit(base, POP, recipe=recipe(sequence_length=LENGTH), data=data)
    with pytest.raises(ConfigError, match="reads none"):
        retrofit(base, DMS(window=4), recipe=supervised(1), data=data)
    with pytest.raises(ConfigError, match="reads none"):
        train(base, recipe=supervised(1), data=data)
    with pytest.raises(ConfigError, match="no ramp"):
        retrofit(base, ZAP, recipe=recipe(Stage("train", 1, 1e-3)), data=data)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [ZAP, POP, KVzap(window=WINDOW, hidden=0)], ids=repr)
def test_scorers_are_saved_in_checkpoints_and_adapters(base, trained, tmp_path, policy):
    save(base, Vanilla(), tmp_path / "base")
    original = load(tmp_path / "base")
    model = retrofit(
        original,
        policy,
        recipe=supervised(1),
        data=iter([batch(0)]),
        progress=False,
        out=tmp_path / "run",
        adapter_only=True,
    )
    save(model, policy, tmp_path / "whole")
    save(model, policy, tmp_path / "adapter", adapter_only=True)
    tokens = batch(7)["tokens"][:1]
    want = np.asarray(model.logits(tokens))
    for again in (
        load(tmp_path / "whole"),
        load(tmp_path / "base", adapter=tmp_path / "adapter"),
        load(tmp_path / "base", adapter=tmp_path / "run" / "model"),
    ):
        assert again.policy == policy
        chex.assert_trees_all_equal(parameters(again.transformer), parameters(model.transformer))
        chex.assert_trees_all_equal(np.asarray(again.logits(tokens)), want)
    # Under another policy the scorer stays in the checkpoint.
    save(model, Vanilla(), tmp_path / "vanilla")
    again = load(tmp_path / "vanilla")
    assert again.transformer.adapter_shape == policy.retrofit.adapter
