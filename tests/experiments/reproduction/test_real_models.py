"""The measurement of real models: budgets, lessons and trainings."""

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest

import dms_jax
from dms_jax.data import Exchange
from experiments.reproduction.files import write_json
from experiments.reproduction.real import lessons, systems
from experiments.reproduction.real.budgets import budget_of_mean, calibrated, fitted, matched
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.sweep import CENTRE, SWEEPS
from experiments.reproduction.real.systems import CHOICES, CONTROL, FREE, PLANNED, TRAININGS

GIVEN = Config(qwen="reasoner-11m", smollm2="reasoner-11m", data=pathlib.Path("data"))


def test_the_budget_of_a_mean_is_the_smallest_that_holds_as_many():
    prompts, answers = np.asarray([2]), np.asarray([5])  # steps at 3, 4, 5 and 6 tokens
    assert budget_of_mean(prompts, answers, 3.0) == 3
    assert budget_of_mean(prompts, answers, 3.75) == 4
    assert budget_of_mean(prompts, answers, 4.5) == 6
    assert budget_of_mean(prompts, answers, 9.0) == 6  # as many as there are
    random = np.random.default_rng(0)
    prompts, answers = random.integers(1, 9, 20), random.integers(1, 30, 20)
    live = [min(p + s, 7) for p, a in zip(prompts, answers, strict=True) for s in range(1, a)]
    assert budget_of_mean(prompts, answers, float(np.mean(live))) == 7


def test_methods_hold_as_much_as_the_reference_did(tmp_path):
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path))
    lengths = {"prompt_tokens": [100, 50], "new_tokens": [200, 20]}
    write_json(paths.result(free("qwen", "vanilla")), {"peak": 384.0, "per_problem": lengths})
    write_json(paths.reference("qwen", "gsm8k"), {"peak": 120.4, "mean_live": 99.0})

    def budget(name: str) -> int:
        policy = calibrated(paths, free("qwen", name), FREE[name])
        return policy.top if isinstance(policy, dms_jax.KCache) else policy.budget

    assert budget("tova") == budget("streaming") == budget("h2o") == budget("kcache") == 120
    assert budget("expected") == budget("snapkv") == 120 - systems.INTERVAL
    assert budget("tova-half-more") == 181
    # 199 steps over more than 100 tokens and 19 of 60 in the mean: (199 b + 19 * 60) / 218 >= 99
    assert budget("tova-mean") == 103
    write_json(paths.result(free("smollm2", "vanilla", "choices")), {"peak": 90.0})
    write_json(paths.reference("smollm2", "choices"), {"peak": 40.0})
    policy = calibrated(paths, free("smollm2", "tova", "choices"), FREE["tova"])
    assert policy == dms_jax.TOVA(compression_ratio=2.25, prefill="evict_past_budget")


def test_scorers_hold_as_much_as_the_reference_did(tmp_path, monkeypatch):
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path))
    write_json(paths.result(free("qwen", "vanilla")), {"peak": 386.0})
    write_json(paths.reference("qwen", "gsm8k"), {"peak": 120.4})
    job = Job("asking", "qwen", "kvpop", "3.5", "gsm8k")
    policy = fitted(paths, job, None, TRAININGS["kvpop"].policy, [])
    # One more while a query attends.
    assert policy == dms_jax.KVpop(budget=119, window=16, prefill="evict_past_budget")

    def calibrate(model, batches, *, compression_ratio, policy):
        kept = [batch["tokens"][batch["segment_ids"] > 0].tolist() for batch in batches]
        return compression_ratio, kept, policy

    monkeypatch.setattr(dms_jax, "calibrate", calibrate)
    exchange = Exchange(np.asarray([1, 2], np.int32), np.asarray([3], np.int32))
    kvzap = TRAININGS["kvzap"].policy
    ratio, kept, policy = fitted(paths, job, None, kvzap, [exchange] * 9)
    always = 16 + 1 + 4  # the window with the current token, and the sinks
    assert ratio == pytest.approx((386 - always) / (120.4 - always))
    assert kept == [[1, 2, 3] * 8, [1, 2, 3]]
    assert policy == kvzap
    # Peaks of a problem are those of its chains together, and each has a budget.
    write_json(paths.result(free("qwen", "vanilla", "frontier")), {"peak": 8 * 386.0, "chains": 8})
    write_json(paths.reference("qwen", "frontier"), {"peak": 8 * 128.2, "chains": 8})
    job = Job("asking", "qwen", "kvpop", "3.5", "frontier")
    assert fitted(paths, job, None, TRAININGS["kvpop"].policy, []).budget == 127
    write_json(paths.result(free("qwen", "vanilla", CHOICES)), {"peak": 90.0})
    write_json(paths.reference("qwen", CHOICES), {"peak": 40.0})
    job = Job("asking", "qwen", "kvpop", "3.5", CHOICES)  # questions of very different lengths
    assert fitted(paths, job, None, TRAININGS["kvpop"].policy, []).compression_ratio == 2.25


@pytest.mark.parametrize("start", [-9.0, -5.1, -2.0])
@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_a_threshold_is_moved_until_as_much_is_held(start, drift):
    asked = []

    def ask(policy):
        """386 tokens of which the window stays; more is evicted, and answers are shorter."""
        asked.append(policy.threshold)
        share = 1 / (1 + np.exp(1.4 * (policy.threshold + 5.5)))
        length = 386 * (1 - drift * (1 - share))
        return {"peak": 21 + (length - 21) * share, "score": len(asked)}

    found = matched(ask, dms_jax.KVzap(window=16, threshold=start), 127.0)
    assert found.found["peak"] == pytest.approx(127, rel=0.02)
    assert found.policy == dms_jax.KVzap(window=16, threshold=asked[-1])
    assert found.found["score"] == len(asked) == len(found.tries) <= 8
    assert found.tries[-1] == (asked[-1], found.found["peak"])


def test_a_peak_that_no_threshold_gives_is_an_error():
    ask = lambda policy: {"peak": 300.0 if policy.threshold < -5 else 60.0}  # noqa: E731
    with pytest.raises(
        dms_jax.DataError, match=r"a peak of 127\.0 tokens: 300\.0 at -6\.000, 60\.0"
    ):
        matched(ask, dms_jax.KVzap(window=16), 127.0)


def test_every_training_has_a_recipe_of_the_plans_tokens_that_settles():
    for training in TRAININGS.values():
        recipe = training.recipe(GIVEN)
        steps = recipe.total_steps(training.policy or dms_jax.Vanilla())
        whole = GIVEN.tokens if training.model == systems.QWEN else GIVEN.small_tokens
        whole = GIVEN.sweep_tokens if training.of_sweep else whole
        tokens = training.share * whole
        assert steps * recipe.batch_size * recipe.sequence_length == pytest.approx(tokens, rel=0.01)
        last = recipe.progress(steps, training.policy or dms_jax.Vanilla())
        assert last.compression_ratio == (training.ratio if training.evicts_as_trained else 1)
        assert recipe.stages[-1].final_learning_rate in (0, 1e-5)


def test_what_is_planned_is_the_librarys_recipe_at_its_ratio():
    recipe = TRAININGS[PLANNED].recipe(GIVEN)
    same = dataclasses.replace(recipe, name="dms_self_taught", snapshots=())
    assert same == dms_jax.recipes.dms_self_taught(TRAININGS[PLANNED].ratio)
    control = TRAININGS[CONTROL].recipe(GIVEN)
    assert control.total_tokens(dms_jax.Vanilla()) == recipe.total_tokens(dms_jax.DMS())
    assert control.trainable == recipe.trainable == "low_rank"


def test_shares_are_all_questions_and_none_twice():
    shares = [lessons._share(range(10), shard, 4) for shard in range(4)]
    assert [list(share) for share in shares] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_trainings_read_what_the_model_ended(tmp_path):
    config = dataclasses.replace(GIVEN, out=tmp_path, shards=1)
    row = {"question": 0, "answer": 0, "held_out": False, "prompt": [1], "response": [2, 3]}
    kept = row | {"ended": True}
    rows = [
        kept,
        kept | {"response": [4]},
        kept | {"ended": False},
        kept | {"held_out": True, "response": [5]},
    ]
    place = Paths(config).lessons("qwen", 0)
    place.parent.mkdir(parents=True)
    place.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def responses(config):
        read = lessons.training_documents(config, "qwen", None)
        return [each.response.tolist() for each in read]

    assert responses(config) == [[2, 3], [4]]
    assert responses(dataclasses.replace(config, unended=True)) == [[2, 3], [4], [2, 3]]
    (held_out,) = lessons.held_out_exchanges(config, "qwen")
    assert (held_out.prompt.tolist(), held_out.response.tolist()) == ([1], [5])
    place.write_text(json.dumps(kept | {"ended": False}) + "\n")
    with pytest.raises(dms_jax.DataError, match="None of 1 answers of qwen is ended"):
        lessons.training_documents(config, "qwen", None)


def test_the_end_of_each_text_is_in_no_lesson(tmp_path):
    """RULER's essays are of the last sixteenth of the novels."""
    (tmp_path / "text").mkdir()
    for name in lessons.TEXTS:
        (tmp_path / "text" / name).write_text("learned " * 140 + "kept out" * 20)
    tokenizer = types.SimpleNamespace(encode=lambda text, **_: list(text.encode()))
    config = dataclasses.replace(GIVEN, data=tmp_path, sequence_length=8)
    windows = lessons._texts(config, types.SimpleNamespace(tokenizer=tokenizer))
    assert {bytes(each.tolist()) for each in windows} == {b"learned "}


def test_a_sweep_changes_one_thing_of_its_middle():
    fields = {field.name for field in dataclasses.fields(CENTRE)} - {"name", "words"}
    for each in SWEEPS:
        changed = [name for name in fields if getattr(each, name) != getattr(CENTRE, name)]
        assert len(changed) == 1, each.name
    recipe = CENTRE.recipe(GIVEN)
    wanted = dms_jax.recipes.dms_self_taught(4.0, tokens=GIVEN.sweep_tokens)
    assert dataclasses.replace(recipe, name="dms_self_taught") == wanted
