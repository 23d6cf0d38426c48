"""The figure of L-W-CR configurations: its elements, and the number of systems."""

import itertools
import pathlib

import pytest
from matplotlib.figure import Figure

from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure, label_heights
from dms_jax.errors import ConfigError
from dms_jax.evaluation import Hyperscaling
from tests.evaluation.test_hyperscaling_result import by_hand, made_up


def drawn(monkeypatch, tmp_path, result) -> Figure:
    """The figure, as it was saved."""
    figures, save = [], Figure.savefig

    def kept(self, *arguments, **options):
        figures.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    path = tmp_path / "figure.png"
    hyperscaling_figure(path, result, title="made up")
    assert path.stat().st_size > 10_000
    (figure,) = figures
    return figure


def test_frontiers_with_names_and_plain_budgets(monkeypatch, tmp_path: pathlib.Path):
    reads, peak = drawn(monkeypatch, tmp_path, by_hand()).axes
    assert reads.get_xscale() == peak.get_xscale() == "log"
    assert [label.get_text() for label in reads.get_xticklabels()] == ["50", "100", "200", "500"]
    assert {text.get_text() for text in reads.texts} == {"slow", "fast"}
    lines = [line.get_xydata().tolist() for line in reads.lines]
    assert [[100, pytest.approx(100 / 3)], [400, pytest.approx(200 / 3)]] in lines
    assert [[50, pytest.approx(100 / 3)], [200, 100]] in lines
    assert [[200, 0], [800, pytest.approx(100 / 3)]] in lines  # dominated by other points
    assert "vote" in reads.get_ylabel()


def test_overlapping_names_move_apart(monkeypatch, tmp_path):
    rows = [(8, 1, 100 + i, 10 + i, (0, 0, 1)) for i in range(3)]
    points = [point for i, row in enumerate(rows) for point in made_up(f"s{i}", row)]
    reads, _ = drawn(monkeypatch, tmp_path, Hyperscaling({}, tuple(points))).axes
    heights = sorted(text.get_position()[1] for text in reads.texts)
    low, high = reads.get_ylim()
    assert all(b - a >= 0.04 * (high - low) for a, b in itertools.pairwise(heights))


def test_points_without_reads_are_off_the_axis(monkeypatch, tmp_path):
    points = made_up("one", (1, 1, 0, 9, (0, 0, 0)), (8, 1, 100, 10, (0, 0, 1)))
    reads, _ = drawn(monkeypatch, tmp_path, Hyperscaling({}, tuple(points))).axes
    assert reads.get_xlim()[0] == pytest.approx(100 / 1.2)


@pytest.mark.parametrize("count", [0, 7])
def test_wrong_number_of_systems_is_refused(count, tmp_path):
    points = [p for i in range(count) for p in made_up(f"s{i}", (8, 1, 100, 10, (0, 0, 1)))]
    with pytest.raises(ConfigError, match=f"one to 6 systems, got {count}"):
        hyperscaling_figure(tmp_path / "no.png", Hyperscaling({}, tuple(points)), title="")


def test_missing_greedy_point_is_noted(monkeypatch, tmp_path):
    rows = [(8, 1, 100, 10, (0, 0, 1)), (8, 3, 300, 30, (0, 1, 1))]
    points = made_up("with", *rows) + made_up("without", *rows, greedy=False)
    reads, _ = drawn(monkeypatch, tmp_path, Hyperscaling({}, tuple(points))).axes
    assert {text.get_text() for text in reads.texts} == {
        *("with", "without\n(no greedy point recorded)")
    }
    squares = [line.get_xydata().tolist() for line in reads.lines if line.get_marker() == "s"]
    assert squares == [[[100, pytest.approx(100 / 3)]], []]


def test_names_hide_no_point(monkeypatch, tmp_path):
    for axes in drawn(monkeypatch, tmp_path, by_hand()).axes:
        assert all(text.get_position()[0] > 1 for text in axes.texts)  # right of the axes


def test_colliding_labels_move_down():
    assert label_heights([90, 89, 20], 5) == [90, 85, 20]
    assert label_heights([20, 50], 5) == [20, 50]
    assert label_heights([30] * 4, 4) == [30, 26, 22, 18]
    assert label_heights([], 5) == []
