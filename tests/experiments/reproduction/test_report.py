"""The reproduction of the papers' claims: its plan, its arithmetic, its page; and a tiny run."""

import collections
import dataclasses
import itertools
import json
import pathlib
import re

import chex
import numpy as np
import pytest
from matplotlib.figure import Figure

import dms_jax
from dms_jax import assets
from dms_jax.evaluation import Measured
from dms_jax.evaluation.hyperscaling_result import Hyperscaling
from experiments.reproduction import report
from experiments.reproduction.claims import cells, dms_sections, figures, page, plan, systems
from experiments.reproduction.claims import jobs as claims_jobs
from experiments.reproduction.claims.jobs import Worker, answer_numbers, check_settings
from experiments.reproduction.claims.plan import Job, Paths
from experiments.reproduction.claims.results import Results, majority
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import Training
from experiments.reproduction.files import write_json
from experiments.reproduction.runs import write_plan

MODEL = str(assets.path("stories260k"))


# -- the plan -------------------------------------------------------------------------------------


def test_every_training_has_a_recipe_of_the_plans_size():
    config = Config()
    for training in systems.TRAININGS.values():
        recipe = training.recipe(config)
        policy = training.policy or systems.POLICY
        assert recipe.batch_size * recipe.sequence_length == config.batch_tokens
        assert recipe.total_steps(policy) >= 390
        last = recipe.progress(recipe.total_steps(policy), policy).compression_ratio
        assert last == (training.ratio if training.policy else 1)
    main, control = (systems.TRAININGS[name].recipe(config) for name in ("dms", "further"))
    assert (
        main.total_steps(systems.POLICY) == control.total_steps(dms_jax.Vanilla()) == 300 + 7 * 300
    )


def test_dmc_settles_with_a_falling_rate_and_an_immediate_target_has_no_ramp():
    config = Config()
    settled = systems.TRAININGS["dmc"].recipe(config).stages[-1]
    assert (settled.kind, settled.steps) == ("train", 300)
    assert settled.final_learning_rate == pytest.approx(settled.learning_rate / 10)
    at_once = systems.TRAININGS["dms-at-once"].recipe(config)
    assert [stage.steps for stage in at_once.stages] == [300, 1, 899]
    assert at_once.progress(301, systems.POLICY).compression_ratio == 4


def test_windows_are_those_of_table_6():
    rows = {t.name: t.policy for t in systems.TRAININGS.values() if t.name.startswith("dms-w")}
    found = {(policy.window, policy.shift) for policy in rows.values()}
    found.add((systems.POLICY.window, systems.POLICY.shift))
    assert found == {(0, 0), (16, 1), (16, 16), (64, 1), (64, 64), (256, 1), (256, 256)}


def test_jobs_come_seed_by_seed_and_answer_every_measure():
    config = Config()
    order = plan.jobs(config)
    names = [job.name for job in order]
    assert len(set(names)) == len(names)
    assert [job.kind for job in order[:16]] == ["data"] * 16
    seeds = [job.seed for job in order[16:]]
    assert seeds == sorted(seeds)
    trained = collections.Counter(job.system for job in order if job.kind == "training")
    assert trained["dms"] == trained["dmc"] == 3
    assert trained["dmc-long"] == 2
    assert trained["dmc-scratch"] == 1
    known = systems.measures(config)
    for job in order:
        if job.kind == "asking":
            assert set(plan.asked(job)) <= set(known)


def test_a_model_is_asked_when_it_is_there(tmp_path):
    paths = Paths(Config(out=tmp_path))
    on_the_way, end = Job("asking", "dms", 0, "2"), Job("asking", "dms", 0, "8")
    drawn = Job("asking", "dms-drawn", 0, "2")
    assert not any(map(paths.ready, (on_the_way, end, drawn)))
    (tmp_path / "trainings" / "dms-0" / "snapshots" / "2").mkdir(parents=True)
    assert paths.ready(on_the_way)
    assert paths.ready(drawn)
    assert not paths.ready(end)
    (tmp_path / "trainings" / "dms-0" / "model").mkdir()
    assert paths.ready(end)
    assert paths.ready(Job("asking", "vanilla", 0, "1"))


def test_other_settings_than_those_of_the_run_are_refused(tmp_path):
    config = Config(out=tmp_path)
    write_plan(config)
    check_settings(dataclasses.replace(config, processes=3, trainings=("dms",)))
    with pytest.raises(dms_jax.ConfigError, match="problems=480, not 3"):
        check_settings(dataclasses.replace(config, problems=3))
    with pytest.raises(dms_jax.ConfigError, match="no training 'dsm'; there are dms, dmc"):
        report.main(Config(out=tmp_path / "new", trainings=("dsm",)))
    with pytest.raises(dms_jax.ConfigError, match="seeds must be positive, got 0"):
        Config(seeds=0)


# -- the arithmetic -------------------------------------------------------------------------------


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


# -- the page -------------------------------------------------------------------------------------


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


def shares(share, problems=40, chains=4):
    """The first problems are right."""
    return np.repeat((np.arange(problems) < share * problems)[:, None], chains, 1)


@pytest.mark.nightly
def test_the_page_says_what_holds_and_leaves_out_what_is_missing(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path / "run")
    for seed in range(2):
        for system, setting, share, peak in (
            ("vanilla", "1", 0.6, 400.0),
            ("dms", "4", 0.6, 100.0),
            ("dms-w0", "4", 0.1, 90.0),
        ):
            write_answers(config, system, setting, seed, "reasoning", shares(share), peak)
            for length in systems.LENGTHS:
                reads = 10 * peak * length / 128
                write_answers(
                    *(config, system, setting, seed, f"frontier{length}"),
                    shares(share * length / 1024),
                    *(peak, reads),
                )
    write_plan(config)
    own = Config(out=tmp_path / "run", only="report", pages=tmp_path / "pages")
    assert report.main(own) == 0
    text = (tmp_path / "pages" / "REPORT.md").read_text()
    assert "an accelerator; jax 0.1.2; 1999-12-31" in text
    assert "- At 4 a window of 16 beats one of 0: **holds** (+50.0 ± " in text
    assert "- DMS at 4 is within 2 points of vanilla on reasoning: **holds** (+0.0 ± 0.0)." in text
    assert "- DMC at 4, trained long, is within 5 points: **not measured**." in text
    assert "Average gain of DMS over vanilla at equal reads: **holds** (+" in text
    assert "nan" not in text.lower()
    for line in text.splitlines():  # every row of a table has the cells of its heading
        assert "| |" not in line
    data = json.loads((tmp_path / "pages" / "claims" / "figures.json").read_text())
    cell = next(c for c in data["cells"] if c["system"] == "dms" and c["measure"] == "reasoning")
    assert cell["by_seed"] == [0.6, 0.6]
    for name in ("frontier", "windows"):
        picture = (tmp_path / "pages" / "claims" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")


def test_a_table_by_kind_tells_which_problems_a_mean_hides(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path)
    write_answers(config, "vanilla", "1", 0, "reasoning", np.ones((60, 4)))
    last = np.ones((60, 4))
    last[2::3] = 0  # word chains
    write_answers(config, "dms", "8", 0, "reasoning", last)
    found = cells.kinds(Results(config), "DMS", "dms", "8")
    assert found == [
        "DMS",
        *("100.0 ± 0.0", "+0.0 ± 0.0"),
        *("100.0 ± 0.0", "+0.0 ± 0.0"),
        *("0.0 ± 0.0", "-100.0 ± 0.0"),
    ]
    tasks = systems.measures(config)["reasoning"].tasks
    assert len(cells.KINDS) == len(tasks)


def test_verdicts_of_the_frontier_are_told_where_answers_are_whole(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path)
    for length in systems.LENGTHS:
        for system, setting, peak in (("vanilla", "1", 400.0), ("dms", "4", 100.0)):
            write_answers(
                *(config, system, setting, 0, f"frontier{length}"),
                shares(length / 1024, chains=16),
                *(peak * length / 1024, 10 * peak * length),
            )
    frontier = Results(config).frontier(dms_sections.SYSTEMS)
    cut = [
        dataclasses.replace(point, ended=1.0 if point.length == 1024 else 0.2)
        for point in frontier.points
    ]
    text = dms_sections.hyperscaling(Hyperscaling({}, tuple(cut)), tmp_path)
    assert "best of" in text
    assert "Where vanilla's answers end by themselves (from 400 on)" in text


def test_no_label_of_a_line_lies_on_the_level_of_vanilla_or_on_another(tmp_path, monkeypatch):
    config = dataclasses.replace(Config(), out=tmp_path)
    right = {"vanilla": 60, "dms-w64-delayed": 61, "dms-w64-immediate": 60, "dms": 59, "dms-w0": 30}
    for system, hits in right.items():
        for at in ("1",) if system == "vanilla" else ("2", "3", "4"):
            correct = np.repeat(np.arange(100) < hits, 4).reshape(100, 4)
            write_answers(config, system, at, 0, "reasoning", correct.astype(float))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    names = {f"line {name}": name for name in right if name != "vanilla"}
    figures.windows(Results(config), names, tmp_path / "windows.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts if "line" in text.get_text()]
    level = axes.transData.transform((0, 60))[1]
    assert len(boxes) == 4
    assert not any(box.y0 <= level <= box.y1 for box in boxes)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_training_says_what_it_reached_and_what_it_did_not_measure(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path)
    step = {"step": 8, "compression_ratio": 3.91, "distillation_loss": 0.0125, "lm_loss": 0.5}
    skipped = dict.fromkeys(step) | {"step": 9}
    for name in ("dms", "dms-lm", "further"):
        record = {"training": name, "seed": 0, "tokens": 10**6, "seconds": 60.0}
        write_json(tmp_path / "summaries" / f"{name}-0.json", record | {"steps": [step, skipped]})
    text = page.trainings(Results(config))
    assert "| ratio at the end |" in text
    assert "| dms-0 | 9 | 1 | 60 | 8 | 3.91 | 0.0125 |" in text
    assert "| dms-lm-0 | 9 | 1 | 60 | 4 | 3.91 | - |" in text  # nothing was distilled
    assert "| further-0 | 9 | 1 | 60 | - | 3.91 | - |" in text  # nothing was to be reached


@pytest.mark.nightly
def test_a_file_that_was_cut_off_while_it_was_written_is_no_result(tmp_path, monkeypatch):
    config = dataclasses.replace(Config(), out=tmp_path, model=MODEL, lanes=2)

    def stop(file, **arrays):
        with open(file, "wb") if isinstance(file, str | pathlib.Path) else file as opened:
            opened.write(b"PK")
        raise KeyboardInterrupt

    short = systems.Measure((systems.Needle(size=20),), 1, 1, 2)
    monkeypatch.setattr(claims_jobs, "measures", lambda config: {"needle450": short})
    monkeypatch.setattr(np, "savez_compressed", stop)
    worker = Worker(config, deadline=np.inf)
    with pytest.raises(KeyboardInterrupt):
        worker.measure(
            worker.base, dms_jax.Vanilla(), Job("asking", "vanilla", 0, "1"), "needle450"
        )
    assert any((tmp_path / "results" / "vanilla").iterdir())
    assert Results(config).keys() == []


def test_the_readme_tells_the_gain_of_the_page():
    root = pathlib.Path(__file__).parents[3]
    readme = " ".join((root / "README.md").read_text().split())
    told = re.findall(r"on average ([\d.]+ ± [\d.]+) points above one from the plain cache", readme)
    table = (root / "experiments/results/REPORT.md").read_text()
    (measured,) = re.findall(r"^\| equal reads \| \+([\d.]+ ± [\d.]+) \|", table, re.MULTILINE)
    assert told == [measured]


def test_an_empty_run_has_no_page(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="nowhere holds no results yet"):
        report.main(Config(out=tmp_path / "nowhere", only="report"))


# -- a tiny run -----------------------------------------------------------------------------------


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
