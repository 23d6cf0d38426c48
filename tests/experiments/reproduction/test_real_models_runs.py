"""Pages of several runs of the real models: what is paired, taken in, kept, and done again."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

import dms_jax
from experiments.reproduction import real_models
from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import page, systems
from experiments.reproduction.real.measures import TASKS_OF_CHOICES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED, RIVAL
from experiments.reproduction.runs import write_plan
from tests.experiments.reproduction.real_run import (
    ADAPTER,
    CONTROL,
    MAIN,
    MAIN_FRONTIER,
    PROBLEMS,
    SIZES,
    VERSIONS,
    figures,
    run_of_two_models,
    write_page_of,
)


@pytest.fixture
def config(tmp_path):
    return run_of_two_models(tmp_path)


def test_rows_that_were_asked_other_problems_are_not_paired_and_the_page_says_which(config):
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
    said = page.page(now, results, set(), "")
    assert "| H2O (run 1) | 62.5 ± 2.4 |  |  | 370 |  |" in said
    assert (
        "Asked other problems than vanilla, and not paired with it: DMS, low rank, window 16, to "
        "3.3, from attention first (run 1); H2O (run 1)." in " ".join(said.split())
    )
    decided = Results.read(dataclasses.replace(now, judged=RIVAL))
    said = page.verdicts(decided)
    other = "**not measured on the same problems**"
    assert f"peak 120; at least 3 times smaller: {other}" in said
    assert f"GSM8K, greedy: within 2 points of the model itself (run 2): {other}" in said
    assert f"GSM8K, greedy: within 2 points of the control (run 2): {other}" in said
    assert "10 points lower: **holds** (+0.0 ± 0.0 above H2O)" not in said
    # The same number of problems, but not the same ones.
    for label, start in (("vanilla", 0), ("tova", 7)):
        record = read_json(Paths(config).result(free("qwen", label)))
        write_json(Paths(config).result(free("qwen", label)), {**record, "start": start})
    results = Results.read(config)
    assert results.gap("qwen", "tova", "vanilla", "gsm8k") is None
    assert rival not in results.labels("qwen", "gsm8k")


def test_a_training_stands_beside_the_score_of_its_own_run(config):
    """The same training in two runs: each run's retrofit solved a share of its own."""
    log = {"training": PLANNED, "recipe": {"ratio": 3.3}, "documents": 9, "tokens": 1e6}
    log |= {"seconds": 60.0, "bytes": 1e6, "held_out": None, "steps": [{"evicted": 0.5}]}
    row = {**figures(100, 120.0), "model": "qwen", "system": PLANNED, "setting": "3.3"}
    row |= {"measure": "gsm8k", "per_problem": row["per_problem"]["scores"]}
    file = config.out / "before.json"
    write_json(file, {"systems": [row], "trainings": [log, log | {"run": 3}], "speed": None})
    write_json(Paths(config).summary(PLANNED), log)
    results = Results.read(dataclasses.replace(config, run=2, earlier=file))
    scores = re.findall(r"\| ([^|]+) \|$", page.trainings(results), re.MULTILINE)
    assert scores == ["score, %", "29.0 ± 2.3", "25.0 ± 2.2", "-"]  # of runs 2, 1 and 3


def test_a_verdict_says_the_run_of_smollm2s_mean(config, tmp_path):
    """Run 2 is what the verdicts are about, and asked SmolLM2's adapter nothing."""
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file, judged=PLANNED)
    write_json(Paths(later).result(MAIN), figures(116, 118.0))
    results = Results.read(later)
    assert results.run_of_mean("smollm2-adapter-w16-at4", "vanilla") == 1
    said = "nominal ratio 4: mean of its tasks within 1 point of the model itself"
    assert f"the adapter that ships, {said} (run 1): **does not hold**" in page.verdicts(results)
    assert f"low rank, {said}: **not measured**" in page.verdicts(results)


def test_rows_of_the_judged_run_stand_before_those_of_a_later_one(config, tmp_path):
    """A later run asks a few systems again and a new one; nothing of the verdicts changes."""
    file = write_page_of(config, tmp_path / "before")
    before = Results.read(dataclasses.replace(config, judged=PLANNED))
    later = Config(out=tmp_path / "later", run=2, earlier=file, judged=PLANNED)
    place = Paths(later)
    for job, right in ((free("qwen", "vanilla"), 200), (free("qwen", "h2o"), 150)):
        write_json(place.result(job), figures(right, 360.0))
    for measure in ("needle", systems.CHOICES):
        for job in (free("smollm2", "vanilla", measure), free("smollm2", "snapkv", measure)):
            own = figures(300 if "snapkv" in job.name else 390, 80.0)
            tasks = dict.fromkeys(TASKS_OF_CHOICES, own) if measure == systems.CHOICES else {}
            write_json(place.result(job), own | {"tasks": tasks})
    results = Results.read(later)
    assert (results.run, results.main, before.main) == (2, 1, 1)
    assert page.verdicts(results) == page.verdicts(before)
    assert results.get("qwen", "vanilla", "gsm8k")["run"] == 1
    assert results.of_run(2, "qwen", "vanilla", "gsm8k")["run"] == 2
    new = results.gap("qwen", "h2o", "vanilla", "gsm8k")  # of run 2, whose model solved 200
    assert new.value == pytest.approx(-50 / PROBLEMS)
    table = page.gsm8k(results).splitlines()
    assert [line for line in table if "(run" in line] == [
        line for line in table if line.startswith("| H2O (run 2) | 37.5")
    ]
    small = page.smollm2(results)
    assert [line for line in small.splitlines() if "(run 2)" not in line] == page.smollm2(
        before
    ).splitlines()
    assert "| SnapKV (run 2) | 75.0 (80)" in small
    assert "| -22.5 ± " in small  # 300 to 390 of run 2, not to 200
    assert "A row that names no run is of run 1, which" in page._opening(results)
    kept = results.to_dict()["systems"]
    assert [row["run"] for row in kept if row["measure"] == "gsm8k"].count(2) == 2
    assert len(kept) == len(results.by_run)


def test_figures_of_the_same_run_elsewhere_are_taken_in(config, tmp_path):
    elsewhere = dataclasses.replace(config, out=tmp_path / "elsewhere")
    paths = Paths(elsewhere)
    write_json(paths.result(free("qwen", "h2o")), figures(30, 118.0))
    write_json(paths.result(free("qwen", "vanilla")), figures(1, 1.0))
    log = {"training": RIVAL, "held_out": None}
    write_json(paths.summary(RIVAL), log)
    write_json(paths.summary(PLANNED), {"training": PLANNED})
    write_json(Paths(config).summary(RIVAL), log | {"seconds": 1})
    results = Results.read(dataclasses.replace(config, also=(elsewhere.out,)))
    assert results.get("qwen", "h2o", "gsm8k")["peak"] == 118
    assert results.get("qwen", "vanilla", "gsm8k")["peak"] == 360  # of --out
    assert list(results.trainings) == [PLANNED, RIVAL]
    assert results.trainings[RIVAL]["seconds"] == 1


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
    rows = {line[:7]: line for line in page.smollm2(results).splitlines()}
    assert rows["| Quest"].endswith("| -21.0 ± 0.9 |")
    assert rows["| DMS, "].endswith("| - | - |")


def test_a_retrofit_of_a_run_without_the_model_itself_is_beside_that_of_another(config, tmp_path):
    """Run 2 asked one more retrofit alone: 300 of its answers are right, 200 of the model's."""
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file)
    retrofit = ("asking", "smollm2", "smollm2-adapter-to-8", "8")
    write_json(Paths(later).result(Job(*retrofit, "needle")), figures(300, 60.0))
    write_json(Paths(later).result(Job(*retrofit, systems.CHOICES)), _of_choices(300))
    results = Results.read(later)
    before = results.get("smollm2", "vanilla", "needle")
    right = sum(before["per_problem"]["scores"])
    mean = results.mean_gap("smollm2-adapter-to-8-at8", "vanilla")
    of_choices = [
        sum(results.get("smollm2", "vanilla", task)["per_problem"]["scores"])
        for task in TASKS_OF_CHOICES
    ]
    lost = [300 - each for each in (right, *of_choices)]
    assert mean.value == pytest.approx(np.mean(lost) / PROBLEMS)
    assert results.mean_gap("smollm2-adapter-to-8-at8", "smollm2-adapter-w16-at4") is None


def _of_choices(right: int) -> dict:
    """A record of the tasks with choices, each with so many right answers."""
    own = figures(right, 80.0)
    return own | {"tasks": dict.fromkeys(TASKS_OF_CHOICES, own)}


def test_a_verdict_says_the_run_of_a_control_that_another_one_asked(config, tmp_path):
    Paths(config).result(CONTROL).unlink()
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file, judged=PLANNED)
    write_json(Paths(later).result(CONTROL), figures(116, 360.0))
    said = page.verdicts(Results.read(later))
    assert "within 2 points of the control (run 2): **holds** (+0.0 ± 0.0)" in said
    assert "GSM8K, greedy: within 2 points of the model itself: **holds" in said


def test_a_report_may_judge_another_training_than_its_run_asked_first(config, monkeypatch):
    """What an earlier run decided stays judged where a later one only adds rows."""
    parts = ("asking-qwen-warm-up-w16-kept-at3.3-ruler_tasks",)  # of no other plan
    write_plan(dataclasses.replace(config, judged="warm-up-w16-kept", parts=parts))
    told = []
    monkeypatch.setattr(real_models, "write_pages", lambda config, _: told.append(config.judged))
    report = Config(out=config.out, only="report", run=2)
    assert real_models.main(report) == 0
    assert real_models.main(dataclasses.replace(report, judged=RIVAL)) == 0
    assert told == ["warm-up-w16-kept", RIVAL]


def test_what_holds_as_much_as_retrofits_to_other_ratios_has_a_table_of_its_own(config):
    paths = Paths(config)
    for job, right, peak in (
        (Job("asking", "qwen", "low-rank-to-4", "4", "gsm8k"), 100, 100.0),
        (Job("asking", "qwen", "low-rank-to-4", "2", "gsm8k"), 110, 200.0),
        (Job("asking", "qwen", "kvpop", "2", "gsm8k"), 112, 200.0),
        (Job("asking", "qwen", "kvpop", "3.3", "gsm8k"), 105, 118.0),
        (free("qwen", "tova", setting="2"), 60, 201.0),
    ):
        write_json(paths.result(job), figures(right, peak))
    results = Results.read(config)
    names = [line.split(" |")[0] for line in page.gsm8k(results, nominal=True).splitlines()[2:]]
    assert names == [
        "| KVpop, window 16, as much as DMS at 2, 0.3 of the tokens",
        "| DMS, low rank, window 16, at 2, 0.3 of the tokens",
        "| TOVA, as much as DMS at 2",
        "| DMS, low rank, window 16, to 4, 0.3 of the tokens",
    ]
    assert "-2.0 ± 0.7" in page.gsm8k(results, nominal=True)  # 112 to 120 of vanilla
    said = page.gsm8k(results)
    assert "at 2" not in said
    assert "| KVpop, window 16, 0.3 of the tokens | 26.2" in said
    assert "TOVA, as much as DMS at 2" not in page.verdicts(results)


@pytest.mark.nightly
def test_votes_of_an_earlier_run_are_on_the_page_of_the_next(config, tmp_path):
    """And cells of its other tasks say their run; a mean over tasks is of one run."""
    rng = np.random.default_rng(0)
    for job, share in ((free("qwen", "vanilla", "frontier"), 0.3), (Job(*MAIN_FRONTIER), 0.4)):
        right = (rng.random((40, 8)) < share).astype(float).tolist()
        own: dict = {"scores": right, "answer_scores": right}
        own |= {"answers": rng.integers(-1, 3, (40, 8)).tolist(), "ended": [[True] * 8] * 40}
        own |= {"reads": (100 + rng.integers(0, 9, (40, 8))).tolist(), "new_tokens": [[5] * 8] * 40}
        own |= {"peak": (50 + rng.integers(0, 9, (40, 8))).tolist()}
        more: dict = {"sampling": {"max_new_tokens": 400}, "policy": {"name": "DMS"}}
        record = figures(1, 2.0, **more, chains_of_problems=own)
        record["per_problem"]["scores"] = right
        write_json(Paths(config).result(job), record)
    math500 = free("qwen", "vanilla", "math500")
    write_json(Paths(config).result(math500), figures(40, 627.0))
    write_json(config.out / "results/qwen/speed/speed.json", {"rows": [], **SIZES, **VERSIONS})
    file = write_page_of(config, tmp_path / "before")
    before = Results.read(config)
    said = [page.gains(before), page.frontier(before)]
    assert "| vanilla | 400 | 8 |" in said[1]

    later = Config(out=tmp_path / "later", run=2, earlier=file)
    place = Paths(later)
    write_json(place.result(free("qwen", "vanilla", "humaneval")), figures(20, 400.0))
    for system in (free("smollm2", "vanilla", "needle"), Job(*ADAPTER, "needle")):
        write_json(place.result(system), figures(390, 500.0))
    results = Results.read(later)
    assert "(run 1)** |" in page.gains(results)
    assert page.gains(results).replace(" (run 1)", "") == said[0]
    votes = page.frontier(results).replace(" (run 1)", "")
    assert sorted(votes.splitlines()) == sorted(said[1].splitlines())
    # The plain cache of another run has other answers: what is compared is of one run.
    vanilla = ("qwen", "vanilla", "frontier")
    asked_again = dataclasses.replace(results, records=dict(results.records))
    asked_again.records[vanilla] = results.records[vanilla] | {"run": 2, "votes": {"of": {}}}
    assert asked_again.vote_gains(MAIN.label) == before.vote_gains(MAIN.label)
    del asked_again.by_run[1, *vanilla]
    assert asked_again.vote_gains(MAIN.label) == (None, None)
    others = page.others(later, results, "qwen")
    assert "| vanilla (run 1) | 10.0 (627) | 5.0 (400, run 2) |" in others
    mean = results.mean_gap("smollm2-adapter-w16-at4", "vanilla")
    assert mean == before.mean_gap("smollm2-adapter-w16-at4", "vanilla")
    assert "97.5 (500, run 2) | - | - |" in page.smollm2(results)
    assert "7 sequences of 99 tokens, budgets of a quarter, run 1, a card" in page.speed(
        results.speed
    )


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
    said = page.gsm8k(results)
    assert "| DMS, low rank, window 16, to 3.5 (run 1) | 32.5 ± 2.3 | -5.0 ± 1.1 |" in said
    assert said.count("\n| vanilla |") == 1
    assert "| Quest | 29.8" in said
    assert "to 3.5 (run 1) | 7 |" in page.trainings(results)
    opening = page._opening(results)
    assert "- Run 2: a card, jax 0, 2026-01-01.\n- Run 1: a card, jax 0, 2025-12-31." in opening
    moved = next(key for key, record in results.records.items() if record["run"] == 2)
    elsewhere = {moved: results.records[moved] | {"device": "another"}}
    on_two = dataclasses.replace(results, records=results.records | elsewhere)
    assert "- Run 2: a card and another, jax 0," in page._opening(on_two)
    later = {moved: results.records[moved] | {"date": "2026-01-03"}}
    on_two_days = dataclasses.replace(results, records=results.records | later)
    assert "- Run 2: a card, jax 0, 2026-01-01 to 2026-01-03.\n" in page._opening(on_two_days)
    newer = {moved: results.records[moved] | {"versions": {"jax": "1"}}}
    of_two_versions = dataclasses.replace(results, records=results.records | newer)
    assert "- Run 2: a card, jax 0 and jax 1, 2026-01-01.\n" in page._opening(of_two_versions)
    assert results.speed["device"] == "one"
    # The page that was written gives the same again, with this run's rows from its own files.
    write_json(file, results.to_dict())
    again = Results.read(now)
    assert again.to_dict() == results.to_dict()
    assert page.gsm8k(again) == said
    with pytest.raises(dms_jax.ConfigError, match=r"nowhere\.json is not there"):
        Results.read(dataclasses.replace(config, earlier=pathlib.Path("nowhere.json")))
