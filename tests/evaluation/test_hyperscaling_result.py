"""Frontiers, gains and tables of points that are made up, by hand."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from dms_jax.errors import ConfigError
from dms_jax.evaluation import Hyperscaling, Point
from dms_jax.evaluation.hyperscaling_result import Stopped


def made_up(name, *rows) -> list[Point]:
    """Points of (length, chains, reads, peak, score of each of three problems)."""
    return [
        Point(
            system=name,
            compression_ratio=None,
            length=length,
            chains=chains,
            policy={},
            scores={
                method: np.array([scores], float)
                for method in ("single", "vote", "likeliest_mean", "likeliest_sum", "pass")
            },
            reads=np.full((1, 3), float(reads)),
            peak=np.full((1, 3), float(peak)),
            new_tokens=5.0,
            ended=0.5,
        )
        for length, chains, reads, peak, scores in rows
    ]


def by_hand() -> Hyperscaling:
    slow = made_up(
        "slow",
        (8, 1, 100, 10, (0, 0, 1)),
        (8, 2, 200, 30, (0, 0, 0)),
        (16, 1, 400, 20, (1, 0, 1)),
        (16, 2, 800, 40, (1, 0, 0)),
    )
    fast = made_up("fast", (8, 1, 50, 5, (0, 0, 1)), (16, 4, 200, 16, (1, 1, 1)))
    return Hyperscaling({"task": "made up"}, (*slow, *fast))


def test_frontiers_and_gains_by_hand():
    result = by_hand()
    assert result.systems == ("slow", "fast")
    assert [point.label for point in result.frontier("slow", "reads")] == ["8-1", "16-1"]
    assert [point.label for point in result.frontier("slow", "peak")] == ["8-1", "16-1"]
    # By reads both cover 100 to 200: fast rises from 1/3 + 2/3 * 50/150 to 1, slow from 1/3 to
    # 1/3 + 1/3 * 100/300.
    gain = result.average_gain("fast", "slow", "reads")
    assert gain.value == pytest.approx(((1 / 3 + 2 / 9) + 1) / 2 - (1 / 3 + (1 / 3 + 1 / 9)) / 2)
    back = result.average_gain("slow", "fast", "reads")
    assert back.value == pytest.approx(-gain.value)
    # At 200 reads slow is half way between its frontier points 100 and 400 in the logarithm:
    # scores 0.5, 0, 1; not its own point at 200, which its point at 100 surpasses.
    (equal,) = result.equal_budget("fast", "slow", "reads")
    assert equal.point.label == "16-4"
    assert equal.gain.value == pytest.approx((0.5 + 1 + 0) / 3)
    assert equal.gain.error == pytest.approx(np.std([0.5, 1, 0], ddof=1) / np.sqrt(3))
    # Up to its largest budget slow stays at its best.
    wide = Hyperscaling({}, (*result.of("slow"), *made_up("wide", (9, 1, 600, 1, (1, 1, 1)))))
    (equal,) = wide.equal_budget("wide", "slow", "reads")
    assert equal.gain.value == pytest.approx(1 / 3)
    assert wide.average_gain("wide", "slow", "reads") is None
    with pytest.raises(ConfigError, match=r"no system 'quick'; there are slow, fast\."):
        result.average_gain("quick", "slow")


def test_answers_of_one_token_read_nothing():
    """Their points have no place on a logarithmic axis; frontiers have room for them."""
    rows = [(1, 1, 0, 9, (0, 0, 0)), (8, 1, 100, 10, (0, 0, 1))]
    result = Hyperscaling({}, (*made_up("one", *rows), *made_up("two", *rows)))
    assert [each.point.label for each in result.equal_budget("two", "one", "reads")] == ["8-1"]
    assert result.average_gain("two", "one", "reads").value == 0
    json.dumps(result.to_dict())


def test_chains_of_one_token_have_no_reads_to_save():
    (point,) = made_up("one", (1, 2, 0, 9, (0, 0, 0)))
    stopped = Stopped(vote=point.scores["vote"], reads=point.reads, peak=point.peak, cancelled=0.5)
    result = Hyperscaling({}, (dataclasses.replace(point, stopped=stopped),))
    assert result.points[0].reads_saved == 0
    json.dumps(result.to_dict(), allow_nan=False)
    assert "nan" not in result.table()


def test_tables_of_points_and_gains():
    result = by_hand()
    lines = result.table().splitlines()
    assert lines[0].startswith("| system | L-W-CR | single | vote | likeliest_mean |")
    assert "| 100 * | 10 * | 5 | 50% |" in lines[2]
    assert "| 200 | 30 |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert result.gains_table().splitlines()[2].startswith("| fast | slow | 38.9 ± ")
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["frontiers"]["reads"] == {"slow": ["8-1", "16-1"], "fast": ["8-1", "16-4"]}
    assert data["gains"][0]["average_gain"][0] == pytest.approx(7 / 18)
    shown = io.StringIO()
    Console(file=shown, width=200).print(result)
    assert "likeliest_sum" in shown.getvalue()
    assert "800" in shown.getvalue()
