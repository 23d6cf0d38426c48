"""RULER's tables on the page of real models."""

import dataclasses
import re

import numpy as np
import pytest

from dms_jax.data.tasks import Needle, VariableTracking
from dms_jax.evaluation.tasks import RULER
from dms_jax.evaluation.tasks.ruler import RULER_TASKS
from experiments.reproduction.files import write_json
from experiments.reproduction.real import page
from experiments.reproduction.real.measures import NEEDLES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import Results
from experiments.reproduction.real.ruler_table import WORDINGS
from experiments.reproduction.real.systems import PLANNED
from tests.experiments.reproduction.real_run import (
    MAIN,
    PROBLEMS,
    figures,
    run_of_two_models,
)


@pytest.fixture
def config(tmp_path):
    return run_of_two_models(tmp_path)


def test_rulers_other_tasks_have_a_table_for_each_length(config):
    assert "multiquery" not in page.page(config, Results.read(config), set(), "")
    paths = Paths(config)
    for system, right, peak in (("vanilla", 200, 4000.0), ("tova", 150, 1000.0)):
        share = {"accuracy": [right / PROBLEMS, 0.1]}
        record = figures(right, peak, tasks={"niah_single_3": share, "cwe": share})
        write_json(paths.result(free("qwen", system, "ruler_tasks-twice")), record)
    said = page.page(config, Results.read(config), set(), "")
    assert "8,192 tokens:\n\n|  | single_3 | cwe | mean | to vanilla | peak |" in said
    assert "| vanilla | 50 | 50 | 50.0 ± 2.5 |  | 4000 |" in said
    assert "| TOVA | 38 | 38 | 37.5 ± 2.4 | -12.5 ± 1.7 | 1000 |" in said
    assert "|  | RULER's others, 8,192 |" in said
    assert "4,096 tokens:" not in said


def test_rulers_tasks_are_told_apart_by_what_lessons_with_retrieval_had_of_them(config):
    """Nine tasks in turn: problems 0, 1, 9 are worded alike, 3 has other needles, 7, 8 neither."""
    tasks = [name for names in WORDINGS.values() for name in names]
    lost, more = np.ones(PROBLEMS), np.ones(PROBLEMS)
    lost[[0, 9, 1, 3]] = 0
    more[[7, 8]] = 0
    paths, share = Paths(config), {"accuracy": [1.0, 0.0]}
    told: dict = {"tasks": dict.fromkeys(tasks, share)}
    rows = {
        ("vanilla", ""): np.ones(PROBLEMS),
        (PLANNED, "3.3"): more,
        ("mixed", "3.3"): lost,
        ("tova", ""): np.zeros(PROBLEMS),
    }
    for (system, setting), scores in rows.items():
        own = figures(400, 9.0, system=system, **told, per_problem={"scores": scores.tolist()})
        write_json(paths.result(Job("asking", "qwen", system, setting, "ruler_tasks")), own)
    said = page.ruler(config, Results.read(config), "qwen")
    _, _, table = said.partition("by what lessons had of a task:\n\n")
    heads, _, *lines = table.partition("\n\n")[0].splitlines()
    assert heads == "|  | worded alike (135) | other needles (177) | unlike (88) | both (265) |"
    assert lines[0] == "| vanilla, % | 100.0 | 100.0 | 100.0 | 100.0 |"
    assert [line.partition(" | ")[2] for line in lines[1:]] == [
        "+0.0 ± 0.0 | +0.0 ± 0.0 | -2.3 ± 1.6 | -0.8 ± 0.5 |",
        "-2.2 ± 1.3 | -0.6 ± 0.6 | +0.0 ± 0.0 | -0.4 ± 0.4 |",
    ]
    # What another run asked of the same model stands in the table of the tasks alone.
    results = Results.read(config)
    key = ("qwen", MAIN.label, "ruler_tasks")
    elsewhere = {key: results.records[key] | {"run": results.run + 1}}
    results = dataclasses.replace(results, records=results.records | elsewhere)
    _, _, table = page.ruler(config, results, "qwen").partition("lessons had of a task:\n\n")
    assert [line[:7] for line in table.partition("\n\n")[0].splitlines()[2:]] == [
        "| vanil",
        "| DMS, ",
    ]
    paths.result(Job("asking", "qwen", "mixed", "3.3", "ruler_tasks")).unlink()
    assert "lessons had of" not in page.ruler(config, Results.read(config), "qwen")


def test_which_of_rulers_tasks_are_worded_as_lessons_are():
    """The question after the context, without names and numbers, of each task and each lesson."""

    def question(prompt: str) -> str:
        _, _, asked = prompt.strip().rpartition("\n")
        asked = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[a-z]+-[a-z]+", "KEY", asked)
        return re.sub(r"\b\d{5,}\b", "NUMBER", asked)

    lessons = (Needle(size=40), VariableTracking(size=6))
    known = {question(task.problem("train", 0).prompt) for task in lessons}
    words = lambda problem: len(problem.prompt.split())  # noqa: E731
    kinds = {name: kind for kind, names in WORDINGS.items() for name in names}
    assert set(kinds) == set(RULER_TASKS) - {*NEEDLES, "qa_1", "qa_2"}
    problems = {name: RULER(name, 1200, measure=words).problem("test", 0) for name in kinds}
    alike = [
        n for n, each in problems.items() if question(each.prompt + each.answer_prefix) in known
    ]
    assert tuple(alike) == WORDINGS["worded alike"]


def test_rulers_other_tasks_of_smollm2_are_shorter_and_have_tables_too(config):
    paths = Paths(config)
    for system, right in (("vanilla", 200), ("tova", 150)):
        share = {"accuracy": [right / PROBLEMS, 0.1]}
        record = figures(right, 2000.0, tasks={"vt": share})
        write_json(paths.result(free("smollm2", system, "short_ruler_tasks")), record)
    said = page.page(config, Results.read(config), set(), "")
    _, _, small = said.partition("## SmolLM2-135M-Instruct")
    assert "2,048 tokens:\n\n|  | vt | mean | to vanilla | peak |" in small
    assert "| TOVA | 38 | 37.5 ± 2.4 | -12.5 ± 1.7 | 2000 |" in small
    assert "|  | RULER's others, 2,048 |" in small
