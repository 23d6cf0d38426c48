"""First results: the steps are those of the pages; what is run, timed and written."""

import json
import pathlib
import re
import shlex

import pytest

import dms_jax
from experiments.benchmarks import first_results
from experiments.benchmarks.first_results import STEPS, Config, Step

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = ("README.md", "experiments/docs/pages/index.md")
RESULTS = ROOT / "experiments" / "results" / "first_results"

# Compiles into the cache of its folder and no other, and takes a tenth of a second.
SCRIPT = (
    "import os, time",
    "assert 'JAX_COMPILATION_CACHE_DIR' not in os.environ",
    "os.makedirs(os.environ['DMS_JAX_COMPILATION_CACHE'], exist_ok=True)",
    "assert os.path.isdir('../compiled')",
    "[0 for _ in iter(lambda: time.process_time() < 0.1, False)]",
)
WORK = f'python -c "{"; ".join(SCRIPT)}"'


def test_what_is_timed_is_what_pages_say():
    told = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    told = told.replace(" \\\n    ", " ")  # commands over several lines
    report = json.loads((RESULTS / "times.json").read_text(encoding="utf-8"))
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert {row["command"] for row in report["rows"]} == {step.command for step in STEPS.values()}
    for row in report["rows"]:
        assert f"{row['processor_seconds']:,.1f} | {row['wall_seconds']:,.1f} |" in page
    three = [row for row in report["rows"] if row["what"].startswith("three commands")]
    seconds = [sum(row[each] for row in three) for each in ("processor_seconds", "wall_seconds")]
    together = f"took {seconds[0]:.0f} seconds of processor time"
    assert together in told
    assert f"{seconds[1] / 60:.1f} minutes on two" in told
    for name in ("token", "retrofit", "story", "frontier"):
        assert f"\n{STEPS[name].command}\n" in told
    assert "dms_jax.retrofit(" in first_results.block()


def test_figures_of_the_pages_are_those_that_were_recorded():
    told = (ROOT / PAGES[1]).read_text(encoding="utf-8").replace("\n", " ")
    report = json.loads((RESULTS / "times.json").read_text(encoding="utf-8"))
    self_taught, compared = [row["figures"] for row in report["rows"] if "figures" in row]
    base, small = self_taught["vanilla"], self_taught["8"]
    assert f"stories of {base['tokens']:.0f} tokens" in told
    assert f"at most {small['peak']:.0f} instead of {base['peak']:.0f}" in told
    assert f"at {small['distillation']:.3f} nats a token" in told
    dms, streaming, tova = (
        next(row for row in compared if row["label"] == label)
        for label in ("DMS", "StreamingLLM", "TOVA")
    )
    assert f"DMS costs {dms['increase']:.3f} nats at {dms['peak']:.0f} live tokens" in told
    others = f"StreamingLLM {streaming['increase']:.3f} and TOVA {tova['increase']:.3f} at "
    assert f"{others}{streaming['peak']:.0f} and {tova['peak']:.0f}" in told


def test_figures_that_a_step_leaves_stand_beside_its_seconds(monkeypatch, tmp_path):
    left = {"named": {"a": {"x": 1, "y": 2}}, "listed": [{"x": 3, "y": 4}]}
    command = (
        f"python -c {shlex.quote(f'import json; json.dump({left!r}, open("left.json", "w"))')}"
    )
    steps = {
        key: Step(key, command, "x", ("left.json", key, ("x",))) for key in ("named", "listed")
    }
    monkeypatch.setattr(first_results, "STEPS", steps)
    rows = first_results.main(Config(only=("named", "listed"), out=tmp_path / "times.json"))
    assert [row["figures"] for row in rows] == [{"a": {"x": 1}}, [{"x": 3}]]


def test_steps_of_a_folder_follow_each_other(monkeypatch, tmp_path, capsys):
    steps = {name: Step(name, WORK, folder) for name, folder in zip("abc", "xyx", strict=True)}
    monkeypatch.setattr(first_results, "STEPS", steps)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/would/be/warm")
    out = tmp_path / "times.json"
    rows = first_results.main(Config(only=("a", "b", "c"), out=out))
    assert [row["cache"] for row in rows] == ["empty", "empty", "of the steps before"]
    for row in rows:
        assert 0.1 <= row["processor_seconds"] < 60
        assert row["wall_seconds"] >= 0.1
        assert len(row["load"]) == 2
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["rows"] == rows
    assert report["cores"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    assert capsys.readouterr().out.count("s of processor time") == 3


def test_a_step_that_fails_ends_it_and_keeps_what_was_timed(monkeypatch, tmp_path):
    steps = {"a": Step("a", WORK, "x"), "b": Step("b", "python -c \"exit('no story')\"", "y")}
    monkeypatch.setattr(first_results, "STEPS", steps)
    out = tmp_path / "times.json"
    with pytest.raises(dms_jax.DmsJaxError, match="no story"):
        first_results.main(Config(only=("a", "b"), out=out))
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == 1
    with pytest.raises(dms_jax.ConfigError, match="--only c: there are a, b"):
        first_results.main(Config(only=("c",), out=out))


def test_a_command_is_a_process_of_this_python():
    assert first_results.words_of("python block.py")[1:] == ["block.py"]
    assert first_results.words_of('dms-jax generate "Once upon"')[1:] == [
        "-m",
        "dms_jax.command_line",
        "generate",
        "Once upon",
    ]
