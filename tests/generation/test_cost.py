"""The overhead of a call: compilations and host work."""

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.generation.engine import Source
from dms_jax.generation.programs import request_keys
from dms_jax.generation.requests import make_requests
from tests.generation.support import (
    model_for,
    prompts,
)
from tests.support.compilations import Compilations

fakes = pytest.mark.usefixtures("fakes")


@fakes
def test_a_repeated_call_compiles_nothing():
    compilations = Compilations()
    model = model_for("vanilla", ends=False)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=40)

    def call(lengths, **options):
        return lambda: dms_jax.generate(
            model, prompts(lengths), sampling=sampling, chunk=16, page_size=32, **options
        )

    first = compilations.of(call([11, 14]))
    # The empty cache, clearing; a chunk of prompts, its hidden states, the first tokens, a chunk of
    # steps.
    assert 0 < first <= 6
    assert compilations.of(call([11, 14])) == 0
    # Shorter and longer prompts compile nothing either, up to the next power of two.
    assert compilations.of(call([9, 16])) == 0
    assert compilations.of(call([10, 13], on_tokens=lambda update: None)) == 0


@fakes
def test_another_temperature_compiles_nothing():
    compilations = Compilations()
    model = model_for("vanilla", ends=False)

    def call(**sampling):
        return lambda: dms_jax.generate(
            model,
            prompts([11, 14]),
            sampling=dms_jax.Sampling(max_new_tokens=20, **sampling),
            chunk=16,
            page_size=32,
        )

    assert compilations.of(call(temperature=0.6, top_p=0.9)) > 0
    assert compilations.of(call(temperature=1.1, top_p=0.8, seed=3)) == 0
    assert compilations.of(call(temperature=1, top_p=0.5)) > 0  # needs a search
    assert compilations.of(call(temperature=0.6, top_p=0.3, seed=3)) == 0
    assert compilations.of(call(temperature=1, top_p=0.8)) == 0
    assert compilations.of(call(temperature=1, top_p=0.8, min_p=0.1)) > 0


@fakes
def test_steps_after_cut_have_narrow_page_tables(monkeypatch):
    """A step scores, and before a cut gathers, as many slots as its table has."""
    compilations = Compilations()
    policy = dms_jax.SnapKV(budget=8, window=4, interval=4, kernel=3)
    engine = dms_jax.Engine(
        model_for("vanilla", ends=False),
        policy,
        num_lanes=2,
        max_tokens=160,
        page_size=4,
        chunk=4,
        prefill_chunk=64,
    )
    widths, table_of_steps = [], engine.runner.table_of_steps

    def watched(stepping):
        table, own = table_of_steps(stepping)
        widths.append(table.shape[-1])
        return table, own

    monkeypatch.setattr(engine.runner, "table_of_steps", watched)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=12)
    engine.generate(prompts([140]), sampling=sampling)
    assert engine.runner.reservation.table_width(1) >= 140 // 4  # of prompts
    assert set(widths) == {16}  # the narrowest table
    assert compilations.of(lambda: engine.generate(prompts([139]), sampling=sampling)) == 0


@fakes
def test_mixed_traffic_compiles_few_programs():
    """Prompts and answers of all lengths, together and alone, with refilled lanes."""
    compilations = Compilations()
    sampling = dms_jax.Sampling(top_p=0.9, max_new_tokens=12)
    engine = dms_jax.Engine(
        model_for("vanilla", ends=False),
        num_lanes=16,
        max_tokens=160,
        page_size=4,
        chunk=4,
        prefill_chunk=64,
        prefill_tokens=256,
    )
    random = np.random.default_rng(0)

    def traffic(count: int, longest: int) -> None:
        tokens = [
            random.integers(0, 512, size).tolist() for size in random.integers(1, longest, count)
        ]
        requests = make_requests(engine.model.config, tokens, sampling)
        for request, new in zip(requests, random.integers(1, 12, count), strict=True):
            request.max_new_tokens = int(new)
        engine.serve(Source(requests))

    # Prefill has two widths, each for many and for few entries, with two widths of the page table;
    # steps have one chunk for each of these; then first tokens, clearing, and hidden states.
    assert compilations.of(lambda: [traffic(*each) for each in ((40, 140), (1, 9), (3, 60))]) <= 17
    assert compilations.of(lambda: [traffic(*each) for each in ((23, 120), (2, 30), (9, 5))]) <= 1


def test_keys_depend_on_seed_and_copy_alone():
    seeds = np.array([[2**32 - 1, 0], [2**32 - 1, 2], [0, 0], [7, 1], [7, 1]], np.uint32)
    keys = jax.random.key_data(jax.jit(request_keys)(seeds))
    for key, (seed, copy) in zip(keys, seeds, strict=True):
        alone = jax.random.fold_in(jax.random.key(seed), copy)
        chex.assert_trees_all_equal(key, jax.random.key_data(alone))
    assert len({tuple(key) for key in keys.tolist()}) == 4
