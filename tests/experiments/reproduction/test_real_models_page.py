"""The page of the real models, from figures made by hand."""

import dataclasses
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest
import tyro

import dms_jax
from dms_jax.command_line import help_texts
from experiments.reproduction import real_models
from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import commands, page, systems
from experiments.reproduction.real.measures import NEEDLES, TASKS_OF_CHOICES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import THREE, Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED, RIVAL, TRAININGS
from experiments.reproduction.runs import write_plan

PAGE = pathlib.Path(systems.__file__).parents[2] / "results" / "real_models"

PROBLEMS = 400
SMALL = (systems.CHOICES, "needle")  # what the mean of SmolLM2's tasks is of
MAIN = Job("asking", "qwen", PLANNED, "3.3", "gsm8k")
ADAPTER = ("asking", "smollm2", "smollm2-adapter-w16", "4")
SIZES = {"batch": 7, "context": 99}
MAIN_FRONTIER = ("asking", "qwen", PLANNED, "3.3", "frontier")
CONTROL = Job("asking", "qwen", "control", "3.3", "gsm8k")
VERSIONS = {"versions": {"jax": "0"}, "date": "2026-01-01", "device": "a card"}


def figures(right: int, peak: float, **more) -> dict:
    """A record of so many right answers, the first ones."""
    scores = (np.arange(PROBLEMS) < right).astype(float)
    share = right / PROBLEMS
    return {
        "score": [share, (share * (1 - share) / (PROBLEMS - 1)) ** 0.5],
        "peak": peak,
        "mean_live": 0.7 * peak,
        "reads": 200 * peak,
        "cache_bytes": 1e4 * peak,
        "ended": 1.0,
        "new_tokens": 200.0,
        "per_problem": {"scores": scores.tolist()},
        **VERSIONS,
        **more,
    }


@pytest.fixture
def config(tmp_path):
    """A run with a retrofit, its control, and what needs no training."""
    config = Config(out=tmp_path, qwen="q.gguf", smollm2="s.gguf", data=pathlib.Path("data"))
    paths = Paths(config)
    for job, right, peak in (
        (free("qwen", "vanilla"), 120, 360.0),
        (MAIN, 116, 118.0),
        (CONTROL, 118, 362.0),
        (free("qwen", "tova"), 40, 118.0),
        (free("qwen", "expected"), 60, 119.0),
        (free("qwen", "streaming"), 90, 200.0),  # is not at that peak
        (free("qwen", "quest"), 119, 360.0),  # holds everything
    ):
        write_json(paths.result(job), figures(right, peak))
    for measure in SMALL:
        adapter = Job("asking", "smollm2", "smollm2-adapter-w16", "4", measure)
        small = (free("smollm2", "vanilla", measure), figures(200, 80.0))
        for job, own in (small, (adapter, figures(180, 40.0))):
            tasks = dict.fromkeys(TASKS_OF_CHOICES, own)
            if measure == "needle":  # of one score, with figures of each needle beside it
                tasks = {name: {"accuracy": own["score"]} for name in NEEDLES}
            write_json(paths.result(job), own | {"tasks": tasks})
    chains = {
        "scores": [[1, 0], [0, 0]],
        "answer_scores": [[1, 0], [0, 0]],
        "answers": [[0, 1], [-1, -1]],
        "reads": [[10, 20], [30, 40]],
        "peak": [[1, 2], [3, 4]],
        "new_tokens": [[5, 6], [7, 8]],
        "ended": [[True, True], [True, True]],
    }
    job = free("qwen", "vanilla", "frontier")
    more = {"sampling": {"max_new_tokens": 400}, "policy": {}, "chains_of_problems": chains}
    write_json(paths.result(job), figures(1, 2.0, **more))
    return config


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
    assert results.speed["device"] == "one"
    # The page that was written gives the same again, with this run's rows from its own files.
    write_json(file, results.to_dict())
    again = Results.read(now)
    assert again.to_dict() == results.to_dict()
    assert page.gsm8k(again) == said
    with pytest.raises(dms_jax.ConfigError, match=r"nowhere\.json is not there"):
        Results.read(dataclasses.replace(config, earlier=pathlib.Path("nowhere.json")))


def test_the_three_commands_are_judged_by_their_seconds(config):
    assert "to its page: **not measured**" in page.verdicts(Results.read(config))
    told = {"calls": [{"exit": 0}], "stages": {"sampling": 90.2, "training": 250.0}}
    told |= {"command": "dms-jax x", "installed": "on the path already", "seconds": 512.3}
    write_json(config.out / THREE, told)
    said = page.verdicts(Results.read(config))
    assert "to its page: 512 s on one card (sampling 90, training 250; the library was on" in said
    assert "under 15 minutes: **holds**. The third: `dms-jax x`." in said
    write_json(config.out / THREE, told | {"seconds": 901.0})
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


def test_systems_have_names():
    for label, name in (
        ("low-rank-to-8-at8", "DMS, low rank, window 16, to 8, 0.3 of the tokens"),
        ("low-rank-to-4-at2", "DMS, low rank, window 16, at 2, 0.3 of the tokens"),
        ("kvpop-at3.5", "KVpop, window 16, 0.3 of the tokens"),
        ("dmc-at2", "DMC, all weights, at 2, 0.3 of the tokens"),
        ("control-at3.5", "trained further (the control)"),
        ("tova-mean", "TOVA, equal mean"),
    ):
        assert page.name_of(label) == name
    ends = [(each.model, page.name_of(page.end_of(each.name))) for each in TRAININGS.values()]
    assert len(set(ends)) == len(ends)


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
    assert f"GSM8K, greedy: within 2 points of the model itself: {other}" in said
    assert f"GSM8K, greedy: within 2 points of the control: {other}" in said
    assert "10 points lower: **holds** (+0.0 ± 0.0 above H2O)" not in said
    # The same number of problems, but not the same ones.
    for label, start in (("vanilla", 0), ("tova", 7)):
        record = read_json(Paths(config).result(free("qwen", label)))
        write_json(Paths(config).result(free("qwen", label)), {**record, "start": start})
    results = Results.read(config)
    assert results.gap("qwen", "tova", "vanilla", "gsm8k") is None
    assert rival not in results.labels("qwen", "gsm8k")


# -- how it is done again --------------------------------------------------------------------------


def commands_of(text: str) -> list[Config]:
    """The commands of the script in the last section of a page, as the script itself reads them."""
    section = text.partition("## Again")[2].replace("\\\n", " ")
    found = []
    for line in re.findall(rf"^    {re.escape(commands.SCRIPT)}(.*)$", section, re.MULTILINE):
        told: dict = dict(args=shlex.split(line), registry=help_texts.REGISTRY)
        found.append(tyro.cli(Config, **told))
    return found


def test_the_page_says_the_commands_of_its_runs(config):
    """Two plans of run 2, one of them with lessons of the three commands; run 1 is told before."""
    beside = config.out / "beside"
    first = dataclasses.replace(
        config, qwen="/there/q.gguf", smollm2="", judged=RIVAL, parts=("asking-qwen-*",)
    )
    first = dataclasses.replace(first, self_taught=pathlib.Path("/there/three/run"), shards=1)
    write_plan(dataclasses.replace(first, processes=2, deadline_minutes=9.5, only="jobs"))
    write_plan(dataclasses.replace(config, out=beside, qwen="", lanes=64, trainings=("control",)))
    rows = [{**figures(120, 9.0), "model": "qwen", "system": "h2o", "setting": "", "run": 1}]
    rows[0] |= {"measure": "gsm8k", "per_problem": rows[0]["per_problem"]["scores"]}
    told = f"{commands.SCRIPT} --qwen qwen.gguf --data data --processes 6 --only jobs"
    file = config.out / "before.json"
    write_json(file, {"systems": rows, "trainings": [], "speed": None, "commands": {"1": [told]}})
    own = dict(run=2, earlier=file, also=(beside,))
    results = Results.read(dataclasses.replace(config, **own))
    text = page.page(config, results, set(), "")
    assert "/there" not in text
    asked, small, report, joined, before, before_report = commands_of(text)
    assert (asked.qwen, asked.judged, asked.processes) == ("qwen.gguf", RIVAL, 2)
    assert (asked.smollm2, asked.shards, asked.self_taught) == (
        "",
        1,
        pathlib.Path(commands.TAUGHT),
    )
    assert asked.parts == ()  # of a call, not of the run
    assert (small.qwen, small.smollm2, small.lanes) == ("", "smollm2.gguf", 64)
    assert small.trainings == ("control",)
    assert (report.run, report.out, report.also) == (2, asked.out, (small.out,))
    assert joined.join
    assert joined.out == asked.out
    assert (before.qwen, before.processes, before_report.run) == ("qwen.gguf", 6, 1)
    assert (report.earlier, before_report.earlier) == (pathlib.Path(commands.RESULTS), None)
    assert {each.only for each in (asked, small, before)} == {"jobs"}
    assert pathlib.Path(commands.RESULTS).parent == PAGE.relative_to(pathlib.Path.cwd())
    again = Results.read(dataclasses.replace(config, **own)).to_dict()["commands"]
    assert again == {1: [told], 2: results.commands[2]}


def test_the_committed_page_says_the_commands_of_every_run_on_it():
    data, text = read_json(PAGE / "results.json"), (PAGE / "README.md").read_text()
    runs = {row["run"] for row in (*data["systems"], *data["trainings"])}
    found = commands_of(text)
    assert {each.run for each in found if each.only == "report"} == runs
    assert data["commands"].keys() == set(map(str, runs))
    assert all(each.qwen or each.smollm2 for each in found if each.only == "jobs" and not each.join)
    script = re.search(r"bash (\S+\.sh) (\S+)", text)
    assert (PAGE.parents[2] / script[1]).exists()
    assert f"{script[2]}/run" == commands.TAUGHT
    # What is trained is named in words that do not change from process to process.
    assert "0x" not in (PAGE / "results.json").read_text()


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


# -- what only an earlier run measured -------------------------------------------------------------


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
    for path in config.out.glob("results/*/*/*.json"):
        (system, _, setting), model = path.parent.name.partition("-at"), path.parts[-3]
        names = {"model": model, "system": system, "setting": setting}
        write_json(path, read_json(path) | names | {"measure": path.stem})
    before = Results.read(config)
    file = tmp_path / "before" / "results.json"
    write_json(file, before.to_dict())
    said = [page.gains(before), page.frontier(before)]
    assert "| vanilla | 400 | 8 |" in said[1]

    later = Config(out=tmp_path / "later", run=2, earlier=file)
    place = Paths(later)
    write_json(place.result(free("qwen", "vanilla", "humaneval")), figures(20, 400.0))
    for system in (free("smollm2", "vanilla", "needle"), Job(*ADAPTER, "needle")):
        write_json(place.result(system), figures(390, 500.0))
    results = Results.read(later)
    assert page.gains(results) == said[0]
    assert sorted(page.frontier(results).splitlines()) == sorted(said[1].splitlines())
    assert results.vote_gains(MAIN.label) == before.vote_gains(MAIN.label)
    others = page.others(later, results, "qwen")
    assert "| vanilla (run 1) | 10.0 (627) | 5.0 (400, run 2) |" in others
    mean = results.mean_gap("smollm2-adapter-w16-at4", "vanilla")
    assert mean == before.mean_gap("smollm2-adapter-w16-at4", "vanilla")
    assert "97.5 (500, run 2) | - | - |" in page.smollm2(results)
    assert "7 sequences of 99 tokens, budgets of a quarter, run 1, a card" in page.speed(
        results.speed
    )
