"""Laws 1 to 4 on models in which some layers have a window or no rotation.

Under any policy, layers with a window hold exactly its tokens, in rows of bounded length; the
policy sees only the other layers. Logits, slots in use and reads are compared with the NumPy model,
pages and usage of whole requests with its traces.
"""

import dataclasses
import functools

import chex
import numpy as np
import pytest

from dms_jax.config import ModelConfig, Rope
from dms_jax.model.language_model import LanguageModel
from tests.laws.expected import (
    LENGTHS,
    SPLITS,
    TOKENS,
    TOLERANCE,
    WIDTH,
    live_totals,
    padded_tokens,
    peak_slots,
    read_again,
    read_totals,
    simulate,
)
from tests.laws.rows import MODEL_ROWS, Row
from tests.laws.serving import ALMOST_GREEDY, check_completion, engine_of
from tests.laws.simulations import LAYERS
from tests.laws.test_memory import PROMPTS, Watch, assert_empty
from tests.oracles import transformer
from tests.support.cached_runs import drive, of_model, poisoned_cache, ragged_parts
from tests.support.instances import further, nightly_but
from tests.support.models import oracle_weights, random_model, random_tokens, tiny_config

WINDOW = 5
# Each model has two layers whose cache grows, like the simulations of policies.
MODELS = {
    "a group and a part": dict(
        num_layers=5,
        layer_types=("sliding", "full", "sliding"),
        window=WINDOW,
        local_rope=Rope(theta=20.0),
    ),
    "alternating": dict(num_layers=4, layer_types=("sliding", "full"), window=WINDOW),
    "unrotated": dict(num_layers=3, layer_types=("sliding", "unrotated", "full"), window=WINDOW),
}


def config_of(name: str, row: Row) -> ModelConfig:
    return tiny_config(num_heads=2 * row.group, num_kv_heads=2, **MODELS[name])


@functools.cache
def model_of(name: str, row: Row):
    return random_model(config_of(name, row), adapter=row.policy.retrofit.adapter)


@functools.cache
def passes(name: str, row: Row, prompts: tuple[int, ...]) -> list[transformer.Pass]:
    weights = oracle_weights(model_of(name, row))
    return [
        simulate(row, weights, tokens, prompt, row.page_size)
        for tokens, prompt in zip(TOKENS, prompts, strict=True)
    ]


def test_the_simulations_see_two_layers():
    for name in MODELS:
        assert config_of(name, MODEL_ROWS[0]).num_full_layers == LAYERS


QUICK = {row for row in MODEL_ROWS if row.policy.name in ("DMS", "TOVA")}


@pytest.mark.parametrize("row", nightly_but(QUICK, MODEL_ROWS), ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["a group and a part", *further("alternating", "unrotated")])
def test_prompts_and_answers(name, row):
    """Rows have only the pages that the simulation needs, so a window's rows cannot grow."""
    prompts = SPLITS[1]
    found, policy = passes(name, row, prompts), row.policy
    traces = [one.traces for one in found]
    cache = poisoned_cache(
        config_of(name, row),
        policy,
        peak_slots(traces),
        page_size=row.page_size,
        table_width=-(-max(LENGTHS) // row.page_size),
        max_lengths=LENGTHS,
    )
    run = of_model(policy, model_of(name, row), TOKENS)
    out = drive(policy, LENGTHS, cache, ragged_parts(2, LENGTHS, prompts, width=WIDTH), run)
    for sequence, layers in enumerate(traces):
        assert np.abs(out.outputs[sequence] - found[sequence].logits).max() < TOLERANCE
        chex.assert_trees_all_equal(out.live[sequence], live_totals(layers))
        reads = read_totals(layers, row.page_size) + read_again(row, layers, prompts[sequence])
        chex.assert_trees_all_equal(out.reads[sequence], reads)


@pytest.mark.parametrize("name", ["a group and a part", *further("alternating", "unrotated")])
def test_one_pass_over_whole_sequences(name):
    row = MODEL_ROWS[1]
    model = LanguageModel(model_of(name, row), policy=row.policy)
    logits = np.asarray(model.logits(padded_tokens()))
    for found, one in zip(logits, passes(name, row, SPLITS[1]), strict=True):
        assert np.abs(found[: len(one.logits)] - one.logits).max() < TOLERANCE


@pytest.mark.parametrize("row", nightly_but([MODEL_ROWS[1]], MODEL_ROWS), ids=lambda row: row.name)
def test_preemption_changes_no_answer(row, monkeypatch):
    """Pages are reserved for the window only; usage counts rows of both kinds."""
    if row.policy.name == "KCache":
        row = dataclasses.replace(row, policy=dataclasses.replace(row.policy, values="device"))
    watch = Watch(monkeypatch)
    model = LanguageModel(model_of("a group and a part", row), policy=row.policy)
    engine = engine_of(model, row)
    sampling = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=8)
    weights = oracle_weights(model.transformer)
    for refusals in (set(), {1, 2}):
        watch.chunks, watch.cleared, watch.refusals = 0, 0, set(refusals)
        listen = (lambda update: None) if refusals else None
        for prompt, completion in zip(
            PROMPTS, engine.generate(PROMPTS, sampling=sampling, on_tokens=listen), strict=True
        ):
            check_completion(row, weights, model.config, prompt, completion, row.page_size)
        assert_empty(engine)
        assert (watch.cleared > len(PROMPTS)) == bool(refusals)


def test_cached_prefix_equals_full_prefill():
    """Windows are overwritten under any policy, so prefixes keep copies, not shared pages."""
    row = MODEL_ROWS[0]
    model = LanguageModel(model_of("a group and a part", row), policy=row.policy)
    plain, keeps = (engine_of(model, row, **more) for more in ({}, {"prefix_cache": 1e6}))
    assert not keeps.runner.appends
    sampling = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=6)
    document = random_tokens(80, 13).tolist()
    cached = []
    for question in ([3, 4, 5, 6], [9, 8, 7], [2, 2, 1], [3, 4, 5, 6]):
        prompt = [*document, *question]
        (expected,), (found,) = (
            engine.generate([prompt], sampling=sampling) for engine in (plain, keeps)
        )
        assert found.tokens == expected.tokens
        assert found.usage.live_tokens == expected.usage.live_tokens
        assert np.abs(np.subtract(found.logprobs, expected.logprobs)).max() < TOLERANCE
        cached.append(found.usage.cached_tokens)
    assert cached[0] == 0
    assert cached[2] > 0
    assert cached[3] > 0
