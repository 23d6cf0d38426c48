"""`dms-jax evaluate`: output, files and errors."""

import dataclasses
import json
import re

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.command_line import evaluate, hyperscale, options
from dms_jax.data.tasks import Arithmetic, LinearEquation, WordChain
from dms_jax.evaluation import Chat
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import RULER
from dms_jax.evaluation.tasks.ruler import RULER_TASKS
from tests.evaluation.tasks.published import GPQA_CSV, lines, text
from tests.evaluation.tasks.published_code import HUMANEVAL
from tests.support.containment import needs_containment

MODEL = str(assets.path("stories260k"))


@pytest.mark.usefixtures("fakes")
def test_out_holds_figures_and_provenance(tmp_path, capsys):
    config = evaluate.Config(
        model="stories260k",
        task="reasoning",
        policy="StreamingLLM",
        options=("budget=20",),
        problems=3,
        chains=2,
        max_new_tokens=6,
        page_size=16,
        out=tmp_path / "results.json",
        samples=1,
    )
    result = evaluate.main(config)
    data = json.loads(config.out.read_text())
    assert data["policy"] == dms_jax.StreamingLLM(budget=20).to_dict()
    assert data["accuracy"] == [result.accuracy.value, result.accuracy.error]
    assert data["peak"] == result.peak_per_problem == 40  # two chains of prompts beyond 20 tokens
    assert set(data["tasks"]) == {"linear", "arithmetic", "words"}
    assert data["model"] == "stories260k"
    assert data["versions"]["jax"]
    assert len(data["samples"]) == 1
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert re.findall(r"^ (\w+) .* ±", shown, re.MULTILINE) == [
        *("reasoning", "linear", "arithmetic", "words")
    ]


@pytest.mark.nightly
def test_tasks_on_files(tmp_path):
    gpqa = text(tmp_path / "q.csv", GPQA_CSV)
    small = dict(model=MODEL, page_size=16, lanes=4)
    config = evaluate.Config(
        task="gpqa",
        task_options=(f"path={gpqa}",),
        max_new_tokens=2,
        answers=tmp_path / "answers",
        **small,
    )
    assert len(evaluate.main(config).scores) == 2
    assert "| gpqa |" in (tmp_path / "answers/table.md").read_text()
    with pytest.raises(dms_jax.ConfigError, match="--task gpqa reads a file"):
        evaluate.main(evaluate.Config(task="gpqa", **small))
    chat = evaluate.Config(chat=True, system="Be brief.", template=("enable_thinking=false",))
    assert chat.make_chat() == Chat(system="Be brief.", variables={"enable_thinking": False})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(task="linear", system="Be brief."), "--system is for a chat: give --chat too"),
        (dict(task="linear", template=("a=1",)), "--template is for a chat: give --chat too"),
        (dict(task="text", system="Be brief."), "--system is for tasks that have problems; text"),
        (dict(task="text", max_new_tokens=9), "--max-new-tokens is for tasks that have problems"),
    ],
)
def test_unused_task_options_are_refused(given, message):
    with pytest.raises(dms_jax.ConfigError, match=message):
        evaluate.main(evaluate.Config(model=MODEL, **given))


def test_tasks_by_name():
    assert options.read_tasks("words", ["steps=[2, 3]", "largest=40"]) == [
        WordChain(steps=(2, 3), largest=40)
    ]
    tasks = options.read_tasks("reasoning", ['{"steps": [2, 3], "seed": 5}'])
    assert tasks == [LinearEquation(seed=5), Arithmetic(seed=5), WordChain(steps=(2, 3), seed=5)]
    with pytest.raises(dms_jax.ConfigError, match="no option sice"):
        options.read_tasks("linear", ["sice=40"])
    with pytest.raises(dms_jax.ConfigError, match="none of linear"):
        options.read_tasks("poetry", [])


def test_code_runs_only_with_allow_code(tmp_path):
    path = f"path={lines(tmp_path / 'a.jsonl', HUMANEVAL)}"
    with pytest.raises(dms_jax.ConfigError, match=r"--task humaneval .*with --allow-code"):
        options.read_tasks("humaneval", [path])
    with pytest.raises(dms_jax.ConfigError, match="--task humaneval reads a file"):
        options.read_tasks("humaneval", [], allow_code=True)
    with pytest.raises(dms_jax.ConfigError, match="sandbox= takes limits as a JSON object"):
        options.read_tasks("humaneval", [path, "sandbox=yes"], allow_code=True)
    with pytest.raises(dms_jax.ConfigError, match="second"):
        options.read_tasks("humaneval", [path, 'sandbox={"second": 3}'], allow_code=True)
    for script in (evaluate, hyperscale):
        assert script.Config().allow_code is False


@pytest.mark.usefixtures("fakes")
@needs_containment
def test_programming_tasks_by_name(tmp_path, capsys):
    path = f"path={lines(tmp_path / 'a.jsonl', HUMANEVAL)}"
    given = (path, 'sandbox={"seconds": 3}', "style=plain")
    (task,) = options.read_tasks("humaneval", given, allow_code=True)
    assert (task.name, task.sandbox, task.style) == ("humaneval", Sandbox(seconds=3), "plain")
    config = evaluate.Config(
        model=MODEL, task="humaneval", task_options=given, max_new_tokens=2, page_size=16, lanes=4
    )
    with pytest.raises(dms_jax.ConfigError, match="--allow-code"):
        evaluate.main(config)
    result = evaluate.main(dataclasses.replace(config, allow_code=True))
    assert len(result.scores) == len(HUMANEVAL)
    assert " humaneval " in capsys.readouterr().out


def test_ruler_tasks_by_name(tmp_path):
    squad = text(tmp_path / "dev.json", "{}")
    names = [task.name for task in options.read_tasks("ruler", ["length=900", f"squad={squad}"])]
    assert names == list(RULER_TASKS[:12])
    assert options.read_tasks("ruler", ["task=vt", "length=900", "chains=40", "hops=0"]) == [
        RULER("vt", 900, chains=40, hops=0)
    ]
    with pytest.raises(dms_jax.ConfigError, match="--task-options size: there are length, squad"):
        options.read_tasks("ruler", ["size=3"])
    with pytest.raises(dms_jax.ConfigError, match="RULER has no option size"):
        options.read_tasks("ruler", ["task=vt", "size=3"])
