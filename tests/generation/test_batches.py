"""The few shapes in which prompts of any number and length run."""

import numpy as np
import pytest

from dms_jax.generation.batches import Shapes

LAYER = 15_000_000  # parameters of a layer of Qwen2.5-0.5B
SHAPES = Shapes.of(512, 8192, 256, few=True, layer_size=LAYER)
MANY = Shapes.of(512, 8192, 256, few=False, layer_size=LAYER)


def test_widths_are_a_chunk_and_fractions_of_it():
    assert SHAPES.widths == (512, 256)
    assert MANY.widths == (512, 128, 32)
    assert Shapes.of(64, 8192, 4, few=False, layer_size=1).widths == (64, 16)
    assert Shapes.of(24, 8192, 4, few=True, layer_size=1).widths == (24,)


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({3: 105}, [3], 256, 4),
        ({3: 256}, [3], 256, 4),
        ({3: 257}, [3], 512, 2),
        ({0: 4096, 1: 100, 2: 600}, [0, 2], 512, 2),  # the widest first
        (dict.fromkeys(range(200), 100), list(range(32)), 256, 32),
        (dict.fromkeys(range(13), 100), list(range(13)), 256, 32),
        (dict.fromkeys(range(8), 100), list(range(4)), 256, 4),
    ],
)
def test_next_batch(left, lanes, width, entries):
    assert SHAPES.next_batch(left) == (lanes, width, entries)


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({3: 105}, [3], 128, 8),
        ({3: 64}, [3], 32, 32),  # twice
        ({3: 257}, [3], 512, 2),
        (dict.fromkeys(range(200), 100), list(range(64)), 128, 64),
    ],
)
def test_next_batch_where_padding_takes_long(left, lanes, width, entries):
    assert MANY.next_batch(left) == (lanes, width, entries)


def test_a_large_model_is_padded_less():
    """Launches take as long as a few of its tokens, and as thousands of a small model."""
    large = Shapes.of(512, 8192, 96, few=True, layer_size=218_000_000)
    assert large.launch < 200 < 2000 < SHAPES.launch
    assert large.next_batch(dict.fromkeys(range(12), 1000)) == ([0, 1], 512, 2)
    assert large.next_batch(dict.fromkeys(range(15), 1000)) == (list(range(15)), 512, 16)


def replay(shapes: Shapes, batches: list[list[int]]) -> tuple[int, int]:
    """Returns the programs and the tokens, padding included, of prompts that come in batches."""
    programs = tokens = 0
    for batch in batches:
        left = dict(enumerate(batch))
        while left:
            lanes, width, entries = shapes.next_batch(left)
            programs, tokens = programs + 1, tokens + width * entries
            left = {
                lane: count - width * (lane in lanes)
                for lane, count in left.items()
                if lane not in lanes or count > width
            }
    return programs, tokens


def test_programs_of_short_prompts_that_come_a_few_at_a_time():
    """256 lanes are refilled by 27 requests a chunk; each program takes 4 ms before its tokens."""
    random = np.random.default_rng(1)
    batches = [random.integers(20, 191, size).tolist() for size in (256, *[27] * 46)]
    before, padded_before = replay(MANY, batches)
    now, padded = replay(SHAPES, batches)
    assert now <= 56 < 140 < before
    assert padded + now * SHAPES.launch < 0.75 * (padded_before + before * SHAPES.launch)


def test_a_program_has_no_more_entries_than_lanes_and_at_least_one():
    three = Shapes.of(512, 8192, 3, few=False, layer_size=LAYER)
    assert three.next_batch({0: 20, 1: 20, 2: 20}) == ([0, 1, 2], 32, 3)
    narrow = Shapes.of(512, 100, 3, few=True, layer_size=LAYER)
    assert narrow.next_batch({0: 600, 1: 600}) == ([0], 512, 1)


@pytest.mark.parametrize(("shapes", "most"), [(SHAPES, 4), (MANY, 6)], ids=["few", "many"])
def test_any_prompts_run_to_their_end_in_a_handful_of_shapes(shapes, most):
    random, seen = np.random.default_rng(0), set()
    for count in (1, 5, 40, 256):
        left = dict(enumerate(random.integers(1, 5000, count).tolist()))
        left |= {lane: 1 + lane % 70 for lane in list(left)[::3]}
        tokens = sum(left.values())
        while left:
            lanes, width, entries = shapes.next_batch(left)
            assert 0 < len(lanes) <= entries
            seen.add((width, entries))
            for lane in lanes:
                run = min(width, left[lane])
                tokens -= run
                left[lane] -= run
                if not left[lane]:
                    del left[lane]
        assert tokens == 0
    assert len(seen) <= most


@pytest.mark.parametrize("refilled", [True, False])
@pytest.mark.parametrize("longest", [60, 300, 5000])
def test_the_shapes_that_prompts_need_are_known_before_any_runs(refilled, longest):
    """Also where lanes are refilled, a few at a time."""
    random = np.random.default_rng(longest)
    counts = random.integers(1, longest, 40).tolist()
    known, seen = SHAPES.batches(counts, refilled=refilled), set()
    batches = [counts, *(counts[i : i + 3] for i in range(0, 40, 3))] if refilled else [counts]
    for batch in batches:
        left = dict(enumerate(batch))
        while left:
            lanes, width, entries = SHAPES.next_batch(left)
            seen.add((width, entries))
            left = {
                lane: count - width * (lane in lanes)
                for lane, count in left.items()
                if lane not in lanes or count > width
            }
    assert seen <= known
    assert len(known) <= 4
