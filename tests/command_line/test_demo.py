"""The demo runs its parts, each with its own settings."""

import pytest

import dms_jax
from dms_jax.command_line import demo
from dms_jax.command_line.running import run


@pytest.fixture
def ran(monkeypatch):
    """The parts that ran, each with one of its settings."""
    parts = []
    monkeypatch.setattr(
        demo.stories, "main", lambda config: parts.append(("quickstart", config.sequences))
    )
    monkeypatch.setattr(
        demo.problems, "main", lambda config: parts.append(("solve", config.problems))
    )
    return parts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [("quickstart", 64), ("solve", 6)]),
        (["--only", "solve", "--solve.problems", "2"], [("solve", 2)]),
        (["--only", "quickstart", "--quickstart.sequences", "9"], [("quickstart", 9)]),
    ],
)
def test_parts_are_selected_by_name(arguments, expected, ran):
    assert run(demo.main, demo.Config, description="", arguments=arguments) == 0
    assert ran == expected


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--quickstart.ratio", "0.5", "--quickstart.ratio must be a finite number of at least 4"),
        ("--quickstart.window", "-1", "window must be"),
        ("--quickstart.steps-per-ratio", "0", "--quickstart.steps-per-ratio must be"),
        ("--quickstart.seed", "-1", "--quickstart.seed must be"),
        ("--solve.problems", "0", "--solve.problems must be"),
        ("--solve.temperature", "-1", "temperature must be"),
        ("--solve.seed", "-1", "--solve.seed must be"),
    ],
)
def test_settings_of_both_parts_are_checked_first(option, value, said, ran, capsys):
    """A ratio was refused after the first part of two, and the second part's after minutes."""
    assert run(demo.main, demo.Config, description="", arguments=[option, value]) == 2
    assert not ran
    assert said in capsys.readouterr().err


def test_only_the_first_part_runs_offline(ran, monkeypatch, capsys):
    """It used to fail after two minutes, when the first part had succeeded."""

    def offline(name):
        raise dms_jax.DataError(f"{name} cannot be fetched")

    monkeypatch.setattr(demo, "shipped", offline)
    assert run(demo.main, demo.Config, description="", arguments=[]) == 0
    assert ran == [("quickstart", 64)]
    assert "is left out: reasoner-11m cannot be fetched" in capsys.readouterr().out
    assert run(demo.main, demo.Config, description="", arguments=["--only", "solve"]) == 2
