"""The picture of measured decode steps."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks import draw_decode_steps

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "experiments" / "results" / "decode"


@pytest.mark.parametrize("shapes", [1, 3])
def test_every_report_of_a_folder_is_drawn(shapes, tmp_path):
    names = ["decode_steps.json", "decode_steps_other_shapes.json"][: 1 + (shapes > 1)]
    reports = [json.loads((MEASURED / name).read_text()) for name in names]
    assert len({row["shape"] for report in reports for row in report["rows"]}) == shapes
    for name, report in zip(names, reports, strict=True):
        (tmp_path / name).write_text(json.dumps(report))
    draw_decode_steps.main(
        draw_decode_steps.Config(folder=tmp_path, out=tmp_path / "decode_steps.png")
    )
    picture = (tmp_path / "decode_steps.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # One strip a shape: width and height lie at the head of the file.
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert height / width == pytest.approx((1.9 * shapes + 0.8) / 9, abs=0.01)
