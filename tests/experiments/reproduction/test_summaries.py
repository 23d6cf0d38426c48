"""Summaries of what heads hold, by hand on small cases."""

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.analysis.retention import NEVER, Retention, ratio_by_length, ratios
from experiments.reproduction import summaries
from experiments.reproduction.over_training import over_training, snapshots_of

N = NEVER


def found_of(gone, **fields) -> Retention:
    gone = np.array(gone)
    batch, length = gone.shape[1], gone.shape[3]
    given = dict(
        policy=dms_jax.RandomEviction(window=1),
        tokens=np.zeros((batch, length), int),
        prompt_lengths=np.zeros(batch, int),
        gone=gone,
        reads=None,
        num_query_heads=2,
    )
    return Retention(**(given | fields))


@pytest.fixture
def one_layer():
    """One layer, two sequences, two heads, four tokens."""
    return found_of([[[[2, N, N, N], [N, N, N, N]], [[2, 3, N, N], [1, 2, 3, N]]]])


def test_live_tokens_and_ratios(one_layer):
    want = [[[[1, 2, 2, 3], [1, 2, 3, 4]], [[1, 2, 2, 2], [1, 1, 1, 1]]]]
    chex.assert_trees_all_equal(one_layer.live(), np.array(want))
    chex.assert_trees_all_close(ratios(one_layer), np.array([[4 / 2.5, 4 / 2.5]]))
    by_length = ratio_by_length(one_layer)
    chex.assert_trees_all_close(by_length[0, 1], np.array([1, 2 / 1.5, 3 / 2, 4 / 2.5]))
    total = summaries.total_ratio(one_layer)
    chex.assert_trees_all_close(total, np.array([1, 2 / 1.75, 3 / 2, 4 / 2.5]))


def test_what_a_query_sees(one_layer):
    seen = one_layer.seen_by(2)
    chex.assert_trees_all_equal(seen[0, 1, 0], np.array([False, True, True, False]))
    chex.assert_trees_all_equal(seen[0, 1, 1], np.array([False, False, True, False]))


def test_kept_by_distance_and_position(one_layer):
    kept = summaries.kept_by_distance(one_layer)
    # Head 0: at distance 2, tokens 0 and 1 of two sequences; only token 1 of the first is held.
    chex.assert_trees_all_close(kept[0, 0], np.array([1, 1, 1 / 4, 0]))
    chex.assert_trees_all_close(kept[0, 1], np.array([1, 1 / 2, 1 / 2, 1 / 2]))
    position = summaries.kept_by_position(one_layer)
    chex.assert_trees_all_close(position[0, 0], np.array([0, 1 / 2, 1, 1]))


def test_kinds_of_tokens():
    texts = ["", "Ann", " has", " 1", "2", " cat", "s", ".", "\n", "It", "'", "s"]
    assert summaries.kinds_of(texts) == [
        *("special", "word", "word", "digits", "digits", "word", "word part", "punctuation"),
        *("space", "word", "punctuation", "word"),
    ]


def test_kept_by_kind_and_what_heads_prefer(one_layer):
    kinds = [["word", "digits", "word", "word"], ["digits", "digits", "word", "word"]]
    kept = summaries.kept_by_kind(one_layer, kinds, distance=2)
    word, digits, space = (summaries.KINDS.index(kind) for kind in ("word", "digits", "space"))
    # Tokens 0 and 1 have a query two later: a word and three digits.
    chex.assert_trees_all_close(kept[0, 0, [word, digits]], np.array([0, 1 / 3]))
    chex.assert_trees_all_close(kept[0, 1, [word, digits]], np.array([1, 1 / 3]))
    assert np.isnan(kept[..., space]).all()
    prefers = summaries.specialisation(one_layer, kinds, distance=2)
    chex.assert_trees_all_close(prefers[0, 0, [word, digits]], np.array([-1 / 4, 1 / 12]))
    with pytest.raises(dms_jax.DataError, match="2 lists of 4 kinds"):
        summaries.kept_by_kind(one_layer, kinds[:1], distance=2)
    with pytest.raises(dms_jax.DataError, match="smaller distance"):
        summaries.held_later(one_layer, 4)


def test_kinds_that_there_are_not(one_layer):
    kinds = [["word"] * 4, ["word", "noun", "word", "word"]]
    with pytest.raises(dms_jax.DataError, match="noun is no kind"):
        summaries.kept_by_kind(one_layer, kinds, distance=1)


def test_heads_that_hold_the_same_agree():
    gone = [[[[N, 2, N, 4, N, N], [N, 2, N, 4, N, N], [1, N, 3, N, N, N], [N] * 6]]]
    agreement = summaries.head_agreement(found_of(gone), distance=1)
    chex.assert_shape(agreement, (4, 4))
    # Held one token later: 1 0 1 0 1 and 0 1 0 1 1, with the covariance 1/5 - 9/25.
    chex.assert_trees_all_close(agreement[0, :3], np.array([1, 1, -0.16 / 0.24]))
    assert np.isnan(agreement[3]).all()  # a head that holds everything


def test_heads_that_keep_their_order_over_texts():
    same = found_of([[[[1, 2, 3, N], [N] * 4], [[N, 2, 3, N], [N] * 4]]])
    assert summaries.text_agreement(same) == pytest.approx(1)
    opposite = found_of([[[[1, 2, 3, N], [N] * 4], [[N] * 4, [1, 2, 3, N]]]])
    assert summaries.text_agreement(opposite) == pytest.approx(-1)
    assert np.isnan(summaries.text_agreement(found_of([[[[1, N]]]])))


def test_read_shares_count_steps_in_which_the_token_was_there():
    gone = [[[[3, N, N, N]]]]
    reads = np.array([[[[2, 1, 4, 0]]]])
    found = found_of(gone, reads=reads, prompt_lengths=np.array([1]), num_query_heads=2)
    # Steps 1 to 3; token 0 was there for 1 and 2, token 2 for 2 and 3; two query heads.
    want = np.array([2 / 4, 1 / 6, 4 / 4, 0 / 2])
    chex.assert_trees_all_close(found.read_shares()[0, 0, 0], want)
    everything = found_of(gone, prompt_lengths=np.array([3]))
    chex.assert_trees_all_close(everything.read_shares()[0, 0, 0], np.array([np.nan, 1, 1, 1]))


def test_ratios_over_training(tmp_path):
    model = dms_jax.load(str(assets.path("stories260k")))
    tokens = np.asarray(model.tokenizer.encode(assets.stories("valid")[0]))[None, :24]

    def evicting(rate):
        return model.__class__(
            transformer=model.transformer, policy=dms_jax.RandomEviction(window=2, rate=rate)
        )

    found = over_training([(1.0, evicting(0.0)), (2.0, evicting(1.0))], tokens)
    chex.assert_shape(found.heads, (2, 5, 4))
    chex.assert_trees_all_close(found.heads[0], np.ones((5, 4)))
    chex.assert_trees_all_close(found.heads[1], np.full((5, 4), 24 / 3))
    chex.assert_trees_all_close(found.totals, np.array([1.0, 8.0]))
    with pytest.raises(dms_jax.DataError, match="no snapshots"):
        over_training([], tokens)

    with pytest.raises(dms_jax.DataError, match="holds no snapshot"):
        snapshots_of(tmp_path)
    for name in ("10", "2", "4.5", "notes", "nan"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert [ratio for ratio, _ in snapshots_of(tmp_path)] == [2.0, 4.5, 10.0]
