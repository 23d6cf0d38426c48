"""The picture of needle grids."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from dms_jax.errors import ConfigError
from dms_jax.evaluation.result import Result
from experiments.reproduction.needle_cells import NeedleGrid
from experiments.reproduction.needle_plot import needle_figure


def test_the_picture_shows_every_number(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    scores, nothing = np.array([[0.0], [0.25]]), np.zeros((2, 1))
    # Of the evaluation the picture names the task alone.
    result = mock.Mock(spec=Result, settings={"task": [{"task": "niah_single_1"}]})
    one = NeedleGrid((400,), (0, 100), scores, nothing, 1, np.array([272.0]), result)
    other = dataclasses.replace(one, scores=np.array([[1.0], [0.5]]))
    drawn, write = [], Axes.text
    monkeypatch.setattr(
        Axes,
        "text",
        lambda axis, x, y, text, **more: (
            drawn.append((x, y, text, more["color"])) or write(axis, x, y, text, **more)
        ),
    )
    needle_figure(tmp_path / "grid.png", {"one": one, "other": other})
    assert (tmp_path / "grid.png").stat().st_size > 5000
    assert drawn == [
        (0, 0, "0", "white"),
        (0, 1, "25", "white"),
        (0, 0, "100", "black"),
        (0, 1, "50", "white"),
    ]
    differing = dataclasses.replace(one, lengths=(300,))
    with pytest.raises(ConfigError, match="grids of the same lengths and depths"):
        needle_figure(tmp_path / "grid.png", {"one": one, "other": differing})
