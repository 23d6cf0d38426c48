"""Frontiers, gains and tables of invented points, by hand."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from dms_jax.errors import ConfigError
from dms_jax.evaluation import METHODS, Hyperscaling, Point


def made_up(name, *rows, greedy=True) -> list[Point]:
    """Points of (length, chains, reads, peak, score of each of three problems).

    The first single-chain point of every length is greedy, if any.
    """
    return [
        Point(
            system=name,
            compression_ratio=None,
            length=length,
            chains=chains,
            temperature=0 if greedy and first_chain(rows, index) else 0.7,
            policy={},
            scores={method: np.array([scores], float) for method in METHODS},
            reads=np.full((1, 3), float(reads)),
            peak=np.full((1, 3), float(peak)),
            new_tokens=5.0,
            ended=0.5,
        )
        for index, (length, chains, reads, peak, scores) in enumerate(rows)
    ]


def first_chain(rows, index) -> bool:
    return rows[index][1] == 1 and rows[index][0] not in [row[0] for row in rows[:index]]


def by_hand() -> Hyperscaling:
    slow = made_up(
        "slow",
        (8, 1, 100, 10, (0, 0, 1)),
        (8, 2, 200, 30, (0, 0, 0)),
        (16, 1, 400, 20, (1, 0, 1)),
        (16, 2, 800, 40, (1, 0, 0)),
    )
    fast = made_up("fast", (8, 1, 50, 5, (0, 0, 1)), (8, 4, 200, 16, (1, 1, 1)))
    return Hyperscaling({"task": "made up"}, (*slow, *fast))


def test_frontiers_and_gains_by_hand():
    result = by_hand()
    assert result.systems == ("slow", "fast")
    assert [point.label for point in result.frontier("slow", "reads")] == ["8-1@0", "16-1@0"]
    assert [point.label for point in result.frontier("slow", "peak")] == ["8-1@0", "16-1@0"]
    # By reads both cover 100 to 200: fast rises from 1/3 + 2/3 * 50/150 to 1, slow from 1/3 to
    # 1/3 + 1/3 * 100/300.
    gain = result.average_gain("fast", "slow", "reads")
    assert gain.value == pytest.approx(((1 / 3 + 2 / 9) + 1) / 2 - (1 / 3 + (1 / 3 + 1 / 9)) / 2)
    back = result.average_gain("slow", "fast", "reads")
    assert back.value == pytest.approx(-gain.value)
    wide = Hyperscaling({}, (*result.of("slow"), *made_up("wide", (9, 1, 600, 1, (1, 1, 1)))))
    assert wide.average_gain("wide", "slow", "reads") is None
    with pytest.raises(ConfigError, match=r"no system 'quick'; there are slow, fast\."):
        result.average_gain("quick", "slow")


def test_points_without_reads():
    rows = [(1, 1, 0, 9, (0, 0, 0)), (8, 1, 100, 10, (0, 0, 1))]
    result = Hyperscaling({}, (*made_up("one", *rows), *made_up("two", *rows)))
    assert result.average_gain("two", "one", "reads").value == 0
    json.dumps(result.to_dict())


def test_tables_of_points_and_gains():
    result = by_hand()
    lines = result.table().splitlines()
    assert lines[0].startswith("| system | L-W-CR@T | single | vote | pass |")
    assert "| 100 * | 10 * | 5 | 50% |" in lines[2]
    assert "| 200 | 30 |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert result.gains_table().splitlines()[2].startswith("| fast | slow | 38.9 ± ")
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["frontiers"]["reads"] == {
        "slow": ["8-1@0", "16-1@0"],
        "fast": ["8-1@0", "8-4@0.7"],
    }
    assert data["gains"][0]["average_gain"][0] == pytest.approx(7 / 18)
    shown = io.StringIO()
    Console(file=shown, width=200).print(result)
    assert " vote " in shown.getvalue()
    assert max(map(len, map(str.rstrip, shown.getvalue().splitlines()))) <= 80
    assert "800" in shown.getvalue()


def test_gain_is_over_the_best_plain_decoding():
    """Votes that beat the plain cache's votes but not its greedy chain gain nothing."""
    rows = [(8, 1, 100, 10, (1, 1, 0)), (8, 1, 100, 10, (0, 0, 0)), (8, 3, 300, 30, (1, 0, 0))]
    small = made_up("small", (8, 1, 30, 3, (1, 1, 0)), (8, 9, 300, 30, (1, 1, 0)))
    sampled = Hyperscaling({}, (*made_up("plain", *rows[1:], greedy=False), *small))
    whole = Hyperscaling({}, (*made_up("plain", *rows), *small))
    # Against the sampled points alone it would be 2/3 less something from 0 to 1/3.
    assert whole.average_gain("small", "plain").value == 0
    for axis in ("reads", "peak"):
        assert sampled.average_gain("small", "plain", axis) is None
        assert sampled.average_gain("plain", "small", axis) is None
    assert "no greedy point recorded" in sampled.gains_table()
    assert "no greedy point recorded" not in whole.gains_table()
    # Each length needs its own greedy point: a whole answer tells nothing about one that is cut
    # off.
    cut_off = made_up("plain", (4, 1, 50, 5, (0, 0, 0)), greedy=False)
    assert Hyperscaling({}, (*whole.points, *cut_off)).average_gain("small", "plain") is None
    # One chain at temperature 0 is greedy; votes and other temperatures are not.
    assert [point.greedy for point in whole.points] == [True, False, False, True, False]
    assert not dataclasses.replace(whole.points[0], chains=3).greedy
