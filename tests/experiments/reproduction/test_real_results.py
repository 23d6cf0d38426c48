"""Figures of the real models, from results made by hand: what is paired, and what is a mean."""

import dataclasses

import numpy as np
import pytest

from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import systems
from experiments.reproduction.real.measures import TASKS_OF_CHOICES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED, RIVAL
from tests.experiments.reproduction.real_run import (
    ADAPTER,
    MAIN,
    PROBLEMS,
    figures,
    run_of_two_models,
    write_page_of,
)


@pytest.fixture
def config(tmp_path):
    return run_of_two_models(tmp_path)


def test_gaps_are_paired_and_the_mean_of_tasks_has_their_error(config):
    results = Results.read(config)
    gap = results.gap("qwen", MAIN.label, "vanilla", "gsm8k")
    lost = np.zeros(PROBLEMS)
    lost[116:120] = -1
    assert gap.to_list() == pytest.approx([-0.01, lost.std(ddof=1) / 20])
    assert results.gap("qwen", "h2o", "vanilla", "gsm8k") is None
    one = results.gap("smollm2", "smollm2-adapter-w16-at4", "vanilla", "piqa")
    mean = results.mean_gap("smollm2-adapter-w16-at4", "vanilla")
    assert mean.to_list() == pytest.approx([-0.05, one.error / 5**0.5])
    assert results.mean_gap("tova", "vanilla") is None
    assert results.fewer("qwen", MAIN.label, "gsm8k") == pytest.approx(360 / 118)
    votes, reads, peak = results.votes("vanilla", 2)
    assert (votes.tolist(), reads, peak) == ([1, 0], 50, 5)
    assert results.votes("vanilla", 4) is None
    points = results.frontier({"vanilla": "plain"})
    assert [(point.chains, point.budget("reads")) for point in points.points] == [(1, 25), (2, 50)]
    assert results.frontier({"vanilla": "plain", MAIN.label: "DMS"}) is None


def test_several_chains_of_a_problem_count_as_their_mean(config):
    paths = Paths(config)
    scores = {"vanilla": [[1, 1], [0, 0], [1, 0]], PLANNED: [[1, 0], [0, 0], [0, 0]]}
    jobs = {"vanilla": free("qwen", "vanilla"), PLANNED: MAIN}
    for name, each in scores.items():
        job = dataclasses.replace(jobs[name], measure="frontier")
        write_json(paths.result(job), {"per_problem": {"scores": each}})
    gap = Results.read(config).gap("qwen", MAIN.label, "vanilla", "frontier")
    assert gap.to_list() == pytest.approx([-1 / 3, np.std([0.5, 0, 0.5], ddof=1) / 3**0.5])


def test_what_holds_as_much_as_a_retrofit_is_not_averaged_over_runs(config, tmp_path):
    """The retrofit of each run holds as much as it does; what needs no other has one budget."""
    tasks = ("choices", "needle")
    for measure, number in zip(tasks, (1, 2), strict=True):
        of_run = dataclasses.replace(config, out=tmp_path / str(number), run=number)
        for setting in ("", "2"):
            job = free("smollm2", "tova", measure, setting=setting)
            own = figures(100, 9.0)
            each = {"tasks": dict.fromkeys(TASKS_OF_CHOICES, own)} if measure == "choices" else {}
            write_json(Paths(of_run).result(job), own | each)
    file = write_page_of(dataclasses.replace(config, out=tmp_path / "1"), tmp_path / "before")
    later = dataclasses.replace(config, out=tmp_path / "2", run=2, earlier=file, also=(config.out,))
    results = Results.read(later)
    assert results.mean_gap("tova", "vanilla") is not None
    assert results.mean_gap("tova-at2", "vanilla") is None


def test_rows_that_were_asked_other_problems_are_not_paired(config):
    """A run of fewer problems beside an earlier one of all of them."""
    before = {"model": "qwen", "measure": "gsm8k", "policy": {}}
    rows = [
        {**figures(250, 370.0), **before, "system": "h2o", "setting": ""},
        {**figures(300, 120.0), **before, "system": RIVAL, "setting": "3.3"},
    ]
    for row in rows:  # twice as many problems
        row["per_problem"] = 2 * row["per_problem"]["scores"]
    file = config.out / "before.json"
    write_json(file, {"systems": rows, "trainings": [], "speed": None})
    now = dataclasses.replace(config, run=2, earlier=file)
    results = Results.read(now)
    rival = Job("asking", "qwen", RIVAL, "3.3", "gsm8k").label
    assert results.gap("qwen", "h2o", "vanilla", "gsm8k") is None
    assert results.fewer("qwen", "h2o", "gsm8k") is None
    assert results.gap("qwen", MAIN.label, "tova", "gsm8k") is not None
    # The same number of problems, but not the same ones.
    for label, start in (("vanilla", 0), ("tova", 7)):
        record = read_json(Paths(config).result(free("qwen", label)))
        write_json(Paths(config).result(free("qwen", label)), {**record, "start": start})
    results = Results.read(config)
    assert results.gap("qwen", "tova", "vanilla", "gsm8k") is None
    assert rival not in results.labels("qwen", "gsm8k")


def test_what_needs_no_training_has_a_mean_over_tasks_of_two_runs(config, tmp_path):
    """Needles of run 1, choices of run 2: to the model itself of each, 200 and 390 right."""
    needle, choices = (free("smollm2", "quest", each) for each in ("needle", systems.CHOICES))
    write_json(Paths(config).result(needle), figures(180, 80.0))
    write_json(Paths(config).result(Job(*ADAPTER, "needle")), figures(180, 80.0))
    for name in ("vanilla", "smollm2-adapter-w16-at4"):  # run 1 asked no choices
        (config.out / "results" / "smollm2" / name / "choices.json").unlink()
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file)
    adapter = Job(*ADAPTER, systems.CHOICES)
    for job, right in ((free("smollm2", "vanilla", systems.CHOICES), 390), (choices, 290)):
        write_json(Paths(later).result(job), _of_choices(right))
    write_json(Paths(later).result(adapter), _of_choices(290))
    results = Results.read(later)
    mean = results.mean_gap("quest", "vanilla")
    assert mean.value == pytest.approx((4 * -100 - 20) / 5 / PROBLEMS)
    assert results.mean_gap("smollm2-adapter-w16-at4", "vanilla") is None  # another training


def _of_choices(right: int) -> dict:
    """A record of the tasks with choices, each with so many right answers."""
    own = figures(right, 80.0)
    return own | {"tasks": dict.fromkeys(TASKS_OF_CHOICES, own)}


def test_rows_of_an_earlier_run_are_paired_with_the_model_of_that_run(config):
    before = {"policy": {}, "date": "2025-12-31"}
    old = dict(model="qwen", measure="gsm8k", **before)
    vanilla, ours = figures(150, 370.0), figures(130, 120.0)
    rows = [
        {**vanilla, **old, "system": "vanilla", "setting": ""},
        {**ours, **old, "system": PLANNED, "setting": "3.5"},
        {**figures(1, 1.0), **old, "system": "quest", "setting": ""},  # measured again
    ]
    for row in rows:
        row["per_problem"] = row["per_problem"]["scores"]
    log = {"training": PLANNED, "recipe": {"ratio": 3.5}, "steps": [{"evicted": 0.5}]}
    log |= {"documents": 7, "tokens": 1, "seconds": 1, "bytes": 1, "held_out": None}
    file = config.out / "before.json"
    write_json(file, {"systems": rows, "trainings": [log], "speed": {"rows": [], "device": "one"}})
    now = dataclasses.replace(config, run=2, earlier=file)
    results = Results.read(now)
    lost = results.gap("qwen", f"{PLANNED}-at3.5", "vanilla", "gsm8k")
    assert lost.value == pytest.approx(-20 / PROBLEMS)  # of 150, not of this run's 120
    across = results.gap("qwen", f"{PLANNED}-at3.5", "tova", "gsm8k")
    assert across.value == pytest.approx(90 / PROBLEMS)
    assert results.fewer("qwen", f"{PLANNED}-at3.5", "gsm8k") == pytest.approx(370 / 120)
    # The page that was written gives the same again, with this run's rows from its own files.
    write_json(file, results.to_dict())
    again = Results.read(now)
    assert again.to_dict() == results.to_dict()
