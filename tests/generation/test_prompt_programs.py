"""Prefill programs: shapes, places and compilation, on which answers do not depend."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, precompile, programs
from dms_jax.generation.prefill import Shape
from dms_jax.model.language_model import LanguageModel
from tests.generation.support import (
    GREEDY,
    MECHANISMS,
    ROWS_OF,
    answer,
    every_shape,
    model_for,
    prompts,
)
from tests.support.models import random_model, tiny_config

# Two widths; programs for several prompts have fewer places than entries x width.
OPTIONS = dict(page_size=16, chunk=8, prefill_chunk=64, prefill_tokens=128, max_tokens=200)
LANES = 6
LENGTHS = (5, 64, 1, 70, 33, 130, 20, 31, 32, 65, 9)


@pytest.fixture
def shapes_of(monkeypatch):
    """Returns a function that runs a call and returns its result, compiled shapes, and run shapes.

    Each shape is paired with whether rows are cut after prompts.
    """
    compiled, ran = set(), []
    call, extend = programs.Program.__call__, precompile._Calls.extend

    def launched(program, *given):
        if program is programs.extend:
            entries, width = given[5].shape
            ran.append((Shape(width, entries, given[10], given[9]), given[7] is not None))
            assert given[6].sum() <= (given[10] or entries * width)
        return call(program, *given)

    def noted(self, shape, *given, **options):
        program, arguments = extend(self, shape, *given, **options)
        compiled.add((shape, arguments[7] is not None))
        return program, arguments

    monkeypatch.setattr(programs.Program, "__call__", launched)
    monkeypatch.setattr(precompile._Calls, "extend", noted)

    def run(work):
        compiled.clear()
        ran.clear()
        return work(), set(compiled), list(ran)

    return run


def new_engine(policy=None, lanes=LANES) -> Engine:
    """Returns an engine that has compiled nothing; another one may have compiled its programs."""
    return Engine(model_for("vanilla", ends=False), policy, num_lanes=lanes, **OPTIONS)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["evicts", "cuts"])
def test_prompts_share_compiled_programs(name, shapes_of):
    given, policy = prompts(LENGTHS), ROWS_OF[name]
    alone, together = new_engine(policy), new_engine(policy)
    _, _, ran = shapes_of(lambda: [alone.generate([each], sampling=GREEDY) for each in given])
    assert {(shape.entries, shape.places) for shape, _ in ran} == {(1, None)}
    found, compiled, ran = shapes_of(lambda: together.generate(given, sampling=GREEDY))
    # Prompts up to a chunk share programs, and so do the ends of longer ones.
    wide, narrow = Shape(64, 3, 128, True), Shape(32, 6, 64, True)
    assert {(wide, policy.shrinks), (narrow, policy.shrinks)} <= set(ran) <= compiled
    # Chunks that end no prompt have no cut in any layer.
    assert any(not cut for _, cut in ran)
    for prompt, one in zip(given, found, strict=True):
        answer(prompt, name=name).check(one)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("count", [1, 3, LANES, 2 * LANES])
def test_prefill_programs_are_compiled_before_first_run(count, shapes_of):
    """For all lengths in any order; equal prompts are prefilled once."""
    for seed in range(3):
        random = np.random.default_rng((count, seed))
        lengths = random.integers(1, 150, count)
        given = [random.integers(0, 31, length).tolist() for length in lengths]
        given += given[: LANES - count]
        engine, nine = new_engine(), dms_jax.Sampling(temperature=0, max_new_tokens=9)
        _, compiled, ran = shapes_of(lambda: engine.generate(given, sampling=nine))  # noqa: B023
        every = {(shape, False) for shape in every_shape(engine.shapes.one_pass)}
        assert set(ran) <= compiled <= every


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("length", "needed"), [(70, {(64, False), (32, True)}), (128, {(64, False), (64, True)})]
)
def test_prompt_compiles_only_programs_it_runs(length, needed, shapes_of):
    """Chunks that end a prompt, after which rows are cut, have separate programs."""
    engine = new_engine(ROWS_OF["cuts"], lanes=1)
    _, compiled, ran = shapes_of(lambda: engine.generate(prompts([length]), sampling=GREEDY))
    assert {(shape.width, cut) for shape, cut in ran} == needed
    assert set(ran) == compiled


@pytest.mark.parametrize(
    ("policy", "few"), [(dms_jax.Quest(budget=32), True), (MECHANISMS["tova"], False)]
)
def test_token_by_token_prefill_is_padded(policy, few):
    """Except recomputed answers, which use the programs of prompts."""
    model = dataclasses.replace(model_for("vanilla"), policy=policy)
    shapes = Engine(model, num_lanes=LANES, **OPTIONS).shapes
    assert any(shape.places is not None for shape in every_shape(shapes.one_pass))
    assert any(shape.places is not None for shape in every_shape(shapes.one_by_one)) == few


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)], ids=str)
def test_prefill_on_mesh_is_padded(mesh):
    with jax.set_mesh(dms_jax.make_mesh(*mesh)):
        model = LanguageModel(random_model(tiny_config(), dtype=jnp.float32))
        shapes = Engine(model, num_lanes=LANES, **OPTIONS).shapes
    assert all(shape.places is None for kind in shapes for shape in every_shape(kind))
