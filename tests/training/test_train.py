"""`train`: language modelling without a policy, from the first step to resumption."""

import dataclasses
import itertools
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dms_jax
from dms_jax.errors import ConfigError
from dms_jax.policies import TOVA, Vanilla
from dms_jax.training import held_out_loss, train
from dms_jax.training.parameters import parameters, rebuilder
from dms_jax.training.recipe import Stage
from tests.support.models import VOCABULARY, random_tokens
from tests.training.tiny import LENGTH, documents, language_model, recipe

# Four steps: two of warm-up, two of decay.
STAGE = Stage("train", 4, 1e-2, warmup_steps=2, final_learning_rate=1e-3)
RECIPE = recipe(STAGE, loss="language_modeling", weight_decay=0.1, clip=0.5)


@pytest.fixture(scope="module")
def reference(model):
    """The parameters after an uninterrupted run, and the records of its steps."""
    records = []
    result = run(model, on_step=records.append)
    arrays = jax.device_get(parameters(result.transformer))
    chex.assert_tree_all_finite(arrays)
    return arrays, records


def run(model, **options):
    options = dict(recipe=RECIPE, data=documents(), progress=False) | options
    return train(model, **options)


def batches(count, seed=3):
    """Batches of two documents per sequence and a little padding."""
    segment_ids = np.zeros((4, LENGTH), np.int32)
    for row, (first, second) in enumerate([(5, 12), (3, 7), (6, 6), (1, 11)]):
        segment_ids[row, :first] = 1
        segment_ids[row, first:second] = 2
    mask = segment_ids > 0
    mask[1, :2] = False
    return [
        {
            "tokens": random_tokens(seed + index, 4, LENGTH),
            "segment_ids": segment_ids,
            "loss_mask": mask,
        }
        for index in range(count)
    ]


def mean_loss(transformer, batch):
    """The mean loss over counted tokens whose predecessor is in the same document."""
    tokens, ids, mask = (jnp.asarray(batch[x]) for x in ("tokens", "segment_ids", "loss_mask"))
    hidden = transformer(tokens, Vanilla(), segment_ids=ids).hidden
    logits = jax.nn.log_softmax(transformer.unembed(hidden[:, :-1]))
    likelihood = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    counts = mask[:, 1:] & (ids[:, 1:] == ids[:, :-1])
    return -jnp.sum(jnp.where(counts, likelihood, 0)) / counts.sum()


def test_a_run_is_adamw_on_the_language_modelling_loss():
    """Four steps against optax's own clipping, AdamW and schedules, in float64."""
    with jax.enable_x64(True):
        model = language_model(dtype=jnp.float64)
        records = []
        result = run(model, data=iter(batches(4)), on_step=records.append)

        rates = [
            0.5e-2,
            1e-2,
            *(optax.cosine_decay_schedule(1e-2, 2, alpha=0.1)(t) for t in (0, 1)),
        ]
        arrays = parameters(model.transformer)
        rebuild = rebuilder(model.transformer)
        decays = {name: not name.endswith((".scale", ".bias")) for name in arrays}
        adam = optax.scale_by_adam(0.9, 0.95, 1e-8)
        state = adam.init(arrays)
        gradient_of = jax.jit(jax.value_and_grad(lambda arrays, b: mean_loss(rebuild(arrays), b)))
        for batch, rate, record in zip(batches(4), rates, records, strict=True):
            loss, gradient = gradient_of(arrays, batch)
            norm = optax.tree.norm(gradient)
            gradient = jax.tree.map(lambda x: x * min(1, 0.5 / norm), gradient)  # noqa: B023
            update, state = adam.update(gradient, state)
            arrays = {
                name: array - rate * (update[name] + 0.1 * decays[name] * array)
                for name, array in arrays.items()
            }
            chex.assert_trees_all_close(record["loss"], loss, rtol=1e-9)
            chex.assert_trees_all_close(record["grad_norm"], norm, rtol=1e-7)
            chex.assert_trees_all_close(record["learning_rate"], rate, rtol=1e-6)
        chex.assert_trees_all_close(parameters(result.transformer), arrays, rtol=1e-5, atol=1e-7)


def test_a_run_reports_a_plain_cache(reference):
    _, records = reference
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["stage"] == "train"
        assert record["loss"] == record["lm_loss"]
        assert (record["evicted"], record["target"], record["target_ratio"]) == (0, 0, 1)
        assert record["distillation_loss"] == record["compression_loss"] == 0
        assert record["visible_keys"] == pytest.approx((LENGTH + 1) / 2)
        assert record["document_share"] == 1
        assert record["model_flops_utilisation"] is None  # the peak of a CPU is unknown
        assert record["data_seconds"] >= 0


def test_every_step_is_timed_by_itself(model):
    """Steps in flight at the end are collected together, but each has a separate duration."""
    wait, records = 0.1, []

    def slow():
        for batch in batches(6):
            time.sleep(wait)
            yield batch

    options = dataclasses.replace(RECIPE, stages=(dataclasses.replace(STAGE, steps=6),))
    run(model, recipe=options, data=slow(), on_step=records.append)
    # On a busy machine one step may end late at the next one's cost, but not most steps.
    assert np.median([record["seconds"] for record in records]) > 0.7 * wait
    for record in records:  # steps read together would have a hundredth of it
        assert record["seconds"] > 0.1 * wait
        assert record["tokens_per_second"] == record["tokens"] / record["seconds"]


def test_end_tokens_are_ignored_for_every_batch_source(model):
    ends = dataclasses.replace(model.generation, eos_token_ids=(7, 11))
    ending = dataclasses.replace(model, generation=ends)
    tokens = random_tokens(3, 4, LENGTH)
    counted = ~np.isin(tokens, (7, 11))
    assert 0 < counted.mean() < 1
    options = dataclasses.replace(RECIPE, stages=(Stage("train", 2, 1e-2),))
    ignoring = dataclasses.replace(options, ignore_end_token=True)
    losses = {}
    for name, own, mask in (
        ("iterator", ignoring, None),
        ("mask", options, counted),
        ("all", options, None),
    ):
        batch = {"tokens": tokens} | ({} if mask is None else {"loss_mask": mask})
        records = []
        run(ending, recipe=own, data=iter([batch, batch]), on_step=records.append)
        losses[name] = [record["loss"] for record in records]
    assert losses["iterator"] == losses["mask"] != losses["all"]


def test_a_run_is_evaluated_during_training(model, reference):
    expected, _ = reference
    seen, records = [], []

    def evaluate(model):
        seen.append(jax.device_get(parameters(model.transformer)))
        return {"number": np.float32(len(seen))}

    run(model, on_step=records.append, evaluate=evaluate, evaluate_every=3)
    assert [record.get("evaluation") for record in records] == [
        None,
        None,
        {"number": 1},
        {"number": 2},
    ]
    chex.assert_trees_all_equal(seen[-1], expected)
    assert any((seen[0][name] != expected[name]).any() for name in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(recipe=recipe(STAGE)), "the model is its own teacher"),
        (dict(policy=TOVA(budget=8)), "TOVA has no trainable form. Train with the vanilla cache"),
        (
            dict(recipe=dataclasses.replace(RECIPE, trainable="adapter")),
            "trains only the adapter",
        ),
    ],
)
def test_impossible_calls_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        run(model, **options)


def test_callers_batches_are_checked(model):
    """A token outside the vocabulary would silently be treated as another one."""
    outside = {"tokens": np.full((4, LENGTH), VOCABULARY)}
    with pytest.raises(dms_jax.DataError, match=f"must lie in 0 ... {VOCABULARY - 1}"):
        run(model, data=iter([outside]))
    with pytest.raises(dms_jax.DataError, match=r"got 'a text'.*texts or token ids as a list"):
        run(model, data=iter(["a text"]))
    with pytest.raises(dms_jax.DataError, match=f"must lie in 0 ... {VOCABULARY - 1}"):
        held_out_loss(model, {"part": [outside]}, compute_dtype=None)


@pytest.mark.parametrize("part", [itertools.cycle(batches(1)), iter(batches(1)), batches(1)[0]])
def test_held_out_iterators_are_refused(model, part):
    with pytest.raises(ConfigError, match=r"Part 'it' .* must be a list of batches.*islice"):
        held_out_loss(model, {"it": part})
