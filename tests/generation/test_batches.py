"""The few shapes in which prompts of any number and length run."""

import numpy as np
import pytest

from dms_jax.generation.batches import Shapes

SHAPES = Shapes.of(512, 8192, 256)


def test_widths_are_a_chunk_and_fractions_of_it():
    assert SHAPES.widths == (512, 128, 32)
    assert Shapes.of(64, 8192, 4).widths == (64, 16)
    assert Shapes.of(8, 8192, 4).widths == (8,)


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({3: 105}, [3], 128, 8),
        ({3: 64}, [3], 32, 32),  # twice
        ({3: 257}, [3], 512, 2),
        ({0: 4096, 1: 100, 2: 600}, [0, 2], 512, 2),  # the widest first
        (dict.fromkeys(range(200), 100), list(range(64)), 128, 64),
        (dict.fromkeys(range(33), 100), list(range(33)), 128, 64),
        (dict.fromkeys(range(32), 100), list(range(8)), 128, 8),
    ],
)
def test_next_batch(left, lanes, width, entries):
    assert SHAPES.next_batch(left) == (lanes, width, entries)


def test_a_program_has_no_more_entries_than_lanes_and_at_least_one():
    assert Shapes.of(512, 8192, 3).next_batch({0: 20, 1: 20, 2: 20}) == ([0, 1, 2], 32, 3)
    assert Shapes.of(512, 100, 3).next_batch({0: 600, 1: 600}) == ([0], 512, 1)


def test_any_prompts_run_to_their_end_in_a_handful_of_shapes():
    random, seen = np.random.default_rng(0), set()
    for count in (1, 5, 40, 256):
        left = dict(enumerate(random.integers(1, 5000, count).tolist()))
        left |= {lane: 1 + lane % 70 for lane in list(left)[::3]}
        tokens = sum(left.values())
        while left:
            lanes, width, entries = SHAPES.next_batch(left)
            assert 0 < len(lanes) <= entries
            seen.add((width, entries))
            for lane in lanes:
                run = min(width, left[lane])
                tokens -= run
                left[lane] -= run
                if not left[lane]:
                    del left[lane]
        assert tokens == 0
    assert len(seen) <= 6
