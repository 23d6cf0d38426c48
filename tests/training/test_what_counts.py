"""Counted tokens of the losses, the teacher, and resets of noise and moments.

Checked by the records of a run and its models, whose logits are compared in NumPy.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.errors import DataError, OutOfMemoryError
from dms_jax.policies import DMS, Vanilla
from dms_jax.training import (
    calibrate,
    calibration,
    held_out,
    held_out_loss,
    retrofit,
    train,
)
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from tests.support.instances import further
from tests.support.models import random_tokens
from tests.training.tiny import EAGER, LENGTH, NEURON, language_model, recipe

# Nothing is evicted, so the student equals vanilla.
PLAIN = DMS(window=3, source="adapter", alpha_offset=1e6)


def log_softmax(model, tokens):
    """Returns vanilla log-probabilities, [B, T, V]."""
    hidden = model.transformer(jnp.asarray(tokens), Vanilla()).hidden
    return np.asarray(jax.nn.log_softmax(model.transformer.unembed(hidden)), np.float64)


def likelihoods(model, tokens):
    """Returns the log-probabilities of tokens 1, 2, ... of each sequence, [B, T - 1]."""
    logits = log_softmax(model, tokens)[:, :-1]
    return np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]


def run(model, policy, options, batch, **more):
    """Runs every step on one batch; returns the records and the model after each step."""
    records, models = [], []

    def evaluate(model):
        models.append(model)
        return {}

    retrofit(
        model,
        policy,
        recipe=options,
        data=itertools.repeat(batch),
        on_step=records.append,
        evaluate=evaluate,
        evaluate_every=1,
        progress=False,
        **more,
    )
    return records, models


def test_teacher_is_fixed_and_uncounted_tokens_ignored(model):
    """Weights decay by a fifth in each step; half of the sequences are not counted.

    A sequence that repeats one token has the same distribution at every position, so any positions
    may be compared.
    """
    tokens = np.repeat(np.array([[3], [7], [11], [19]], np.int32), LENGTH, axis=1)
    mask = np.repeat(np.array([[True], [True], [False], [False]]), LENGTH, axis=1)
    options = recipe(
        Stage("ramp", 3, 0.1, 4.0, adapter_learning_rate=1e-9), weight_decay=2.0, unroll=True
    )
    records, models = run(model, PLAIN, options, {"tokens": tokens, "loss_mask": mask})
    teacher = log_softmax(model, tokens)
    assert np.ptp(teacher, axis=1).max() < 1e-4
    assert abs(records[0]["distillation_loss"]) < 1e-6
    for record, student in zip(records[1:], models, strict=False):
        student = log_softmax(student, tokens)
        divergence = (np.exp(student) * (student - teacher)).sum(-1)[:, 0]
        assert divergence.min() > 0.01
        assert record["distillation_loss"] == pytest.approx(divergence[:2].mean(), rel=1e-3)
        assert record["evicted"] == 0


@pytest.mark.parametrize("packed", [True, *further(False)])
def test_the_last_token_of_a_sequence_predicts_nothing(model, packed):
    """In particular, the sequence's first token is not its target."""
    tokens = random_tokens(5, 4, LENGTH)
    batch = {"tokens": tokens} | ({"segment_ids": np.ones_like(tokens)} if packed else {})
    records = []
    options = recipe(Stage("train", 1, 1e-3), loss="language_modeling")
    train(model, recipe=options, data=iter([batch]), on_step=records.append, progress=False)
    want = -likelihoods(model, tokens).mean()
    assert records[0]["lm_loss"] == pytest.approx(want, rel=1e-5)


def test_the_held_out_loss_is_a_mean_over_tokens(model):
    """Batches of 4 x 11 targets and of 4 x 2."""
    few = np.zeros((4, LENGTH), bool)
    few[:, 4:6] = True
    batches = [{"tokens": random_tokens(seed, 4, LENGTH)} for seed in (1, 2)]
    batches[1]["loss_mask"] = few
    all_targets, some = (-likelihoods(model, batch["tokens"]) for batch in batches)
    some = some[:, 3:5]  # the positions that predict tokens 4 and 5
    want = (all_targets.sum() + some.sum()) / (all_targets.size + some.size)
    assert abs(want - (all_targets.mean() + some.mean()) / 2) > 1e-3
    parts = {"both": batches, "few": batches[1:]}
    found = held_out_loss(model, parts, compute_dtype=None)
    assert found == {"both": pytest.approx(want, rel=1e-5), "few": pytest.approx(some.mean(), 1e-5)}
    silent = batches[0] | {"loss_mask": np.zeros((4, LENGTH), bool)}
    with pytest.raises(DataError, match="Part 'none' of the held-out data has no token"):
        held_out_loss(model, {"none": [silent]})


def test_out_of_memory_on_held_out_batches(model, monkeypatch):
    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    batches = [{"tokens": random_tokens(1, 4, LENGTH)}]
    monkeypatch.setattr(held_out, "_sums", refuse)
    with pytest.raises(OutOfMemoryError, match="measuring held-out batches"):
        held_out_loss(model, {"a": batches})
    with pytest.raises(OutOfMemoryError, match="measuring held-out batches"):
        held_out_loss(model, {"a": batches}, teacher=model)
    monkeypatch.setattr(calibration, "_predictions", refuse)
    learned = language_model(adapter=True)
    with pytest.raises(OutOfMemoryError, match="calibrating"):
        calibrate(learned, batches, compression_ratio=2, policy=PLAIN)


@pytest.mark.nightly
def test_the_held_out_divergence_is_a_mean_over_counted_tokens(model):
    """KL(student || teacher) where the next token counts, under hard decisions."""
    student = language_model(adapter=True)
    tokens = random_tokens(4, 4, LENGTH)
    mask = np.ones(tokens.shape, bool)
    mask[:2, 6:] = False
    parts = {"a": [{"tokens": tokens, "loss_mask": mask}]}
    options: dict[str, Any] = dict(teacher=model, policy=EAGER)
    narrow = held_out_loss(student, parts, **options)["a"]
    found = held_out_loss(student, parts, **options, compute_dtype=None)["a"]
    own, other = (
        np.asarray(jax.nn.log_softmax(each.logits(tokens, policy=policy)))
        for each, policy in ((student, EAGER), (model, Vanilla()))
    )
    distances = np.sum(np.exp(own) * (own - other), -1)[:, :-1]
    want = distances[mask[:, 1:]].mean()
    assert found == pytest.approx(want, rel=1e-4)
    assert want > 1e-3
    assert narrow == pytest.approx(want, rel=0.2)  # bfloat16
    same = held_out_loss(model, {"a": [{"tokens": tokens}]}, teacher=model, policy=Vanilla())
    assert same["a"] == pytest.approx(0, abs=1e-6)


def test_noise_differs_by_step_and_follows_the_seed(model):
    """One batch, and weights that do not change."""
    options = recipe(Stage("ramp", 4, 1e-30, 1.0001))
    batch = {"tokens": random_tokens(6, 4, LENGTH)}
    grafted = language_model(adapter=True)
    losses = [
        [record["distillation_loss"] for record in run(grafted, EAGER, options, batch, seed=s)[0]]
        for s in (0, 0, 1)
    ]
    assert losses[0] == losses[1]
    assert len(set(losses[0] + losses[2])) == 8


def test_moments_are_reset_after_the_decay(model):
    """Without earlier moments every weight moves by the learning rate, g / sqrt(g^2)."""
    rate = 1e-3
    options = recipe(
        Stage("neuron_decay", 2, rate), Stage("ramp", 2, rate, 4.0), weight_decay=0.0, clip=1e9
    )
    batch = {"tokens": random_tokens(7, 4, LENGTH)}
    _, models = run(model, NEURON, options, batch)
    arrays = [parameters(each.transformer) for each in models]

    def lengths(step):
        """Returns the update of a step in units of the rate, without the zeroed matrix."""
        return np.concatenate(
            [
                np.abs(np.asarray(arrays[step][name] - arrays[step - 1][name])).ravel() / rate
                for name in arrays[0]
                if "qkv_proj" not in name
            ]
        )

    first, second = lengths(2), lengths(3)
    assert np.mean(np.abs(first - 1) < 0.01) > 0.95
    assert np.mean(np.abs(second - 1) < 0.01) < 0.5


def test_batches_with_padding_need_no_mask(model):
    tokens = random_tokens(5, 4, LENGTH)
    segments = np.zeros_like(tokens)
    segments[:, :5] = 1
    records = []
    options = recipe(Stage("train", 1, 1e-3), loss="language_modeling")
    batch = {"tokens": tokens, "segment_ids": segments}
    train(model, recipe=options, data=iter([batch]), on_step=records.append, progress=False)
    want = -likelihoods(model, tokens)[:, :4].mean()
    assert records[0]["lm_loss"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("first", [False, True])
def test_segments_in_only_some_passes_are_refused(model, first):
    """Segment ids of a second pass used to be ignored if the first pass had none."""
    tokens = random_tokens(5, 2, LENGTH)
    batches = [{"tokens": tokens}, {"tokens": tokens, "segment_ids": np.ones_like(tokens)}]
    options = recipe(Stage("train", 1, 1e-3), loss="language_modeling", micro_batch_size=2)
    with pytest.raises(DataError, match="Some batches of step 1 have segment_ids"):
        train(model, recipe=options, data=reversed(batches) if first else iter(batches))
