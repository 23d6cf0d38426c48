"""The progress bar of answers and their score."""

import itertools

import pytest

from dms_jax import terminal
from dms_jax.evaluation import progress
from dms_jax.evaluation.progress import progress_bar


@pytest.mark.usefixtures("bare_notebook")
def test_a_notebook_without_widgets_gets_lines(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    with progress_bar(2, title="words", shown=True) as tick:
        tick(1.0)
        tick(0.0)
    assert capsys.readouterr() == (
        "",
        "words: 0 of 2\nwords: 1 of 2, score 100.0%\nwords: 2 of 2, score 50.0%\n",
    )


@pytest.mark.parametrize("colour", ["", "1"])
def test_a_file_gets_a_line_every_ten_seconds(capsys, monkeypatch, colour):
    """Across runs, too; a silent minute looked like a hang."""
    monkeypatch.setenv("FORCE_COLOR", colour)  # with it, rich calls every file a terminal
    now = itertools.count(0.0, 4.0)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress, "_lines", terminal.Lines())
    for title in ("first", "second"):
        with progress_bar(2, title=title, shown=True) as tick:
            tick()
            tick()
    assert capsys.readouterr() == ("", "first: 2 of 2\nsecond: 2 of 2\n")


def test_hidden_bar_prints_nothing(capsys):
    with progress_bar(1, title="words", shown=False) as tick:
        tick(1.0)
    assert capsys.readouterr() == ("", "")
