"""The demonstration of the reasoning model: what it shows is what was decoded."""

import pytest
import solve

from dms_jax import assets


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_two_models_solve_the_same_problems_side_by_side(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    model = assets.path("reasoner-11m")
    results = solve.main(solve.Config(dense=model, compressed=model, problems=1, lines=4))
    shown = capsys.readouterr().out
    dense, other = results.values()
    assert dense.completions == other.completions  # the same model and the same draws
    assert dense.scores.shape == (4, 1)
    assert dense.scores[3, 0] == 1  # the needle
    for index, task in enumerate(solve.TASKS):
        problem = task.problem("test", 0)
        assert problem.prompt.splitlines()[0][:60] in shown
        assert dense.completions[index][0].strip().splitlines()[-1] in shown
    assert f"{dense.reads_per_problem:,.0f}" in shown
    assert "1.0x" in shown
