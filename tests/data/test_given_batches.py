"""Batches that a caller makes."""

import chex
import numpy as np
import pytest

from dms_jax.data.given_batches import given_batch
from dms_jax.errors import DataError

ONES = np.ones((2, 3), int)


def test_a_batch_comes_as_arrays_of_the_types_of_training():
    found = given_batch({"tokens": [[1, 2], [3, 0]], "segment_ids": [[1, 1], [1, 0]]}, vocab_size=4)
    expected = {
        "tokens": np.array([[1, 2], [3, 0]], np.int32),
        "segment_ids": np.array([[1, 1], [1, 0]], np.int32),
        "loss_mask": np.ones((2, 2), bool),
    }
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_dtypes(found, expected)
    masked = given_batch({"tokens": ONES, "loss_mask": [[1, 0, 1.0], [0, 0, 1]]}, vocab_size=2)
    assert masked["loss_mask"].tolist() == [[True, False, True], [False, False, True]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("a text", "A batch is a dict of tokens.* got 'a text'.*texts or token ids as a list"),
        ([1, 2, 3], "A batch is a dict of tokens"),
        (None, "A batch is a dict of tokens"),
        ({"text": "a text"}, "A batch is a dict of tokens.* got text"),
        ({"tokens": ONES, "weights": ONES}, "A batch is a dict of tokens.* got tokens, weights"),
        ({"tokens": 4 * ONES}, "must lie in 0 ... 3, got 4 ... 4"),
        ({"tokens": -ONES}, "must lie in 0 ... 3, got -1 ... -1"),
        ({"tokens": ONES * 1.0}, "tokens of a batch must be integers"),
        ({"tokens": [[1, 2], [3]]}, "tokens of a batch must be .*rows of one length"),
        ({"tokens": ONES[:, :2]}, r"shape \(2, 3\), got \(2, 2\)"),
        ({"tokens": ONES[0]}, r"shape \(2, 3\), got \(3,\)"),
        ({"tokens": ONES, "loss_mask": ONES / 2}, "whether it counts: 0 or 1"),
        ({"tokens": ONES, "loss_mask": ONES * np.nan}, "whether it counts: 0 or 1"),
        ({"tokens": ONES, "loss_mask": ONES[0]}, "loss_mask of a batch must have the shape"),
        ({"tokens": ONES, "segment_ids": ONES * 1.0}, "segment_ids of a batch must be integers"),
        ({"tokens": ONES, "segment_ids": -ONES}, "0 for padding"),
    ],
)
def test_what_is_no_batch_is_said(batch, message):
    with pytest.raises(DataError, match=message):
        given_batch(batch, vocab_size=4, shape=(2, 3))
