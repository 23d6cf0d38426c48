"""Lanes: what a step trains on is the same however its rows are split, and each reads its own."""

import chex
import numpy as np
import pytest

from dms_jax.data.lanes import Deal, lane_batches
from dms_jax.data.sources import Documents
from dms_jax.errors import DataError

LENGTH = 8


class Watched(Documents):
    """Documents that say who was read."""

    def __init__(self, count=64):
        random = np.random.default_rng(0)
        super().__init__([random.integers(1, 30, random.integers(2, 20)) for _ in range(count)])
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)


def drawn(
    rows, *, source=None, steps=(4,), pass_size=4, packing="concatenate", count=6, state=None
):
    """The passes of some steps, and the state after them."""
    source = Watched() if source is None else source
    deal = Deal(steps, pass_size, tuple(rows))
    lanes = lane_batches(
        source, None, deal=deal, length=LENGTH, packing=packing, vocab_size=30, seed=3
    )
    if state is not None:
        lanes.set_state(state)
    passes = [
        next(lanes) for step in range(count) for _ in range(steps[step % len(steps)] // pass_size)
    ]
    return passes, lanes.get_state()


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_the_rows_are_the_same_however_they_are_split(packing):
    whole, state = drawn(range(4), packing=packing)
    left, one = drawn([0, 1], packing=packing)
    right, two = drawn([2, 3], packing=packing)
    for all_rows, first, second in zip(whole, left, right, strict=True):
        for name in all_rows:
            chex.assert_trees_all_equal(all_rows[name], np.concatenate([first[name], second[name]]))
    # What the processes save together is what one saves, and either goes on from it.
    together = {"lanes": one["lanes"] | two["lanes"]}
    chex.assert_trees_all_equal(together, state)
    expected, _ = drawn(range(4), packing=packing, count=9)
    after, _ = drawn([2, 3], packing=packing, count=3, state=together)
    for all_rows, second in zip(expected[6:], after, strict=True):
        chex.assert_trees_all_equal(all_rows["tokens"][2:], second["tokens"])


def test_the_size_of_a_pass_changes_no_step():
    """Steps of eight in passes of four and of two; three of four shards of the last."""
    whole, _ = drawn(range(8), steps=(8,), pass_size=8, count=3)
    fours, _ = drawn(range(4), steps=(8,), pass_size=4, count=3)
    last, _ = drawn([3], steps=(8,), pass_size=4, count=3)
    for step, each in enumerate(whole):
        parts = [part["tokens"] for part in fours[2 * step : 2 * step + 2]]
        chex.assert_trees_all_equal(each["tokens"], np.concatenate(parts))
        own = [part["tokens"] for part in last[2 * step : 2 * step + 2]]
        chex.assert_trees_all_equal(each["tokens"][[3, 7]], np.concatenate(own))


def test_steps_of_two_sizes_are_split_alike():
    whole, _ = drawn(range(4), steps=(8, 4), count=4)
    right, _ = drawn([2, 3], steps=(8, 4), count=4)
    for all_rows, second in zip(whole, right, strict=True):
        chex.assert_trees_all_equal(all_rows["tokens"][2:], second["tokens"])


def test_a_process_tokenizes_its_own_share():
    whole, half = Watched(), Watched()
    drawn(range(4), source=whole, count=200)
    drawn([0, 1], source=half, count=200)
    ahead = 40  # documents, and those of passes that are packed
    assert half.read <= whole.read / 2 + 2 * ahead


def test_a_state_of_other_batches_is_refused():
    _, state = drawn(range(4))
    with pytest.raises(DataError, match="dealt to 4 sequences a step, and the recipe has 8"):
        drawn(range(8), steps=(8,), pass_size=8, state=state)


def test_fewer_documents_than_sequences_of_a_step_are_told(recwarn):
    """A text file without separators is one document: every row would be the same."""
    drawn(range(4), source=Watched(4), count=1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="takes 4 sequences.* there are 1: .* token by token"):
        passes, _ = drawn(range(4), source=Watched(1), count=2)
    for each in passes:
        chex.assert_trees_all_equal(*each["tokens"])
    with pytest.warns(UserWarning, match="there are 3"):
        drawn(range(4), source=Watched(3), count=1)
