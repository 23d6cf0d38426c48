"""The progress bar of answers and their score."""

import pytest

from dms_jax.evaluation.progress import progress_bar


@pytest.mark.usefixtures("bare_notebook")
def test_a_notebook_without_widgets_gets_lines(capsys):
    with progress_bar(2, title="words", shown=True) as tick:
        tick(1.0)
        tick(0.0)
    printed = capsys.readouterr()
    assert not printed.out
    assert "words" in printed.err
    assert "2/2 score 50.0%" in printed.err
    assert "\x1b" not in printed.err


def test_hidden_bar_prints_nothing(capsys):
    with progress_bar(1, title="words", shown=False) as tick:
        tick(1.0)
    assert capsys.readouterr() == ("", "")
