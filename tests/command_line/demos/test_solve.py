"""The demo of the reasoning models shows the decoded answers."""

import re

import chex
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.command_line import COMMANDS
from dms_jax.command_line.demos import solve
from dms_jax.evaluation.prompting import fit_task


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
def test_shipped_models_solve_problems_side_by_side(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(solve, "LINES", 4)
    results = solve.main(solve.Config(problems=1))
    shown = capsys.readouterr().out
    dense, compressed = results.values()
    model = dms_jax.load(assets.path(solve.MODELS["dense"]))
    policy = dms_jax.DMS(window=16, source="adapter", shift=0)
    assert compressed.settings["policy"] == policy.to_dict()
    assert dense.settings["policy"] == dms_jax.Vanilla().to_dict()
    chex.assert_trees_all_equal(dense.prompt_tokens, compressed.prompt_tokens)
    for index, task in enumerate(solve.TASKS):
        problem = fit_task(model, task).problem("test", 0)
        assert problem.prompt.splitlines()[0][:60] in shown
        for result in results.values():
            chex.assert_shape(result.scores, (4, 1))
            assert result.completions[index][0].strip().splitlines()[-1] in shown
    for result in results.values():
        assert result.scores[3, 0] == 1  # the needle
        assert f"{result.reads_per_problem:,.0f}" in shown
    fewer = dense.peak_per_problem / compressed.peak_per_problem
    assert fewer > 4
    assert f"{fewer:.1f}x" in shown
    table = shown[shown.index(" linear ") :]
    assert all(task.name in table for task in solve.TASKS)
    assert "…" not in table
    assert max(map(len, shown.splitlines())) <= 80
    assert solve.LEGEND in shown  # as its lines are
    for line in re.findall(r"dms-jax \w+", solve.LEGEND):
        assert line.split()[1] in COMMANDS
