"""Names at the ends of lines."""

import pytest

from dms_jax.analysis.labels import label_heights


def test_labels_move_down_where_they_would_collide():
    assert label_heights([(5, 90), (5, 89), (1, 90)], 5, log=True) == [90, 85, 90]
    assert label_heights([(5, 90), (5, 89), (1, 90)], 5, log=False) == [90, 80, 85]
    assert label_heights([(1, 20), (1, 50)], 5, log=False) == [20, 50]
    assert label_heights([], 5, log=True) == []


@pytest.mark.parametrize("count", [2, 6])
def test_equal_ends_are_a_gap_apart(count):
    heights = sorted(label_heights([(7, 30)] * count, 4, log=True))
    assert heights == [30 - 4 * step for step in reversed(range(count))]
