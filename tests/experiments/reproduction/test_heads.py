"""Tokens kept by single heads, on cases by hand."""

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.analysis import NEVER as N
from dms_jax.analysis import Retention
from experiments.reproduction import heads


def held_of(gone) -> Retention:
    gone = np.asarray(gone)
    batch, length = gone.shape[1], gone.shape[3]
    return Retention(
        policy=dms_jax.DMS(window=2),
        tokens=np.zeros((batch, length), int),
        prompt_lengths=np.zeros(batch, int),
        gone=gone,
        reads=None,
        num_query_heads=1,
    )


def test_tokens_in_window_do_not_count(tmp_path):
    """Four of six tokens are before the window; one evicted after the last query still counts."""
    held = held_of([[[[2, N, 5, N, N, N], [2, 3, 4, 5, N, N], [6, N, N, N, N, N]]]])
    chex.assert_trees_all_close(heads.kept(held), np.array([[0.5, 0.0, 1.0]]))
    figures = heads.figures_of(held)
    assert np.isnan(figures.pop("text_agreement"))
    assert figures["ratio"] == pytest.approx(18 / (4 + 2 + 6))
    shares = ("near_empty", "near_whole", "between")
    assert [figures[each] for each in shares] == pytest.approx([1 / 3] * 3)
    held_by = ("kept", "least", "most", "least_layer", "largest_quarter")
    assert [figures[each] for each in held_by] == pytest.approx([0.5, 0, 1, 0.5, 2 / 3])
    heads.draw(tmp_path / "heads.png", {"one": heads.kept(held), "two": heads.kept(held)})
    assert (tmp_path / "heads.png").stat().st_size > 5000


def test_text_agreement_of_equal_and_opposite_orders():
    same = held_of([[[[1, 2, 3, N], [N] * 4], [[N, 2, 3, N], [N] * 4]]])
    assert heads.text_agreement(same) == pytest.approx(1)
    opposite = held_of([[[[1, 2, 3, N], [N] * 4], [[N] * 4, [1, 2, 3, N]]]])
    assert heads.text_agreement(opposite) == pytest.approx(-1)
