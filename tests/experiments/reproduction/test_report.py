"""The reproduction of the papers' claims: recipes, arithmetic, and a tiny run."""

import dataclasses
import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.evaluation import Measured
from experiments.reproduction.claims import cells, plan, systems
from experiments.reproduction.claims import jobs as claims_jobs
from experiments.reproduction.claims.jobs import Worker, answer_numbers
from experiments.reproduction.claims.plan import Job, Paths
from experiments.reproduction.claims.results import Results, majority
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import Training
from experiments.reproduction.files import write_json
from experiments.reproduction.runs import write_plan

MODEL = str(assets.path("stories260k"))


def test_windows_are_those_of_table_6():
    rows = {t.name: t.policy for t in systems.TRAININGS.values() if t.name.startswith("dms-w")}
    found = {(policy.window, policy.shift) for policy in rows.values()}
    found.add((systems.POLICY.window, systems.POLICY.shift))
    assert found == {(0, 0), (16, 1), (16, 16), (64, 1), (64, 64), (256, 1), (256, 256)}


def test_equal_answers_have_equal_numbers():
    numbers = answer_numbers((("7", None, "8", "7"), (None, None, "a", "b")))
    assert numbers.tolist() == [[0, -1, 1, 0], [-1, -1, 0, 1]]


def test_the_majority_is_that_of_the_library():
    rng = np.random.default_rng(0)
    answers = rng.integers(-1, 3, (200, 5))
    texts = [[None if each < 0 else str(each) for each in row] for row in answers.tolist()]
    expected = [dms_jax.evaluation.statistics.majority(row) for row in texts]
    assert majority(answers).tolist() == [-1 if e is None else e for e in expected]


def test_votes_of_fewer_chains_are_means_over_groups(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path)
    write_answers(config, "vanilla", "1", 0, "frontier128", right=[[1, 0, 0, 1], [1, 1, 0, 1]])
    (answers,) = Results(config).answers("vanilla", "1", "frontier128")
    chex.assert_trees_all_close(answers.vote(1), np.array([0.5, 0.75]))
    # Wrong answers are all equal; of a tie the first counts: [1, 0] votes 1, [0, 1] votes 0.
    chex.assert_trees_all_close(answers.vote(2), np.array([0.5, 0.5]))
    chex.assert_trees_all_close(answers.vote(4), np.array([1.0, 1.0]))


def write_answers(config, system, setting, seed, measure, right, peak=100.0, reads=1000.0):
    """Answers that are right (1) or wrong (0), all wrong ones alike."""
    scores = np.asarray(right, np.float64)
    path = Paths(config).result(Job("asking", system, seed, setting), measure)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {
        "system": system,
        "setting": setting,
        "seed": seed,
        "measure": measure,
        "policy": {"name": "Vanilla"},
        "compression_ratio": 2.0,
        "device": "an accelerator",
        "versions": {"jax": "0.1.2"},
        "date": "1999-12-31",
    }
    np.savez(
        path,
        described=np.asarray(json.dumps(described)),
        scores=scores,
        answers=(1 - scores).astype(np.int16),
        answer_scores=scores,
        reads=np.full(scores.shape, reads),
        peak=np.full(scores.shape, peak),
        new_tokens=np.full(scores.shape, 10),
        ended=np.ones(scores.shape, bool),
    )


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (0.03, 0.01, "**holds** (+3.0 ± 1.0)"),
        (0.005, 0.01, "**is not told apart from chance** (+0.5 ± 1.0)"),
        (-0.03, 0.01, "**does not hold** (-3.0 ± 1.0)"),
    ],
)
def test_verdicts_are_tests_on_the_numbers(value, error, expected):
    assert cells.verdict(Measured(value, error)) == expected


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (-0.03, 0.005, "**holds** (-3.0 ± 0.5)"),
        (-0.04, 0.02, "**holds on the mean, but two standard errors reach beyond** (-4.0 ± 2.0)"),
        (-0.08, 0.01, "**does not hold** (-8.0 ± 1.0)"),
    ],
)
def test_a_loss_is_judged_by_the_points_that_were_claimed(value, error, expected):
    assert cells.within(Measured(value, error), 5) == expected


@pytest.mark.nightly
def test_a_tiny_run_trains_asks_and_goes_on(tmp_path, monkeypatch):
    training = Training(
        "dms", systems.POLICY, snapshots=(1.5,), ratio=2.0, measures=("needle450",), per_ratio=1.0
    )
    monkeypatch.setattr(plan, "TRAININGS", {"dms": training})
    monkeypatch.setattr(claims_jobs, "TRAININGS", {"dms": training})
    free = systems.Free("vanilla", (("1", dms_jax.Vanilla()),), ("needle450",))
    monkeypatch.setattr(plan, "FREE", {"vanilla": free})
    monkeypatch.setattr(claims_jobs, "FREE", {"vanilla": free})
    short = systems.Measure((systems.Needle(size=20),), 2, 2, 8)
    monkeypatch.setattr(claims_jobs, "measures", lambda config: {"needle450": short})
    config = Config(
        out=tmp_path,
        model=MODEL,
        shards=1,
        documents=6,
        document_tokens=20,
        sequence_length=128,
        batch_tokens=256,
        decay_steps=2,
        steps_per_ratio=2,
        seeds=1,
        lanes=4,
    )
    write_plan(config)
    Worker(config, deadline=np.inf).work()
    paths = Paths(config)
    left = [job.name for job in plan.jobs(config) if not paths.done(job)]
    assert not left, [path.read_text() for path in (tmp_path / "failed").glob("*")]
    results = Results(config)
    assert sorted(results.keys()) == [
        ("dms", "1.5", "needle450"),
        ("dms", "2", "needle450"),
        ("vanilla", "1", "needle450"),
    ]
    assert results.cell("dms", "2", "needle450").scores.shape == (1, 2)
    (log,) = results.training("dms")
    assert log["steps"][-1]["step"] == 4
    # A result that was lost is measured again; nothing else is.
    lost = paths.result(Job("asking", "vanilla", 0, "1"), "needle450")
    lost.unlink()
    kept = paths.summary("dms", 0).stat().st_mtime_ns
    write_json(tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text()))
    claims_jobs.worker(str(tmp_path), np.inf)
    assert lost.exists()
    assert paths.summary("dms", 0).stat().st_mtime_ns == kept
