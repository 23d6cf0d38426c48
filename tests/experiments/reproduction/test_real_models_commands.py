"""The commands that the page of real models gives of its runs."""

import dataclasses
import pathlib
import re
import shlex

import pytest
import tyro

from dms_jax.command_line import help_texts
from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import commands, page, systems
from experiments.reproduction.real.plan import Paths, free
from experiments.reproduction.real.results import THREE, Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED, RIVAL
from experiments.reproduction.runs import write_plan
from tests.experiments.reproduction.real_run import (
    figures,
    run_of_two_models,
    write_page_of,
)

PAGE = pathlib.Path(systems.__file__).parents[2] / "results" / "real_models"


@pytest.fixture
def config(tmp_path):
    return run_of_two_models(tmp_path)


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


def test_a_run_of_chosen_parts_says_which_it_did_and_judges_what_its_page_does(config):
    names = ["asking-qwen-vanilla-gsm8k", "lessons-smollm2-0", "asking-smollm2-tova-needle"]
    names += [f"training-qwen-{each}" for each in (PLANNED, RIVAL, "control", "dmc", "kvzap")]
    write_plan(dataclasses.replace(config, judged=RIVAL, parts=("*",)))
    for name in names:
        write_json(config.out / "jobs" / f"{name}.json", {"outcome": "done"})
    failed = config.out / "jobs" / "asking-qwen-tova-gsm8k.json"
    write_json(failed, {"outcome": "failed"})  # and so measured nothing
    results = Results.read(dataclasses.replace(config, judged=PLANNED))
    text = page.page(config, results, set(), "")
    lines = [line for line in text.partition("## Again")[2].splitlines() if line[:4] == "    "]
    assert 4 < len(lines) < 12
    assert max(map(len, lines)) <= 100
    asked, report = commands_of(text)
    assert set(asked.parts) == set(names)
    assert (asked.judged, report.judged) == (RIVAL, PLANNED)
    planned = commands_of("## Again" + commands.again(results.commands, RIVAL))
    assert [each.judged for each in planned] == [RIVAL, ""]  # the report has it from the plan
    # What run 2 decided is told with every later run, whose plans do not say it.
    plans = {number: [f"{commands.SCRIPT} --qwen q.gguf"] for number in (1, 2, 3, 4)}
    later = commands_of("## Again" + commands.again(plans, RIVAL, 2))
    assert [each.judged for each in later if each.only == "report"] == [RIVAL, RIVAL, RIVAL, ""]


def test_the_page_says_how_the_three_commands_of_a_run_were_timed(config, tmp_path):
    write_plan(config)
    third = "dms-jax x --out run --ratios 2 3.3 --from-attention 0.2 --model model.gguf"
    told = {"command": third, "calls": [{"exit": 0}], "seconds": 9.0, "stages": {}, "date": ""}
    told |= {"installed": "", "device": "a card"}
    write_json(config.out / THREE, told)
    section = page.page(config, Results.read(config), set(), "").partition("## Again")[2]
    assert (
        '    export FLAGS="--ratios 2 3.3 --from-attention 0.2"\n    bash experiments/' in section
    )
    assert "cp runs/three-commands/three.json runs/real-1/three/" in section
    assert "--join" not in section.partition("## Again")[2]
    # It is of the run that timed them, on the pages of later ones too.
    file = write_page_of(config, tmp_path / "before")
    later = Config(out=tmp_path / "later", run=2, earlier=file)
    write_json(Paths(later).result(free("qwen", "h2o")), figures(100, 90.0))
    results = Results.read(later)
    assert results.three == told | {"run": 1}
    section = page.page(later, results, set(), "").partition("## Again")[2]
    assert section.count("export FLAGS=") == 1
    assert "runs/real-1/three/" in section
