"""Figures of lines: labels, and how many there may be."""

import matplotlib.figure
import numpy as np
import pytest

import dms_jax
from experiments.reproduction.lines import Axes, draw_lines


@pytest.fixture
def figures(monkeypatch):
    """Collects the figures that are saved."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def collect(figure, *args, **options):
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", collect)
    return saved


def test_lines_are_labelled_where_they_end_and_apart(tmp_path, figures):
    x, y = np.array([1, 2, 4]), np.array([1.0, 2.0, 3.0])
    panel = {"same": (x, y), "twin": (x, y), "low": (x, np.ones(3))}
    draw_lines(tmp_path / "lines.png", {"": panel}, Axes("tokens", "ratio", log_x=True), title="t")
    (axis,) = figures[0].axes
    heights = {text.get_text(): text.xyann[1] * axis.bbox.height for text in axis.texts}
    assert set(heights) == {"same", "twin", "low"}
    assert abs(heights["same"] - heights["twin"]) >= 12
    assert heights["low"] < min(heights["same"], heights["twin"])
    many = {str(number): (x, x) for number in range(7)}
    with pytest.raises(dms_jax.ConfigError, match="6 series, not 7"):
        draw_lines(tmp_path / "lines.png", {"": many}, Axes("", ""), title="t")
