"""The demo runs its parts, each with its own settings."""

import pytest

from dms_jax.command_line import demo
from dms_jax.command_line.running import run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [("quickstart", 64), ("solve", 6)]),
        (["--only", "solve", "--solve.problems", "2"], [("solve", 2)]),
        (["--only", "quickstart", "--quickstart.sequences", "9"], [("quickstart", 9)]),
    ],
)
def test_parts_by_name(arguments, expected, monkeypatch):
    ran = []
    monkeypatch.setattr(
        demo.stories, "main", lambda config: ran.append(("quickstart", config.sequences))
    )
    monkeypatch.setattr(
        demo.problems, "main", lambda config: ran.append(("solve", config.problems))
    )
    assert run(demo.main, demo.Config, description="", arguments=arguments) == 0
    assert ran == expected
