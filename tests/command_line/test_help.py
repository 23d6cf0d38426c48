"""--help: descriptions fit a terminal, and stand before the options."""

import dataclasses
import importlib
import re

import pytest

from dms_jax.command_line import COMMANDS, described, help_texts, overview, running


@pytest.mark.parametrize("command", COMMANDS)
def test_explanations_fit_a_terminal(command):
    """Examples are not wrapped, so they must be short enough as they are written."""
    text = described(importlib.import_module(f"dms_jax.command_line.{command}"))
    lines = [*overview().splitlines(), *help_texts.filled(text, 80).splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_descriptions_wrap_but_commands_do_not():
    text = """What it
does.

    first --option
    second

And then `this
goes` (on and on)."""
    assert help_texts.filled(text, 12).splitlines() == [
        *("What it", "does.", "", "    first --option", "    second", ""),
        *("And then", "`this goes`", "(on and on)."),
    ]


def test_description_comes_before_the_options(monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Config:
        """Settings."""

        few: int | None = None
        """Few."""

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        running.run(print, Config, description="It does.", program="it", arguments=["--help"])
    text = capsys.readouterr().out
    assert text.startswith("It does.\n\nusage: it [-h]")
    assert re.search(r"--few \S+ +Few\.", text)
