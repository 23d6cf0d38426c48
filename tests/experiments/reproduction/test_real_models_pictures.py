"""The pictures of the real models: everything that is written in one can be read."""

from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reproduction.real import figures
from experiments.reproduction.real.results import Results, end_of
from experiments.reproduction.real.systems import PLANNED, VANILLA
from experiments.reproduction.real.training import QWEN


def test_nothing_of_a_picture_touches_its_edge(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.append(self))
    record = {
        "run": 1,
        "score": [0.25, 0.01],
        "peak": 111.4,
        "per_problem": {"scores": [1.0, 0.0] * 30},
    }
    labels = (VANILLA, end_of(PLANNED), "expected", "h2o")
    results = Results(1, 1, {(QWEN, label, "gsm8k"): record for label in labels}, {}, None)
    assert figures.draw(results, tmp_path) == {"gsm8k.png"}
    (picture,) = drawn
    picture.draw_without_rendering()
    said = ("Qwen2.5", "the model itself", "GSM8K, %")
    texts = [each for each in picture.findobj(Text) if each.get_text().startswith(said)]
    assert {each.get_text()[:6] for each in texts} == {each[:6] for each in said}
    for text in filter(Text.get_visible, texts):
        box = text.get_window_extent()
        assert 2 < box.x0 < box.x1 < picture.bbox.width - 2, text.get_text()
