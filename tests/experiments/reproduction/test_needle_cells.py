"""Needle grids: every length and depth, scored and resumed."""

import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.evaluation import Serving
from dms_jax.evaluation.tasks import RULER
from experiments.reproduction.needle_cells import NeedleCell, needle_grid
from tests.support.fake_programs import faked


@pytest.fixture(autouse=True)
def fakes():
    with faked():
        yield


SETTINGS = dict(
    lengths=(400, 500),
    depths=(0, 50, 100),
    problems=2,
    task=RULER("niah_single_2"),
    sampling=dms_jax.Sampling(temperature=0, max_new_tokens=3),
    serving=Serving(lanes=4, page_size=16, prefill_chunk=128),
)


@pytest.fixture(scope="module")
def model():
    return dms_jax.load(assets.path("stories260k"))


def test_scores_stand_at_length_and_depth(model, monkeypatch, tmp_path):
    """A score that tells length, depth and problem apart comes back at its place."""
    seen = []

    def score(cell, problem, completion):
        del completion
        needle = problem.prompt.index("One of the special magic numbers")
        seen.append((cell.length, cell.depth, needle, problem.answers))
        return (cell.length / 500 + cell.depth / 100) / 2

    monkeypatch.setattr(NeedleCell, "score", score)
    grid = needle_grid(model, None, **SETTINGS, out=tmp_path)
    want = [[(length / 500 + depth / 100) / 2 for length in (400, 500)] for depth in (0, 50, 100)]
    chex.assert_trees_all_close(grid.scores, np.array(want), atol=1e-12)
    chex.assert_trees_all_close(grid.errors, np.zeros((3, 2)), atol=1e-12)
    assert grid.accuracy == pytest.approx(np.mean(want))
    assert grid.count == 2
    assert grid.peak.shape == (2,)
    assert 250 < grid.peak[0] < grid.peak[1] < 380  # prompts of 272 and 372 tokens at most
    places = {(length, depth): place for length, depth, place, _ in seen}
    for length in (400, 500):
        assert places[length, 0] < places[length, 50] < places[length, 100]
    assert len({answers for *_, answers in seen}) == 2  # the same problems at every place
    data = json.loads(json.dumps(grid.to_dict()))
    assert data["scores"] == grid.scores.tolist()
    assert data["policy"]["name"] == "Vanilla"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) >= 12


def test_a_single_problem_has_no_error(model):
    settings = {**SETTINGS, "lengths": (400,), "depths": (50,), "problems": 1}
    grid = needle_grid(model, dms_jax.StreamingLLM(budget=64), **settings)
    assert np.isnan(grid.errors).all()
    assert grid.to_dict()["errors"] == [[None]]
    assert grid.peak[0] == 64
