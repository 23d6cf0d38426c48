"""Packing against examples by hand and a plain loop, and iterators that resume."""

import itertools
import json
import subprocess
import sys

import chex
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import Documents, batches, encode_document
from dms_jax.errors import ConfigError, DataError
from tests.support.instances import further
from tests.support.tree import ROOT

DOCUMENTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9], [10, 11, 12, 13]]


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def draw(documents, count=None, **options):
    options = dict(batch_size=1, length=4, seed=None, repeat=False) | options
    return take(batches(Documents(documents), **options), count)


def tokens_of(drawn):
    return np.concatenate([batch["tokens"] for batch in drawn]).tolist()


def test_concatenate_cuts_the_stream():
    drawn = draw(DOCUMENTS)
    assert tokens_of(drawn) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert all(batch["loss_mask"].all() for batch in drawn)
    assert "segment_ids" not in drawn[0]
    chex.assert_type(drawn[0]["tokens"], np.int32)


def test_concatenate_whole_starts_every_sequence_with_a_document():
    drawn = draw(DOCUMENTS, packing="concatenate_whole")
    assert tokens_of(drawn) == [[1, 2, 3, 4], [7, 8, 9, 10]]


def test_first_fit_keeps_documents_apart():
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
def test_documents_without_a_token_never_end_in_waiting(packing):
    options = dict(packing=packing, seed=3)
    for empty in ([[], []], np.zeros((3, 0), np.int32)):
        with pytest.raises(DataError, match="hold no token"):
            draw(empty, 1, repeat=True, **options)
        assert draw(empty, 1, repeat=False, **options) == []
    # The only document with tokens is found, wherever the shuffles of two epochs put it.
    for seed in range(2):
        lone = [*[[]] * 9, [1, 2, 3, 4]]
        drawn = draw(lone, 4, repeat=True, packing=packing, seed=seed)
        for batch in drawn:
            chex.assert_trees_all_equal(batch["tokens"], np.array([[1, 2, 3, 4]]))
    assert draw([[1], []], None, packing=packing, batch_size=2) == []  # not even one batch
    with pytest.raises(DataError, match="generator"):
        batches((document for document in DOCUMENTS), batch_size=1, length=4)


def test_each_epoch_has_an_order_of_its_own_drawn_from_the_seed():
    documents = [[i] for i in range(16)]
    options = dict(length=16, repeat=True)
    epochs = tokens_of(draw(documents, 3, seed=0, **options))
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tokens_of(draw(documents, 3, seed=0, **options)) == epochs
    assert tokens_of(draw(documents, 3, seed=1, **options)) != epochs


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_an_iterator_resumes_where_its_state_was_taken(packing):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 50, random.integers(1, 9)).tolist() for _ in range(40)]
    options = dict(batch_size=2, length=8, packing=packing, seed=3)
    iterator = batches(documents, **options)
    for consumed in (0, 1, 5, 22):
        take(iterator, consumed)
        state = json.loads(json.dumps(iterator.get_state()))
        expected = take(iterator, 4)
        resumed = batches(documents, **options)
        resumed.set_state(state)
        chex.assert_trees_all_equal(take(resumed, 4), expected)


def test_a_state_within_a_document_that_is_shorter_now_is_refused():
    """No sequence would ever be full, and memory would be, of empty pieces."""
    options = dict(batch_size=1, length=4, seed=None)
    iterator = batches([[1, 2, 3, 4, 5, 6, 7, 8, 9], [10]], **options)
    next(iterator)
    state = iterator.get_state()
    batches([[1, 2, 3, 4], [10]], **options).set_state(state)
    with pytest.raises(DataError, match=r"Document 0 ends before .* other data"):
        batches([[1, 2, 3], [10]], **options).set_state(state)


def test_the_state_does_not_depend_on_the_batch_size():
    documents = [[i] * 3 for i in range(20)]
    whole = batches(documents, batch_size=4, length=4)
    next(whole)
    single = batches(documents, batch_size=1, length=4)
    single.set_state(whole.get_state())
    assert tokens_of(take(single, 4)) == next(whole)["tokens"].tolist()


def test_texts_begin_with_the_begin_token():
    tokenizer = Tokenizer.from_directory(assets.path("stories260k"))
    story = assets.stories("valid")[0]
    ids = encode_document(story, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == story
    (batch,) = take(batches([story, story], tokenizer, batch_size=1, length=2 * len(ids)), 1)
    chex.assert_trees_all_equal(batch["tokens"], np.array([[*ids, *ids]]))


class EndToken:
    """A tokenizer without a begin token, with an end token and a chat template."""

    bos_token_id = None
    eos_token_id = 9

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [int(character) for character in text]

    def apply_chat_template(self, messages, add_generation_prompt=True):
        assert not add_generation_prompt
        return "".join(f"8{turn['content']}" for turn in messages)


def test_texts_end_with_the_end_token_where_none_begins_them():
    chex.assert_trees_all_equal(encode_document("12", EndToken()), np.array([1, 2, 9]))


def test_conversations_go_through_the_template():
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "23"}]
    chex.assert_trees_all_equal(encode_document(turns, EndToken()), np.array([8, 1, 8, 2, 3]))


def test_bad_data_is_named_with_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n{"text": ["x"]}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: field 'text' must be"):
        take(batches(path, EndToken(), batch_size=1, length=2, seed=None), 2)
    with pytest.raises(DataError, match=r"document 1: token ids must lie in 0 \.\.\. 9, got 3"):
        draw([[1, 2, 3, 4], [3, 10]], vocab_size=10)
    with pytest.raises(DataError, match="document 0: the model has no tokenizer"):
        draw(["a text"])
    with pytest.raises(DataError, match=r"document 0: .* and type float64"):
        draw([np.array([0.5, 1.0])])
    with pytest.raises(DataError, match="hold no token"):
        draw([[], []], 1, repeat=True)


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        batches([[1]], batch_size=0, length=4)
    with pytest.raises(ConfigError, match="at least 1"):
        batches([[1]], batch_size=1, length=0)


def test_a_program_that_ends_with_batches_in_hand_says_nothing():
    """Their threads end before the interpreter takes modules apart, on which they would stumble."""
    program = (
        "from dms_jax.data import Documents, batches\n"
        "held = batches(Documents([[1, 2, 3]] * 9), batch_size=1, length=4)\n"
        "print(next(held)['tokens'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 4)\n", "")
