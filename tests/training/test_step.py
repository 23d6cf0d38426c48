"""The step: accumulation, padding, noise, distilled positions, dtypes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.model.attention import Relaxation
from dms_jax.policies import Vanilla
from dms_jax.training import parameters as names
from dms_jax.training.parameters import add_adapter, parameters, rebuilder
from dms_jax.training.step import Constants, Passes, ScheduleValues, TrainingStep
from dms_jax.training.trainer import Trainer
from tests.support.instances import further
from tests.support.models import random_tokens
from tests.training.tiny import ADAPTER, EAGER, LENGTH, NEURON, language_model, recipe


def schedule_values(target=0.9, neuron_scale=None):
    number = lambda value: None if value is None else jnp.asarray(value)  # noqa: E731
    rates = (number(1e-3), number(1e-2))
    return ScheduleValues(number(target), number(neuron_scale), *rates, key=jax.random.key(0))


def gradients(model, policy, recipe, passes, key=None, **schedule):
    transformer = add_adapter(model.transformer) if policy.retrofit.adapter else model.transformer
    arrays = parameters(transformer)
    function = jax.jit(TrainingStep(rebuilder(transformer), policy, recipe).gradients)
    teacher = {name: x for name, x in arrays.items() if not names.is_adapter(name)}
    return function(arrays, Constants({}, teacher), passes, schedule_values(**schedule), key)


def ragged_passes(shape):
    """Sequences of two documents and padding, of different lengths."""
    tokens = random_tokens(1, 4, LENGTH)
    segment_ids = np.zeros_like(tokens)
    for row, (first, second) in enumerate([(5, 12), (3, 7), (6, 6), (1, 11)]):
        segment_ids[row, :first] = 1
        segment_ids[row, first:second] = 2
    mask = segment_ids > 0
    mask[2, 4] = False
    arrays = (x.reshape(*shape, LENGTH) for x in (tokens, mask, segment_ids))
    return Passes(*(jnp.asarray(x) for x in arrays))


@pytest.mark.nightly
def test_accumulation_remat_and_unrolling_keep_gradients():
    with jax.enable_x64(True):
        model = language_model(adapter=True, dtype=jnp.float64)
        whole, parts = gradients(model, EAGER, recipe(), ragged_passes((1, 4)))
        assert 0 < parts["evicted"] < 0.9
        other = recipe(remat="everything", unroll=True)
        pieces, same = gradients(model, EAGER, other, ragged_passes((4, 1)))
        chex.assert_trees_all_close(same, parts, rtol=1e-10)
        chex.assert_trees_all_close(pieces, whole, rtol=1e-8, atol=1e-12)


def test_padding_changes_nothing():
    """A document of 7 tokens and 5 of padding: every loss, share and gradient ignores padding."""
    with jax.enable_x64(True):
        model = language_model(adapter=True, dtype=jnp.float64)
        tokens = jnp.asarray(random_tokens(1, 2, LENGTH))[None]
        real = jnp.broadcast_to(jnp.arange(LENGTH) < 7, tokens.shape)
        alone = Passes(tokens[..., :7], real[..., :7])
        padded = Passes(tokens, real, real.astype(jnp.int32))
        want, parts = gradients(model, EAGER, recipe(), alone)
        assert 0.1 < parts["evicted"] < 0.8
        found, same = gradients(model, EAGER, recipe(), padded)
        chex.assert_trees_all_close(same, parts, rtol=1e-10)
        chex.assert_trees_all_close(found, want, rtol=1e-8, atol=1e-12)


def test_every_pass_draws_its_own_noise():
    """Two passes over the same tokens draw different noise: their mean differs from the first."""
    model = language_model(adapter=True)
    one = ragged_passes((1, 4))
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    key = jax.random.key(3)
    _, first = gradients(model, EAGER, recipe(), one, key)
    _, both = gradients(model, EAGER, recipe(), two, key)
    assert abs(both["distillation_loss"] / first["distillation_loss"] - 1) > 1e-3


@pytest.mark.parametrize("positions", ["targets", *further("inputs")])
def test_distillation_counts_only_answer_positions(positions):
    """Prompt, answer, end token, padding: the mean divergence against float64, token by token.

    With "targets" the first token of the answer counts, and the token after the end token does not.
    """
    with jax.enable_x64(True):
        model = language_model(adapter=True, dtype=jnp.float64)
        tokens = jnp.asarray(random_tokens(5, 2, LENGTH))
        segment_ids = np.array([[1] * 5 + [2] * 6 + [0], [1] * 12])
        mask = np.zeros_like(segment_ids, bool)
        mask[0, 2:5] = mask[0, 8:11] = mask[1, 7:12] = True
        passes = Passes(*(jnp.asarray(x)[None] for x in (tokens, mask, segment_ids)))
        options = recipe(distillation_positions=positions)
        _, parts = gradients(model, EAGER, options, passes)

        ids = jnp.asarray(segment_ids)
        own = [
            jax.nn.log_softmax(model.transformer.unembed(result.hidden))
            for result in (
                model.transformer(tokens, EAGER, segment_ids=ids, relaxation=Relaxation()),
                model.transformer(tokens, Vanilla(), segment_ids=ids),
            )
        ]
    student, teacher = (np.asarray(x) for x in own)
    divergence = (np.exp(student) * (student - teacher)).sum(-1)
    wanted = {
        "targets": [(0, 1), (0, 2), (0, 3), (0, 7), (0, 8), (0, 9)]
        + [(1, t) for t in (6, 7, 8, 9, 10)],
        "inputs": [(0, 2), (0, 3), (0, 4), (0, 8), (0, 9), (0, 10)]
        + [(1, t) for t in (7, 8, 9, 10, 11)],
    }[positions]
    expected = np.mean([divergence[place] for place in wanted])
    chex.assert_trees_all_close(parts["distillation_loss"], expected, rtol=1e-9)


def step_once(trainer, options, tokens=None):
    tokens = random_tokens(0, options.batch_size, LENGTH) if tokens is None else tokens
    batch = {"tokens": tokens, "loss_mask": np.ones_like(tokens, bool)}
    return trainer.step([batch], options.progress(int(trainer.state.step), EAGER))


def test_auto_trains_adapter_or_all():
    model = language_model()
    options = recipe(trainable="auto")
    adapter = Trainer(model, ADAPTER, options, seed=0, mesh=None)
    assert all(names.is_adapter(name) for name in adapter.state.parameters)
    neuron = Trainer(model, NEURON, options, seed=0, mesh=None)
    assert neuron.state.parameters.keys() == parameters(model.transformer).keys()


@pytest.mark.nightly
def test_bfloat16_passes_over_float32_parameters():
    model = language_model(dtype=jnp.bfloat16)
    options = recipe(compute_dtype="bfloat16")
    # The adapter starts at zero, so every decision keeps and nothing is masked.
    trainer = Trainer(model, ADAPTER, options, seed=0, mesh=None)
    tokens = random_tokens(0, 4, LENGTH)
    metrics = step_once(trainer, options, tokens)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), model.transformer)
    logits = exact.unembed(exact(jnp.asarray(tokens), Vanilla()).hidden)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1)
    chex.assert_trees_all_close(metrics["lm_loss"], -likelihood.mean(), rtol=2e-2)
    assert {x.dtype for x in trainer.state.parameters.values()} == {jnp.dtype("float32")}
    moments = [x for x in jax.tree.leaves(trainer.state.optimizer) if x.ndim]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}
    result = parameters(trainer.model().transformer)
    kept = {x.dtype for name, x in result.items() if not names.is_adapter(name)}
    assert kept == {jnp.dtype("bfloat16")}
    adapter = {x.dtype for name, x in result.items() if names.is_adapter(name)}
    assert adapter == {jnp.dtype("float32")}
