"""Packing against worked examples, with documents of any length."""

import itertools
import json

import chex
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import Documents, Exchange, batches, encode_document
from dms_jax.errors import DataError
from tests.data.support import draw, tokens_of
from tests.support.instances import further

DOCUMENTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9], [10, 11, 12, 13]]
BATCH, LENGTH = 2, 32


def test_concatenate():
    drawn = draw(DOCUMENTS)
    assert tokens_of(drawn) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert all(batch["loss_mask"].all() for batch in drawn)
    assert "segment_ids" not in drawn[0]
    chex.assert_type(drawn[0]["tokens"], np.int32)


def test_concatenate_whole():
    drawn = draw(DOCUMENTS, packing="concatenate_whole")
    assert tokens_of(drawn) == [[1, 2, 3, 4], [7, 8, 9, 10]]


def test_first_fit():
    drawn = draw(DOCUMENTS, packing="first_fit")
    rows = {}
    for batch in drawn:
        key = tuple(batch["tokens"][0].tolist())
        rows[key] = (batch["segment_ids"][0].tolist(), batch["loss_mask"][0].tolist())
    # The document of 6 is cut to 4; 7 8 and 9 share a sequence; the order of sequences is random.
    assert rows == {
        (1, 2, 3, 4): ([1, 1, 1, 1], [True] * 4),
        (7, 8, 9, 0): ([1, 1, 2, 0], [True, True, True, False]),
        (10, 11, 12, 13): ([1, 1, 1, 1], [True] * 4),
    }


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", *further("first_fit")])
def test_empty_documents_do_not_hang(packing):
    options = dict(packing=packing, seed=3)
    for empty in ([[], []], np.zeros((3, 0), np.int32)):
        with pytest.raises(DataError, match="contain no tokens"):
            draw(empty, 1, repeat=True, **options)
        assert draw(empty, 1, repeat=False, **options) == []
    # The only non-empty document is found at any place in two epochs.
    for seed in range(2):
        lone = [*[[]] * 9, [1, 2, 3, 4]]
        drawn = draw(lone, 4, repeat=True, packing=packing, seed=seed)
        for batch in drawn:
            chex.assert_trees_all_equal(batch["tokens"], np.array([[1, 2, 3, 4]]))
    assert draw([[1], []], None, packing=packing, batch_size=2) == []  # not even one batch
    with pytest.raises(DataError, match="generator"):
        batches((document for document in DOCUMENTS), batch_size=1, length=4)


def test_state_beyond_a_shortened_document_is_refused():
    """Otherwise the packer would collect empty parts until memory is full."""
    options = dict(batch_size=1, length=4, seed=None)
    iterator = batches([[1, 2, 3, 4, 5, 6, 7, 8, 9], [10]], **options)
    next(iterator)
    state = iterator.get_state()
    batches([[1, 2, 3, 4], [10]], **options).set_state(state)
    with pytest.raises(DataError, match=r"A document ends before .* other data"):
        batches([[1, 2, 3], [10]], **options).set_state(state)


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_every_packing_preserves_the_mask(packing):
    """Answers are the numbers from 50 on."""
    random = np.random.default_rng(0)
    documents = [
        Exchange(random.integers(1, 50, 3).tolist(), random.integers(50, 99, size).tolist())
        for size in random.integers(1, 6, 30)
    ]
    options = dict(batch_size=2, length=8, packing=packing)
    told, all_of_them = (
        batches(Documents(documents), answers_only=answers, **options) for answers in (True, False)
    )
    for _ in range(5):
        batch, whole = next(told), next(all_of_them)
        chex.assert_trees_all_equal(batch["tokens"], whole["tokens"])
        chex.assert_trees_all_equal(batch["loss_mask"], batch["tokens"] >= 50)
        chex.assert_trees_all_equal(whole["loss_mask"], whole["tokens"] > 0)


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_long_documents_are_packed_and_resumed(packing):
    own = Tokenizer.from_directory(assets.path("stories260k"))
    documents = assets.stories("valid")[:5]
    options = dict(batch_size=BATCH, length=LENGTH, packing=packing, seed=1)
    tokens = [encode_document(text, own).tolist() for text in documents]
    expected = list(itertools.islice(batches(tokens, **options), 12))
    iterator = batches(documents, own, **options)
    for consumed in range(12):
        state = json.loads(json.dumps(iterator.get_state()))
        chex.assert_trees_all_equal(next(iterator), expected[consumed])
        if consumed % 5 == 3:
            resumed = batches(documents, own, **options)
            resumed.set_state(state)
            chex.assert_trees_all_equal(next(resumed), expected[consumed])
