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

    windows = ["DMS", "StreamingLLM", "StreamingLLM"]
    assert [row.method for row in rows] == ["dense", *windows, *windows, "TOVA", "random"]
    dense = rows[0]
    assert dense.peak_tokens == LENGTH - 1
    assert dense.reads == (LENGTH - 1) * LENGTH / 2
    assert 1.0 < dense.nats < 2.2  # a trained model, not noise: uniform would be 6.24
    for row in rows[1:]:
        assert row.peak_ratio == pytest.approx(dense.peak_tokens / row.peak_tokens)
        assert row.reads_ratio == pytest.approx(dense.reads / row.reads)
        assert row.increase == pytest.approx(row.nats - dense.nats, abs=1e-5)  # float32
    for dms, same_peak, same_reads in (rows[1:4], rows[4:7]):
        assert same_peak.peak_tokens == pytest.approx(dms.peak_tokens, abs=0.51)
        assert same_reads.reads == pytest.approx(dms.reads, rel=0.01)
    dms, same_peak, _, tova, random = rows[4:]
    assert tova.peak_tokens == same_peak.peak_tokens
    assert random.peak_tokens == pytest.approx(dms.peak_tokens, rel=0.05)
    assert len(rows) == quickstart.ROWS
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in results["rows"]] == [row.label for row in rows]
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


def test_budgets_for_equal_reads_and_equal_peak():
    # sum over t = 1 ... 10 of min(t, 7) = 1 + ... + 6 + 4 * 7 = 49
    assert quickstart.streaming_budget_for_reads(49.0, 10) == 7
    # 4 + 1 tokens in the window and half of the other 10
    assert quickstart.random_rate(10.0, window=4, tokens=15) == pytest.approx(0.5)


def test_verdict_needs_two_standard_errors():
    def row(increase, error):
        numbers = dict.fromkeys(
            ("nats", "error", "peak_tokens", "reads", "peak_ratio", "reads_ratio", "seconds"), 1.0
        )
        return quickstart.Row(
            label="", method="", policy={}, cache_bytes=0, increase=increase,
            increase_error=error, **numbers,
        )  # fmt: skip

    dms = row(0.010, 0.001)
    assert "DMS is better by 0.0100" in quickstart.verdict(dms, row(0.020, 0.001))
    assert "DMS is worse by 0.0100" in quickstart.verdict(dms, row(0.000, 0.001))
    assert "no difference" in quickstart.verdict(dms, row(0.012, 0.001))
    alone = quickstart.standard_error(np.array([0.5]))  # of a single sequence
    assert quickstart.verdict(row(0.010, alone), row(0.020, alone)) == (
        "+0.0200, of which a single sequence decides nothing"
    )
    out = io.StringIO()
    quickstart.show(Console(file=out, width=80), [row(0.010, alone), row(0.020, alone)])
    assert "0.0200 ±unknown" in out.getvalue()
    assert "nan" not in out.getvalue()


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(dms_jax.ConfigError, match=r"--quickstart\.out .*file: "):
        quickstart.main(quickstart.Config(out=tmp_path / "file"))
