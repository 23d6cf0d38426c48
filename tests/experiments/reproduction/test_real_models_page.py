"""The page of the real models, from figures made by hand."""

import dataclasses
import shutil

import numpy as np
import pytest

from experiments.reproduction import real_models
from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import names, page
from experiments.reproduction.real.measures import TASKS_OF_CHOICES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import THREE, Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED, RIVAL, TRAININGS
from experiments.reproduction.runs import write_plan
from tests.experiments.reproduction.real_run import (
    CONTROL,
    MAIN,
    MAIN_FRONTIER,
    PROBLEMS,
    SMALL,
    VERSIONS,
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


def test_each_bar_has_its_verdict(config):
    said = page.verdicts(Results.read(config))
    assert "peak 118, 3.05 times smaller; at least 3 times: **holds**" in said
    assert "GSM8K, greedy: within 2 points of the model itself: **holds** (-1.0 ± 0.5)" in said
    assert "GSM8K, greedy: within 2 points of the control: **holds** (-0.5 ± 0.4)" in said
    assert "eight chains a problem: within 2 points of the model itself: **not measured**" in said
    assert "10 points lower: **holds** (+14.0 ± 1.7 above ExpectedAttention)" in said
    small = "nominal ratio 4: mean of its tasks within 1 point of the model itself"
    assert f"the adapter that ships, {small}: **does not" in said
    assert f"low rank, {small}: **not" in said


def test_misses_stand_before_what_holds_and_what_was_not_measured_last(config):
    write_json(Paths(config).result(MAIN), figures(100, 118.0))
    lines = page.verdicts(Results.read(config)).splitlines()
    assert lines[0].startswith("- Qwen2.5-Coder-0.5B, DMS, low rank, window 16, to 3.3 (")
    words = ("**does not hold", "**holds on the mean", "**holds**", "**not measured**")
    found = [next(n for n, word in enumerate(words) if word in line) for line in lines[1:]]
    assert found == sorted(found)
    assert {0, 3} < set(found)


def test_the_papers_claim_has_its_verdict(config):
    """One chain of two problems in four right from a whole cache; all of a vote from half of it."""
    chains = {
        "answer_scores": [[1] * 8, [1] * 8],
        "answers": [[0] * 8, [0] * 8],
        "new_tokens": [[5] * 8] * 2,
        "ended": [[True] * 8] * 2,
    }
    more: dict = {"sampling": {"max_new_tokens": 400}, "policy": {}}
    rows = {free("qwen", "vanilla", "frontier"): (0.0, 8), Job(*MAIN_FRONTIER): (1.0, 4)}
    assert "at equal reads: **not measured**" in page.verdicts(Results.read(config))
    for job, (right, held) in rows.items():
        own = chains | {"scores": [[right] * 8] * 2, "answer_scores": [[right] * 8] * 2}
        own |= {"reads": [[10 * held] * 8] * 2, "peak": [[held] * 8] * 2}
        record = figures(1, 2.0, **more, chains_of_problems=own)
        record["per_problem"]["scores"] = [right] * 2
        write_json(Paths(config).result(job), record)
    said = page.verdicts(Results.read(config))
    assert "at equal reads: **holds** (+100.0 ± 0.0), and at equal peak: **holds** (+100" in said
    assert "; a single chain gains +100.0 ± 0.0." in said
    # A length that one of them was not asked with is on the page and in no comparison.
    place = Paths(config).result(free("qwen", "vanilla", "frontier-half"))
    half = read_json(Paths(config).result(free("qwen", "vanilla", "frontier")))
    write_json(place, half | {"sampling": {"max_new_tokens": 200}})
    results = Results.read(config)
    assert "| vanilla | 200 | 8 | 0.0 ± 0.0 | 640 | 64 |" in page.frontier(results)
    points = results.frontier({"vanilla": "vanilla", MAIN.label: "DMS"})
    assert {(point.system, point.length) for point in points.points} == {
        ("vanilla", 400),
        ("DMS", 400),
    }
    job = Job(*MAIN_FRONTIER[:-1], "frontier-half")
    write_json(Paths(config).result(job), half | {"sampling": {"max_new_tokens": 200}})
    points = Results.read(config).frontier({"vanilla": "vanilla", MAIN.label: "DMS"})
    assert {point.length for point in points.of("DMS")} == {400, 200}


def test_a_miss_is_said(config):
    paths = Paths(config)
    write_json(paths.result(MAIN), figures(100, 150.0))
    said = page.verdicts(Results.read(config))
    assert "2.40 times smaller; at least 3 times: **does not hold**" in said
    assert "within 2 points of the model itself: **does not hold** (-5.0" in said
    assert "10 points lower: **holds on the mean** (+10.0" in said
    for system in ("tova", "expected"):
        write_json(paths.result(free("qwen", system)), figures(99, 150.0))
    assert "10 points lower: **does not hold**" in page.verdicts(Results.read(config))
    for measure in SMALL:
        paths.result(free("smollm2", "vanilla", measure)).unlink()
    assert "SmolLM2-135M-Instruct: **not measured**" in page.verdicts(Results.read(config))
    paths.result(MAIN).unlink()
    assert "was not measured" in page.verdicts(Results.read(config))


def test_questions_in_no_lesson_choose_and_divergence_between_the_level(config):
    paths = Paths(config)
    rival = Job("asking", "qwen", RIVAL, "3.3", "gsm8k")
    write_json(paths.result(rival), figures(119, 100.0))
    step = {"evicted": 0.7}
    for name, held_out in (
        (PLANNED, 0.02),
        (RIVAL, 0.01),
        ("control", 0.0),  # evicts nothing
        ("kvzap", None),  # is not trained for a ratio
        ("low-rank-to-8", 0.0),  # goes elsewhere
        ("smollm2-low-rank-w16", 0.0),
    ):
        log = {"documents": 1, "tokens": 1, "seconds": 1, "bytes": 1, "steps": [step]}
        log |= {"training": name, "recipe": {"ratio": TRAININGS[name].ratio}}
        far = held_out if held_out is None else {"distillation": held_out}
        write_json(paths.summary(name), {**log, "held_out": far})
    results = Results.read(config)
    assert results.rivals() == [RIVAL, PLANNED]
    assert results.judged == PLANNED  # neither was asked
    assert "in no lesson" not in page.verdicts(results)
    for name, right, judged in ((PLANNED, 110, None), (RIVAL, 109, RIVAL), (RIVAL, 100, PLANNED)):
        job = Job("asking", "qwen", name, "3.3", "unseen")
        write_json(paths.result(job), figures(right, 100.0))
        results = Results.read(config)
        assert results.judged == (judged or PLANNED)
    said = page.verdicts(results)
    assert "low rank, window 16, to 3.3 (chosen by the rule below" in said
    assert "attention first: 25.0 ± 2.2%, 0.0100 nats; DMS, low rank, window 16, to 3.3: " in said
    assert "Judged is DMS, low rank, window 16, to 3.3.\n- The other, GSM8K, greedy: -0.2" in said
    assert "| **DMS, low rank, window 16, to 3.3** | 29.0" in page.gsm8k(results)
    row = "| qwen: KVzap, window 16, 0.3 of the tokens | 1 | 0.0 | 1 | 0.00 | - | - | - |"
    assert row in page.trainings(results)


def test_a_verdict_that_was_decided_before_the_run_is_about_that_training(config):
    paths = Paths(config)
    for name, right in ((PLANNED, 119), (RIVAL, 110)):
        write_json(paths.result(Job("asking", "qwen", name, "3.3", "gsm8k")), figures(right, 118.0))
    decided = dataclasses.replace(config, judged=RIVAL)
    results = Results.read(decided)
    assert (results.judged, Results.read(config).judged) == (RIVAL, PLANNED)
    said = page.verdicts(results)
    assert "to 3.3, from attention first (decided before the run): peak 118" in said
    assert (
        "GSM8K, greedy: within 2 points of the model itself: **does not hold** (-2.5 ± 0.8)" in said
    )
    assert "| **DMS, low rank, window 16, to 3.3, from attention first** | 27.5" in page.gsm8k(
        results
    )


def test_the_three_commands_are_judged_by_their_seconds(config):
    assert "to its page: **not measured**" in page.verdicts(Results.read(config))
    told = {"calls": [{"exit": 0}], "stages": {"sampling": 90.2, "training": 250.0}}
    told |= {"command": "dms-jax x", "installed": "on the path already", "seconds": 512.3}
    told |= {"device": "card of a kind"}
    write_json(config.out / THREE, told | {"date": "today"})
    said = page.verdicts(Results.read(config))
    assert (
        "512 s on one card of a kind on today (sampling 90, training 250; the library was on"
        in said
    )
    assert "under 15 minutes: **holds**. The third: `dms-jax x`." in said
    write_json(config.out / THREE, told | {"seconds": 901.0, "date": ""})
    assert "15 minutes: **does not hold**" in page.verdicts(Results.read(config))
    write_json(config.out / THREE, told | {"calls": [{"exit": 1}]})
    assert "to its page: **not measured**" in page.verdicts(Results.read(config))


def test_several_chains_of_a_problem_count_as_their_mean(config):
    paths = Paths(config)
    scores = {"vanilla": [[1, 1], [0, 0], [1, 0]], PLANNED: [[1, 0], [0, 0], [0, 0]]}
    jobs = {"vanilla": free("qwen", "vanilla"), PLANNED: MAIN}
    for name, each in scores.items():
        job = dataclasses.replace(jobs[name], measure="frontier")
        write_json(paths.result(job), {"per_problem": {"scores": each}})
    gap = Results.read(config).gap("qwen", MAIN.label, "vanilla", "frontier")
    assert gap.to_list() == pytest.approx([-1 / 3, np.std([0.5, 0, 0.5], ddof=1) / 3**0.5])


def test_without_a_control_there_is_no_column_for_it(config):
    assert "to the control" in page.gsm8k(Results.read(config))
    Paths(config).result(CONTROL).unlink()
    assert "control" not in page.gsm8k(Results.read(config))


@pytest.mark.nightly
def test_the_report_is_written_again_from_the_files(config):
    write_plan(config)
    folder = config.out / "pages"
    row = {**figures(100, 90.0), "model": "qwen", "system": "h2o", "setting": ""}
    row |= {"measure": "gsm8k", "per_problem": row["per_problem"]["scores"]}
    before = config.out / "before.json"
    write_json(before, {"systems": [row], "trainings": [], "speed": None})
    told = dataclasses.replace(config, only="report", pages=folder, qwen="", data=None)
    told = dataclasses.replace(told, run=2, earlier=before)
    assert real_models.main(told) == 0
    assert not (folder / "smollm2.png").exists()  # there is nothing to compare with
    paths = Paths(config)
    for measure in SMALL:
        place = paths.result(free("smollm2", "tova", measure))
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(paths.reference("smollm2", measure), place)
    assert real_models.main(told) == 0
    text = (folder / "README.md").read_text()
    assert "| **DMS, low rank, window 16, to 3.3** | 29.0 ± 2.3 | -1.0 ± 0.5 |" in text
    assert "| vanilla | 400 | 2 | 50.0 ± 50.0 | 50 | 5 |" in text
    assert "| DMS, adapter, window 16, to 4 | 45.0 (40) |" in text
    assert "| H2O (run 1) | 25.0" in text
    assert (folder / "gsm8k.png").exists()
    assert (folder / "smollm2.png").exists()
    kept = read_json(folder / "results.json")["systems"]
    assert len(kept[0]["per_problem"]) == PROBLEMS


def _trained(config, name: str, right: int, peak: float) -> None:
    """A training with its log, and so many right answers at its end."""
    paths, ratio = Paths(config), f"{TRAININGS[name].ratio:g}"
    log = {
        "training": name,
        "recipe": TRAININGS[name].to_dict(config),
        "documents": 9,
        "tokens": 3_000_000,
        "seconds": 1.0,
        "bytes": 5,
        "held_out": {"distillation": 0.02},
        "steps": [{"evicted": 0.75}],
        **VERSIONS,
    }
    write_json(paths.summary(name), log)
    write_json(paths.result(Job("asking", "qwen", name, ratio, "gsm8k")), figures(right, peak))


def test_a_sweep_has_a_table_of_its_own(config):
    _trained(config, "low-rank-to-4", 110, 90.0)
    _trained(config, "sweep-middle", 100, 90.0)
    _trained(config, "sweep-shift-0", 96, 90.0)
    results = Results.read(config)
    first, second = page.sweep(results).splitlines()[2:]
    assert first.startswith("| **DMS, low rank, window 16, to 4** | 9 | 3.0 | 0.0200 | 4.00 | 90 ")
    assert "| 4.00 | 90 | 24.0 ± 2.1 | -1.0 ± 0.5 | -6.0 ± 1.2 |" in second
    assert "deciding for itself (shift 0) |" in second
    for table in (page.gsm8k(results, nominal=True), page.trainings(results)):
        assert "shift 0" not in table
        assert table.count("low rank, window 16, to 4") == 1
    said = page.page(config, results, set(), "")
    assert said.count("shift 0") == 2
    assert "## One setting of the recipe at a time" in said


def test_a_sweep_says_what_is_told_from_its_middle(config):
    _trained(config, "sweep-middle", 100, 90.0)
    assert page.sweep_said(Results.read(config)) == ""
    _trained(config, "sweep-texts", 60, 90.0)
    _trained(config, "sweep-window-256", 120, 230.0)
    _trained(config, "sweep-adapter", 98, 92.0)
    assert page.sweep_said(Results.read(config)).splitlines() == [
        "The first one solves 25.0 ± 2.2% from a peak of 90. Two standard errors away from that of "
        "their own run are:",
        "",
        "- less: texts in place of answers (-10.0 ± 1.5).",
        "- more: window 256 (+5.0 ± 1.1, from a peak of 230).",
        "- not told from it: adapter (-0.5 ± 0.4).",
    ]


def test_a_sweep_over_two_runs_compares_each_setting_with_the_middle_of_its_run(config, tmp_path):
    """Run 1: 100 of its middle, 110 with texts, 120 of the model itself; run 2: 90, 95 and 130."""
    _trained(config, "sweep-middle", 100, 90.0)
    _trained(config, "sweep-texts", 110, 90.0)
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file)
    write_json(Paths(later).result(free("qwen", "vanilla")), figures(130, 360.0))
    _trained(later, "sweep-middle", 90, 91.0)
    _trained(later, "sweep-adapter", 95, 92.0)
    results = Results.read(later)
    rows = [line.strip("| ").split(" | ") for line in page.sweep(results).splitlines()[2:]]
    assert [(row[0], row[6][:4], row[7][:4], row[8][:5]) for row in rows] == [
        ("**DMS, low rank, window 16, to 4**", "22.5", "-", "-10.0"),
        ("**DMS, low rank, window 16, to 4 (run 1)**", "25.0", "-", "-5.0 "),
        (
            "DMS, low rank, window 16, to 4, texts in place of answers (run 1)",
            *("27.5", "+2.5", "-2.5 "),
        ),
        ("DMS, adapter, window 16, to 4", "23.8", "+1.2", "-8.8 "),
    ]
    said = page.sweep_said(results)
    assert "- more: texts in place of answers (+2.5 ± 0.8, run 1); adapter (+1.2 ± 0.6)." in said
    assert (
        "solves 22.5 ± 2.1% from a peak of 91, 25.0 ± 2.2% from a peak of 90 (run 1). Two" in said
    )
    # Where the verdicts are of neither's run, all of them name theirs, as rows of tables do.
    said = page.sweep_said(dataclasses.replace(results, main=3))
    assert "91 (run 2), 25.0 ± 2.2% from a peak of 90 (run 1)" in said
    assert "(+2.5 ± 0.8, run 1); adapter (+1.2 ± 0.6, run 2)." in said


def test_rows_of_smollm2_are_the_control_and_then_ratio_by_ratio_with_dms_first(config):
    paths = Paths(config)
    for system, ratio in (
        ("smollm2-kvpop", "4"),
        ("smollm2-all-to-8", "8"),
        ("smollm2-kvpop", "2"),
        ("smollm2-control", "4"),
        ("smollm2-all-to-8", "2"),
    ):
        job = Job("asking", "smollm2", system, ratio, "needle")
        write_json(paths.result(job), figures(100, 9.0))
    for setting in ("", "2"):
        tova = free("smollm2", "tova", "needle", setting=setting)
        write_json(paths.result(tova), figures(100, 9.0))
    rows = page.smollm2(Results.read(config)).splitlines()[2:]
    assert [row.strip("| ").partition(" | ")[0] for row in rows] == [
        "vanilla",
        "trained further (the control)",
        "DMS, all weights, window 16, at 2",
        "KVpop, window 16, as much as DMS at 2",
        "TOVA, as much as DMS at 2",
        "DMS, adapter, window 16, to 4",
        "KVpop, window 16",
        "DMS, all weights, window 16, to 8",
        "TOVA",
    ]


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


def test_verdicts_stand_first_then_what_a_reader_wrote_then_the_tables(config):
    said = page.page(config, Results.read(config), set(), "## What the figures say")
    headings = [line for line in said.splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Verdicts", "## What the figures say"]
    assert "## SmolLM2-135M-Instruct" in headings[2:]
    assert headings[-1] == "## Again"


def test_systems_have_names():
    for label, name in (
        ("low-rank-to-8-at8", "DMS, low rank, window 16, to 8, 0.3 of the tokens"),
        ("low-rank-to-4-at2", "DMS, low rank, window 16, at 2, 0.3 of the tokens"),
        ("kvpop-at3.5", "KVpop, window 16, 0.3 of the tokens"),
        ("dmc-at2", "DMC, all weights, at 2, 0.3 of the tokens"),
        ("control-at3.5", "trained further (the control)"),
        ("tova-mean", "TOVA, equal mean"),
    ):
        assert names.name_of(label) == name
    ends = [(each.model, names.name_of(page.end_of(each.name))) for each in TRAININGS.values()]
    assert len(set(ends)) == len(ends)
