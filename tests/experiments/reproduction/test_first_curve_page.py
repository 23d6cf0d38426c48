"""What the first curve concludes and tells: verdicts, tables, the page, the README."""

import dataclasses
import itertools
import json
import pathlib
import re

import numpy as np
import pytest
import tyro
from matplotlib.figure import Figure

import dms_jax
from experiments.reproduction import first_curve
from experiments.reproduction.curve import figure, page, plan
from experiments.reproduction.curve.analysis import Results
from experiments.reproduction.curve.plan import Config, Job, Paths
from experiments.reproduction.files import write_json
from experiments.reproduction.runs import write_plan


def write_results(
    config: Config,
    levels: dict[tuple[str, float], tuple[float, float]],
    choice: dict[str, float] | None = None,
) -> None:
    """Results in which a system's first problems are right: {(system, setting): (share, peak)}.

    On the problems that a variant is chosen by, the shares of `choice`; none where it is absent.
    """
    tasks = {key: dict.fromkeys(plan.TASKS, level) for key, level in levels.items()}
    for system, share in (choice or {}).items():
        tasks[system, 4][config.choice] = (share, 25)
    for (system, setting), of_task in tasks.items():
        for task, (share, peak) in of_task.items():
            for seed in range(2):
                right = (np.arange(100) < 100 * share).astype(float).tolist()
                data = {
                    "system": system,
                    "setting": f"{setting:g}",
                    "seed": seed,
                    "chains": 1,
                    "peak": peak,
                    "reads": 10 * peak,
                    "voted": [share, 0.0],
                    "compression_ratio": 100 / peak,
                    "new_tokens": 5.0,
                    "ended": 1.0,
                    "per_problem": {"scores": right},
                }
                write_json(Paths(config).result(system, f"{setting:g}", seed, task), data)


def unwrapped(page):
    """A page with the lines of a paragraph or an item as one."""
    return re.sub(r"(?<=\S)\n(?=  \S|[\w`(])", " ", page.read_text()).replace("   ", " ")


@pytest.mark.nightly
def test_verdicts_are_tests_on_the_numbers(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    write_results(
        config,
        {
            ("vanilla", 1): (0.90, 100),
            ("further", 1): (0.80, 100),
            ("dms-neuron-shift1-w16", 4): (0.80, 25),
            ("dms-neuron-shift1-w16", 8): (0.60, 12.5),
            ("dms-adapter-shift1-w16", 4): (0.50, 25),
            ("TOVA", 4): (0.60, 25),
            ("TOVA", 8): (0.60, 12.5),
            ("StreamingLLM", 2): (0.40, 50),
            ("StreamingLLM", 8): (0.20, 12.5),
        },
        {"dms-neuron-shift1-w16": 0.70, "dms-adapter-shift1-w16": 0.60},
    )
    ran = {"versions": {"jax": "0.1.2"}, "date": "1999-12-31"}  # elsewhere and earlier
    record = {"seconds": 60.0, "device": "an accelerator", **ran}
    write_json(Paths(config).log(Job("vanilla", "vanilla", 0)), record)
    results = Results(config)
    assert results.best == "dms-neuron-shift1-w16"
    # StreamingLLM halfway in the logarithm between 0.2 at 12.5 and 0.4 at 50: 0.3 at 25.
    gain = results.against("dms-neuron-shift1-w16", 4.0, "StreamingLLM", "needle", "peak")
    assert gain.value == pytest.approx(0.5)
    page.write_pages(config, tmp_path / "pages")
    text = unwrapped(tmp_path / "pages" / "README.md")
    assert "DMS at ratio 4 within 2 points of further on reasoning: **holds** (+0.0 ± 0.0)" in text
    assert "within 2 points of vanilla on needle: **does not hold** (-10.0 ± 3.0)" in text
    assert "Device: an accelerator; jax 0.1.2; 1999-12-31." in text
    claims = [line for line in text.splitlines() if "at equal live tokens by more" in line]
    assert ["**holds**" in claim for claim in claims] == [True, True, False, True]
    assert "needle +20.0 ± 4.0" in claims[0]
    assert "tracking +0.0 ± 0.0" in claims[2]
    data = json.loads((tmp_path / "pages" / "results.json").read_text())
    assert data["best_dms"] == results.best
    assert data["against_control"]["dms-adapter-shift1-w16"]["4"]["needle"][0] == -0.3
    assert data["against_vanilla"]["dms-adapter-shift1-w16"]["4"]["needle"][0] == -0.4
    assert (tmp_path / "pages" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_a_page_is_written_of_a_run_whose_last_command_wanted_data_alone(tmp_path, capsys):
    config = dataclasses.replace(Config(), out=tmp_path, model="/a/place/of/mine", only="data")
    write_plan(config)
    write_results(config, {("vanilla", 1): (0.90, 100)})
    assert first_curve.main(Config(out=tmp_path, only="report")) == 0
    assert "# The first curve" in (tmp_path / "README.md").read_text()
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text)["model"] == "mine"
    assert "/a/place" not in text  # where things were on one machine is nobody's business


def test_what_cannot_be_reported_or_written_is_told(tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(dms_jax.ConfigError, match="nowhere holds no results yet"):
        first_curve.main(Config(out=nowhere, only="report"))
    assert not nowhere.exists()
    (tmp_path / "file").touch()
    with pytest.raises(dms_jax.ConfigError, match=r"--out .*file: File exists"):
        first_curve.main(Config(out=tmp_path / "file"))


@pytest.mark.nightly
def test_the_variant_is_chosen_on_other_problems_than_it_is_judged_on(tmp_path):
    """The best of several on the test problems is one that was lucky on them."""
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    levels = {("vanilla", 1): (0.9, 100), ("dms-neuron-shift1-w16", 4): (0.6, 25)}
    write_results(
        config,
        {**levels, ("dms-adapter-shift0-w16", 4): (0.8, 25)},
        {"dms-neuron-shift1-w16": 0.7, "dms-adapter-shift0-w16": 0.65},
    )
    assert Results(config).best == "dms-neuron-shift1-w16"
    page.write_pages(config, tmp_path / "pages")
    text = unwrapped(tmp_path / "pages" / "README.md")
    assert "DMS is `dms-neuron-shift1-w16`; the control is `vanilla`." in text
    assert "100 reasoning problems of the validation split" in text
    assert "`dms-neuron-shift1-w16` 70.0 ± 4.6, `dms-adapter-shift0-w16` 65.0 ± 4.8" in text
    data = json.loads((tmp_path / "pages" / "results.json").read_text())
    chosen = {p["system"]: p["accuracy"] for p in data["points"] if p["task"] == config.choice}
    assert chosen == {"dms-neuron-shift1-w16": 0.7, "dms-adapter-shift0-w16": 0.65}


@pytest.mark.nightly
def test_nothing_is_chosen_where_only_the_problems_of_the_page_were_answered(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    write_results(config, {("vanilla", 1): (0.9, 100), ("dms-neuron-shift1-w16", 4): (0.6, 25)})
    assert Results(config).best is None
    page.write_pages(config, tmp_path / "pages")
    assert "No DMS variant has been chosen" in unwrapped(tmp_path / "pages" / "README.md")


def test_the_best_variant_is_one_of_those_with_the_most_seeds(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    shares = {
        "dms-neuron-shift1-w16": 0.6,
        "dms-adapter-shift0-w16": 0.7,
        "dms-neuron-shift0-w64": 0.9,
    }
    write_results(config, {(name, 4): (0.5, 25) for name in shares}, shares)
    for task in (*plan.TASKS, config.choice):  # one seed alone
        Paths(config).result("dms-neuron-shift0-w64", "4", 1, task).unlink()
    assert Results(config).best == "dms-adapter-shift0-w16"


def test_a_rival_that_was_not_measured_is_neither_beaten_nor_unbeaten():
    won, lost, unknown = [0.5, 0.01], [-0.5, 0.01], None
    for pairs, verdict in (
        ((won, won, unknown), "**holds**"),
        ((won, lost, unknown), "**not measured on enough tasks**"),
        ((won, unknown, unknown), "**not measured on enough tasks**"),
        ((unknown, unknown, unknown), "**not measured on enough tasks**"),
        ((lost, lost, unknown), "**does not hold**"),
        ((won, lost, lost), "**does not hold**"),
    ):
        text = page._above("8", "TOVA", dict(zip(plan.TASKS, pairs, strict=True)))
        assert verdict in text
    assert "**not measured on enough tasks**" in page._above("8", "TOVA", {"needle": lost})
    single = page._above("8", "TOVA", {task: [0.5, None] for task in plan.TASKS})
    assert "**not measured on enough tasks** (reasoning +50.0 ± unknown, " in single


def test_the_command_names_every_setting():
    """Defaults may change; a page says what was done."""
    options = " ".join(page._options(Config()))
    assert "--learning-rate 3e-05" in options
    assert "--ladder 2.0 3.0 4.0 6.0 8.0 12.0" in options
    assert "--out" not in options
    assert "None" not in options
    parsed = tyro.cli(Config, args=options.split())
    assert parsed == Config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("dms-neuron-shift9-w16",)}, "no variant"),
        ({"asked": ("reasoning", "poetry")}, "no task"),
        ({"ratios": (0.5, 4.0)}, "ratios"),
        ({"ladder": ()}, "ladder"),
        ({"seeds": 0}, "seeds"),
        ({"shards": 0}, "shards"),
        ({"micro_batch_size": 0}, "micro_batch_size must be >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be >= 0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(changes, message):
    with pytest.raises(dms_jax.ConfigError, match=message):
        Config(**changes)


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        ([-0.005, 0.005], "**holds**"),
        ([-0.015, 0.005], "**holds on the mean"),
        ([-0.025, 0.005], "**does not hold on the mean"),
        ([-0.08, 0.005], "**does not hold**"),
        (None, "**not measured**"),
        ([0.5, None], "**not to be told from a single problem** (+50.0 ± unknown)"),
    ],
)
def test_the_margin_of_two_points(pair, verdict):
    assert verdict in page._within("needle", pair, "further")


# -- what is told ---------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[3]


def test_the_documentation_tells_what_was_measured():
    """Each row "SYSTEM, LEAST to MOST peak tokens" of its table is a system at one setting."""
    data = json.loads((ROOT / "experiments/results/first_curve/results.json").read_text())
    measured = set()
    points = {(p["system"], p["setting"], p["task"]): p for p in data["points"]}
    for system, setting in {key[:2] for key in points}:
        of_tasks = [points.get((system, setting, task)) for task in plan.TASKS]
        if not all(of_tasks):
            continue
        peaks = [round(point["peak"]) for point in of_tasks]
        figures = [f"{100 * point['accuracy']:.1f}" for point in of_tasks]
        name = "DMS" if system in plan.VARIANTS else system
        measured.add((name, min(peaks), max(peaks), *figures))
    row = re.compile(r"^\| \**(\w+), (\d+) to (\d+)\b[^|]*" + 3 * r"\| \**([\d.]+)[^|]*" + r"\|$")
    page = ROOT / "experiments" / "docs" / "pages" / "policies.md"
    rows = [found for line in page.open() if (found := row.match(line.strip()))]
    assert rows
    for found in rows:
        name, least, most, *figures = found.groups()
        assert (name, int(least), int(most), *figures) in measured, found.group()


def test_names_of_lines_lie_on_no_other_name_and_in_their_panels(monkeypatch, tmp_path):
    results = ROOT / "experiments/results/first_curve/results.json"
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda one, *_, **__: drawn.append(one))
    figure.draw(json.loads(results.read_text(encoding="utf-8")), tmp_path / "figure.png")
    (picture,) = drawn
    picture.draw_without_rendering()
    assert len(picture.axes) == 6
    for panel in picture.axes:
        names = {text.get_text(): text.get_window_extent() for text in panel.texts}
        assert names.keys() == {
            *("DMS", "the model", "trained further", "StreamingLLM", "TOVA", "random")
        }
        assert not any(a.overlaps(b) for a, b in itertools.combinations(names.values(), 2))
        for box in names.values():
            assert panel.bbox.x0 < box.x0 < box.x1 < panel.bbox.x1
            assert panel.bbox.y0 < box.y0 < box.y1 < panel.bbox.y1
