"""Pictures of heads: what they write."""

import matplotlib.figure
import numpy as np
import pytest

from experiments.reproduction.head_pictures import Scale, draw_maps


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


def test_maps_write_each_number_in_a_colour_that_can_be_read(tmp_path, figures):
    maps = {"one": np.array([[1.0, 20.0], [3.0, np.nan]]), "two": np.array([[2.0, 4.0]])}
    draw_maps(tmp_path / "maps.png", maps, Scale("ratio"), title="t")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    first, second, bar = figures[0].axes
    texts = {text.get_text(): text.get_color() for text in first.texts}
    assert texts == {"1.0": "white", "20.0": "black", "3.0": "white"}  # dark, light, dark
    assert [text.get_text() for text in second.texts] == ["2.0", "4.0"]
    labels = [label.get_text() for label in bar.get_yticklabels()]
    assert labels == ["1", "1.5", "2", "3", "4", "6", "8", "12", "16"]


def test_signed_maps_are_symmetric(tmp_path, figures):
    maps = {"one": np.array([[-0.1, 0.4, -0.001]])}
    scale = Scale("difference", "signed", digits=2, column_names=("a", "b", "c"))
    draw_maps(tmp_path / "maps.png", maps, scale, title="t")
    first = figures[0].axes[0]
    assert first.images[0].get_clim() == (-0.4, 0.4)
    assert [text.get_text() for text in first.texts] == ["-0.10", "+0.40", "0"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["a", "b", "c"]
