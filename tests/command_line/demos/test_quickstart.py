"""The quickstart with very little training: every row, file and figure."""

import dataclasses
import io
import json
import re
import sys

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import dms_jax
from dms_jax.command_line.demos import quickstart

LENGTH = 64  # tokens of a sequence, for 512: each is a step


def test_quickstart_prints_its_measurements(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(quickstart, "LENGTH", LENGTH)
    recipe = quickstart.recipes.dms_quickstart

    def short(*given, **options):
        return dataclasses.replace(recipe(*given, **options), sequence_length=LENGTH)

    monkeypatch.setattr(quickstart.recipes, "dms_quickstart", short)
    config = quickstart.Config(
        out=tmp_path,
        sequences=2,
        steps_per_ratio=1,
        window=4,
        ratio=5.0,
    )
    rows = quickstart.main(config)

    dense, *others = rows.values()
    assert dense.peak == LENGTH - 1
    assert dense.reads == LENGTH / 2
    assert 1.0 < dense.loss.value < 2.2  # a trained model, not noise: uniform would be 6.24
    assert [name.split(",")[0] for name in rows][1:] == ["DMS", "StreamingLLM", "TOVA"] * 2
    for dms, window, tova in (others[:3], others[3:]):
        assert window.peak == tova.peak == pytest.approx(dms.peak, abs=0.51)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == [*rows]
    assert [row["change"][0] for row in results["rows"]] == pytest.approx(
        [each.loss.value - dense.loss.value for each in rows.values()]
    )
    printed = capsys.readouterr().out
    assert "A new story from the compressed cache" in printed
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80


def test_snapshots_print_above_the_bar(monkeypatch, tmp_path):
    """They used to follow the bar's figures and were cut off."""
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(quickstart, "held_out", lambda *_: np.zeros((1, 4), np.int32))
    monkeypatch.setattr(quickstart.Bench, "run", lambda *_: None)

    def retrofit(model, *_, on_snapshot, **options):
        with Progress(console=Console(force_terminal=True), auto_refresh=False) as bar:
            bar.add_task("training")
            bar.refresh()
            for ratio in (2.0, 4.0):
                on_snapshot(ratio, model)
        raise KeyboardInterrupt  # what comes after it is another test's

    monkeypatch.setattr(quickstart.dms_jax, "retrofit", retrofit)
    with pytest.raises(KeyboardInterrupt):
        quickstart.main(quickstart.Config(out=tmp_path))
    for ratio in (2, 4):
        assert re.search(rf"\x1b\[2K  ratio {ratio} after 0 s\n", out.getvalue())


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(dms_jax.ConfigError, match=r"--quickstart\.out .*file: "):
        quickstart.main(quickstart.Config(out=tmp_path / "file"))
