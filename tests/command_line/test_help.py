"""--help fills the lines of a terminal and never exceeds the width."""

import dataclasses
import importlib
import itertools
import re
from typing import Literal

import pytest
import tyro

from dms_jax.command_line import COMMANDS, described, help_texts, main, overview, running

WIDTH = 78  # 80 columns; captured output has no boxes


@pytest.mark.parametrize("command", ["generate", "policies", "retrofit self-taught"])
def test_help_lines_are_filled(command, monkeypatch, capsys):
    """No line of an explanation breaks before a word that still fits."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    prose, _, listed = text.partition("\nusage: ")
    rows = [row[2:] for row in listed.splitlines()[1:]]
    assert max(map(len, rows)) <= WIDTH
    for line, below in itertools.pairwise(rows):
        column = len(below) - len(below.lstrip())
        if column > 2 and line[column - 2 : column] == "  " and line[column:].strip():
            word = re.split(r"(?<=,)|\s", below.lstrip(), maxsplit=1)[0]
            assert len(line.rstrip()) + 1 + len(word) > WIDTH, f"{line!r} has room for {word!r}"
    assert max(map(len, prose.splitlines())) <= 80
    assert "\n\n\n" not in text
    assert "(default: )" not in text
    assert "(default: '')" not in text
    assert not re.search(r"\{None|\[\[|\[STR \[|None takes|default: None|\(required", listed)


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


def test_explanations_are_paragraphs_and_placeholders_are_plain(monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Config:
        """Settings."""

        words: tuple[str, ...] = ()
        """One,
        (two) and
        3."""
        number: int = 5
        """A number."""
        few: int | None = None
        """Few."""
        most: float | None = 2.5
        """Most."""
        many: int | Literal["all"] = 1
        """Many."""
        kind: Literal["a", "b"] | None = None
        """Kind."""
        names: tyro.conf.Positional[tuple[str, ...]] = ()
        """Names."""

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        running.run(print, Config, description="It does.", program="it", arguments=["--help"])
    text = capsys.readouterr().out
    assert text.startswith("It does.\n\nusage: it [-h]")
    assert "One, (two) and 3. (default: none)" in text
    assert "A number. (default: 5)" in text
    listed = text.partition("\nusage: ")[2]
    assert listed.splitlines()[0] == "it [-h] [OPTIONS] [NAME ...]"
    for takes in ("words STR ...", "few INT", "most FLOAT|None", "many INT|all", "kind a|b"):
        assert re.search(rf"--{re.escape(takes)}\s", listed)
    assert "Few. (default: none)" in text
    got = []
    running.run(got.append, Config, description="", program="it", arguments=["--words", "a", "b"])
    more = ["c", "--most", "None", "--few", "3", "--many", "all", "--kind", "b"]
    running.run(got.append, Config, description="", program="it", arguments=more)
    told = Config(few=3, most=None, many="all", kind="b", names=("c",))
    assert got == [Config(words=("a", "b")), told]
