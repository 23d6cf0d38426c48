"""The bar of answers and their score, where it is shown."""

import sys
import warnings

from dms_jax.evaluation.progress import progress_bar


def test_a_notebook_without_widgets_gets_lines_and_no_warning(monkeypatch, capsys):
    """rich warns at every refresh where ipywidgets is not there, and shows no bar either."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with progress_bar(2, title="words", shown=True) as tick:
            tick(1.0)
            tick(0.0)
    assert not warned
    printed = capsys.readouterr()
    assert not printed.out
    assert "words" in printed.err
    assert "2/2 score 50.0%" in printed.err
    assert "\x1b" not in printed.err


def test_nothing_is_written_unless_it_is_shown(capsys):
    with progress_bar(1, title="words", shown=False) as tick:
        tick(1.0)
    assert capsys.readouterr() == ("", "")
