"""Batches: resumable iterators, the rows of a process, batches given by a caller."""

import json
import subprocess
import sys

import chex
import numpy as np
import pytest

from dms_jax.data import Documents, batches
from dms_jax.data.batches import RowAssignment, check_batch, process_batches
from dms_jax.errors import ConfigError, DataError
from tests.data.support import draw, take, tokens_of
from tests.data.test_tokenization import Plain
from tests.support.tree import ROOT

LENGTH = 8
ONES = np.ones((2, 3), int)


def test_order_depends_on_the_seed_and_the_epoch():
    documents = [[i] for i in range(16)]
    options = dict(length=16, repeat=True)
    epochs = tokens_of(draw(documents, 3, seed=0, **options))
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tokens_of(draw(documents, 3, seed=0, **options)) == epochs
    assert tokens_of(draw(documents, 3, seed=1, **options)) != epochs


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_resume_from_a_state(packing):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 50, random.integers(1, 9)).tolist() for _ in range(40)]
    options = dict(batch_size=2, length=8, packing=packing, seed=-3)
    iterator = batches(documents, **options)
    for consumed in (0, 1, 5, 22):
        take(iterator, consumed)
        state = json.loads(json.dumps(iterator.get_state()))
        expected = take(iterator, 4)
        resumed = batches(documents, **options)
        resumed.set_state(state)
        chex.assert_trees_all_equal(take(resumed, 4), expected)


def test_state_does_not_depend_on_the_batch_size():
    documents = [[i] * 3 for i in range(20)]
    whole = batches(documents, batch_size=4, length=4)
    next(whole)
    single = batches(documents, batch_size=1, length=4)
    single.set_state(whole.get_state())
    assert tokens_of(take(single, 4)) == next(whole)["tokens"].tolist()


def test_bad_data_is_named_with_its_origin(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n{"text": ["x"]}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: field 'text' must be"):
        take(batches(path, Plain(), batch_size=1, length=2, seed=None), 2)
    with pytest.raises(DataError, match=r"document 1: token ids must lie in 0 \.\.\. 9, got 3"):
        draw([[1, 2, 3, 4], [3, 10]], vocab_size=10)
    with pytest.raises(DataError, match="document 0: the model has no tokenizer"):
        draw(["a text"])
    with pytest.raises(DataError, match=r"document 0: .* and type float64"):
        draw([np.array([0.5, 1.0])])
    with pytest.raises(DataError, match="contain no tokens"):
        draw([[], []], 1, repeat=True)


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"^batch_size must be .* at least 1"):
        batches([[1]], batch_size=0, length=4)
    with pytest.raises(ConfigError, match=r"^length must be .* at least 1"):
        batches([[1]], batch_size=1, length=0)


def test_program_with_an_open_iterator_exits_cleanly():
    """Its threads end before the interpreter clears modules."""
    program = (
        "from dms_jax.data import Documents, batches\n"
        "held = batches(Documents([[1, 2, 3]] * 9), batch_size=1, length=4)\n"
        "print(next(held)['tokens'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 4)\n", "")


class Watched(Documents):
    """Documents that record which ones were read."""

    def __init__(self, count=64):
        random = np.random.default_rng(0)
        super().__init__([random.integers(1, 30, random.integers(2, 20)) for _ in range(count)])
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)


def draw_rows(
    rows, *, source=None, steps=(4,), pass_size=4, packing="concatenate", count=6, state=None
):
    """Returns the rows of some passes, and the state after them."""
    source = Watched() if source is None else source
    assignment = RowAssignment(steps, pass_size, tuple(rows))
    iterator = process_batches(
        source, None, assignment=assignment, length=LENGTH, packing=packing, vocab_size=30, seed=3
    )
    if state is not None:
        iterator.set_state(state)
    passes = [
        next(iterator)
        for step in range(count)
        for _ in range(steps[step % len(steps)] // pass_size)
    ]
    return passes, iterator.get_state()


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_rows_do_not_depend_on_the_processes(packing):
    whole, state = draw_rows(range(4), packing=packing)
    left, one = draw_rows([0, 1], packing=packing)
    right, two = draw_rows([2, 3], packing=packing)
    for all_rows, first, second in zip(whole, left, right, strict=True):
        for name in all_rows:
            chex.assert_trees_all_equal(all_rows[name], np.concatenate([first[name], second[name]]))
    # The state of both processes together is that of one, and either can resume from it.
    together = {"lanes": one["lanes"] | two["lanes"]}
    chex.assert_trees_all_equal(together, state)
    expected, _ = draw_rows(range(4), packing=packing, count=9)
    after, _ = draw_rows([2, 3], packing=packing, count=3, state=together)
    for all_rows, second in zip(expected[6:], after, strict=True):
        chex.assert_trees_all_equal(all_rows["tokens"][2:], second["tokens"])


def test_steps_do_not_depend_on_the_pass_size():
    """Steps of eight in passes of four, the last of four shards; then steps of two sizes."""
    whole, _ = draw_rows(range(8), steps=(8,), pass_size=8, count=3)
    fours, _ = draw_rows(range(4), steps=(8,), pass_size=4, count=3)
    last, _ = draw_rows([3], steps=(8,), pass_size=4, count=3)
    for step, each in enumerate(whole):
        parts = [part["tokens"] for part in fours[2 * step : 2 * step + 2]]
        chex.assert_trees_all_equal(each["tokens"], np.concatenate(parts))
        own = [part["tokens"] for part in last[2 * step : 2 * step + 2]]
        chex.assert_trees_all_equal(each["tokens"][[3, 7]], np.concatenate(own))
    whole, _ = draw_rows(range(4), steps=(8, 4), count=4)
    right, _ = draw_rows([2, 3], steps=(8, 4), count=4)
    for all_rows, second in zip(whole, right, strict=True):
        chex.assert_trees_all_equal(all_rows["tokens"][2:], second["tokens"])


def test_process_tokenizes_only_its_share():
    whole, half = Watched(), Watched()
    draw_rows(range(4), source=whole, count=200)
    draw_rows([0, 1], source=half, count=200)
    ahead = 40  # documents, and those of passes that are packed
    assert half.read <= whole.read / 2 + 2 * ahead


def test_state_of_another_batch_size_is_refused():
    _, state = draw_rows(range(4))
    with pytest.raises(DataError, match="dealt to 4 sequences a step, and the recipe has 8"):
        draw_rows(range(8), steps=(8,), pass_size=8, state=state)


def test_fewer_documents_than_sequences_warns(recwarn):
    """A text file without separators is one document: every row would be the same."""
    draw_rows(range(4), source=Watched(4), count=1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="takes 4 sequences.* there are 1: .* token by token"):
        passes, _ = draw_rows(range(4), source=Watched(1), count=2)
    for each in passes:
        chex.assert_trees_all_equal(*each["tokens"])
    with pytest.warns(UserWarning, match="there are 3"):
        draw_rows(range(4), source=Watched(3), count=1)


def test_check_batch_converts_types():
    found = check_batch({"tokens": [[1, 2], [3, 0]], "segment_ids": [[1, 1], [1, 0]]}, vocab_size=4)
    expected = {
        "tokens": np.array([[1, 2], [3, 0]], np.int32),
        "segment_ids": np.array([[1, 1], [1, 0]], np.int32),
        "loss_mask": np.ones((2, 2), bool),
    }
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_dtypes(found, expected)
    masked = check_batch({"tokens": ONES, "loss_mask": [[1, 0, 1.0], [0, 0, 1]]}, vocab_size=2)
    assert masked["loss_mask"].tolist() == [[True, False, True], [False, False, True]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("a text", "A batch is a dict of tokens.* got 'a text'.*texts or token ids as a list"),
        ({"text": "a text"}, "A batch is a dict of tokens.* got text"),
        ({"tokens": ONES, "weights": ONES}, "A batch is a dict of tokens.* got tokens, weights"),
        ({"tokens": 4 * ONES}, "must lie in 0 ... 3, got 4 ... 4"),
        ({"tokens": -ONES}, "must lie in 0 ... 3, got -1 ... -1"),
        ({"tokens": ONES * 1.0}, "tokens of a batch must be integers"),
        ({"tokens": [[1, 2], [3]]}, "tokens of a batch must be .*rows of one length"),
        ({"tokens": ONES[0]}, r"shape \(2, 3\), got \(3,\)"),
        ({"tokens": ONES, "loss_mask": ONES / 2}, "whether it counts: 0 or 1"),
        ({"tokens": ONES, "loss_mask": ONES[0]}, "loss_mask of a batch must have the shape"),
        ({"tokens": ONES, "segment_ids": ONES * 1.0}, "segment_ids of a batch must be integers"),
        ({"tokens": ONES, "segment_ids": -ONES}, "0 for padding"),
    ],
)
def test_malformed_batch_is_refused(batch, message):
    with pytest.raises(DataError, match=message):
        check_batch(batch, vocab_size=4, shape=(2, 3))
