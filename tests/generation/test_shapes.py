"""The few prefill shapes for prompts of any number and length."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from dms_jax.generation.prefill import Shape, Shapes
from tests.generation.support import every_shape

LAYER = 15_000_000  # parameters of a layer of Qwen2.5-0.5B


def shapes_of(
    chunk=512, tokens=8192, lanes=256, *, few=True, unpadded=True, layer_size=LAYER, groups=1
):
    form = dict(few=few, unpadded=unpadded, one_pass=few, layer_size=layer_size, groups=groups)
    return Shapes.of(chunk, tokens, lanes, **form)


SHAPES = shapes_of()
PADDED = shapes_of(unpadded=False)
MANY = shapes_of(few=False, unpadded=False)
GROUPS = shapes_of(tokens=4096, unpadded=False, groups=8)  # of 32 lanes


def test_widths_are_fractions_of_chunk():
    assert SHAPES.widths == (512, 256)
    assert MANY.widths == (512, 128, 32)
    assert shapes_of(64, few=False, unpadded=False).widths == (64, 16)
    assert shapes_of(24).widths == (24,)


def test_shapes_equal_module_docstring():
    assert [shape[:3] for shape in every_shape(SHAPES)] == [
        *((512, 3, 1024), (512, 24, 8192), (256, 6, 512), (256, 48, 4096))
    ]
    assert [shape[:3] for shape in every_shape(PADDED)] == [
        *((512, 2, None), (512, 16, None), (256, 4, None), (256, 32, None))
    ]
    assert [shape[:3] for shape in every_shape(GROUPS)] == [
        *((512, 8, None), (512, 64, None), (256, 16, None), (256, 128, None))
    ]
    assert [shape[:2] for shape in every_shape(MANY)] == [
        *((512, 2), (512, 16), (128, 8), (128, 64), (32, 32), (32, 256))
    ]


@hypothesis.given(
    chunk=strategies.sampled_from([1, 2, 8, 24, 64, 512]),
    tokens=strategies.integers(1, 8192),
    lanes=strategies.integers(1, 256),
)
def test_places_are_at_least_a_third_of_padded_size(lanes, chunk, tokens):
    for width, entries, places, _ in every_shape(shapes_of(chunk, tokens, lanes)):
        assert 1 <= entries <= lanes
        if places is not None:
            assert width <= places <= max(tokens, width)
            assert places < entries * width <= 3 * places


@pytest.mark.parametrize(
    ("left", "lanes", "shape"),
    [
        ({3: 105}, [3], (256, 6, 512)),
        ({3: 256}, [3], (256, 6, 512)),
        ({3: 257}, [3], (512, 3, 1024)),
        ({0: 4096, 1: 100, 2: 600}, [0, 2], (512, 3, 1024)),  # the widest first
        # As many prompts as there are entries or places: 22 of 180 tokens, and others that fit
        # beside them.
        (dict.fromkeys(range(200), 80), list(range(48)), (256, 48, 4096)),
        (dict.fromkeys(range(200), 100), list(range(40)), (256, 48, 4096)),
        (dict.fromkeys(range(200), 180), list(range(22)), (256, 48, 4096)),
        (
            dict.fromkeys(range(22), 180) | {22: 180, 23: 136, 24: 1},
            [*range(22), 23],
            (256, 48, 4096),
        ),
        (dict.fromkeys(range(13), 100), list(range(13)), (256, 48, 4096)),
        (dict.fromkeys(range(4), 100), list(range(4)), (256, 6, 512)),
        (dict.fromkeys(range(4), 200), [0, 1], (256, 6, 512)),
        # Whole chunks, and ends of prompts.
        (dict.fromkeys(range(40), 1000), list(range(16)), (512, 24, 8192)),
        (dict.fromkeys(range(40), 300), list(range(24)), (512, 24, 8192)),
    ],
)
def test_next_batch(left, lanes, shape):
    assert SHAPES.next_batch(left) == (lanes, (*shape, True))


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({3: 105}, [3], 256, 4),
        ({3: 257}, [3], 512, 2),
        (dict.fromkeys(range(200), 100), list(range(32)), 256, 32),
        (dict.fromkeys(range(13), 100), list(range(13)), 256, 32),
        (dict.fromkeys(range(8), 100), list(range(4)), 256, 4),
    ],
)
def test_next_batch_on_a_mesh(left, lanes, width, entries):
    assert PADDED.next_batch(left) == (lanes, (width, entries, None, True))


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({40: 105}, [40], 256, 16),
        # A program has two entries of each group.
        (dict.fromkeys(range(0, 256, 16), 105), list(range(0, 256, 16)), 256, 16),
        (dict.fromkeys([32, 33, 34, 255], 105), [32, 33, 255], 256, 16),
        (dict.fromkeys([0, 255], 600), [0, 255], 512, 8),
    ],
)
def test_each_group_of_lanes_has_its_entries(left, lanes, width, entries):
    assert GROUPS.next_batch(left) == (lanes, (width, entries, None, True))


def test_prompts_are_expected_in_the_groups_in_turn():
    """Sixteen prompts are two in each of eight groups; forty are five, and run at once."""
    few, many = (Shape(256, size, None, True) for size in (16, 128))
    assert GROUPS.batches([105] * 16, refilled=False) == {(few, True)}
    assert GROUPS.batches([105] * 40, refilled=False) == {(many, True)}


@pytest.mark.parametrize(
    ("left", "lanes", "width", "entries"),
    [
        ({3: 105}, [3], 128, 8),
        ({3: 64}, [3], 32, 32),  # twice
        ({3: 257}, [3], 512, 2),
        (dict.fromkeys(range(200), 100), list(range(64)), 128, 64),
    ],
)
def test_next_batch_with_costly_padding(left, lanes, width, entries):
    assert MANY.next_batch(left) == (lanes, (width, entries, None, False))


def test_large_model_is_padded_less():
    """A launch takes as long as a few tokens of a large model, or thousands of a small one."""
    large = shapes_of(lanes=96, layer_size=218_000_000)
    assert large.launch < 200 < 2000 < SHAPES.launch
    assert large.next_batch(dict.fromkeys(range(12), 1000)) == ([0, 1], (512, 3, 1024, True))
    assert large.next_batch(dict.fromkeys(range(15), 1000)) == (
        list(range(15)),
        (512, 24, 8192, True),
    )


def replay(shapes: Shapes, batches: list[list[int]]):
    """Runs prompts that arrive in batches; returns lanes, tokens and shape of each program."""
    for batch in batches:
        left = dict(enumerate(batch))
        while left:
            lanes, shape = shapes.next_batch(left)
            counts = [min(left[lane], shape.width) for lane in lanes]
            yield lanes, counts, shape
            for lane, count in zip(lanes, counts, strict=True):
                left[lane] -= count
                if not left[lane]:
                    del left[lane]


def costs(shapes: Shapes, batches: list[list[int]]) -> tuple[int, int]:
    """Returns the number of programs for batches of prompts, and the tokens that they compute."""
    programs = [shape.most for _, _, shape in replay(shapes, batches)]
    return len(programs), sum(programs)


def test_cost_of_refilling_with_short_prompts():
    """In each chunk 27 requests refill 256 lanes; a program takes 4 ms plus its tokens."""
    random = np.random.default_rng(1)
    batches = [random.integers(20, 191, size).tolist() for size in (256, *[27] * 46)]
    tokens = sum(map(sum, batches))
    before, padded_before = costs(MANY, batches)
    padded_programs, padded = costs(PADDED, batches)
    now, places = costs(SHAPES, batches)
    assert padded_programs <= 56 < 140 < before
    assert padded + padded_programs * SHAPES.launch < 0.75 * (
        padded_before + before * SHAPES.launch
    )
    assert now <= 58
    assert tokens <= places < 1.5 * tokens < 2.5 * tokens < padded


def test_entries_are_between_one_and_lanes():
    three = shapes_of(lanes=3, few=False, unpadded=False)
    assert three.next_batch({0: 20, 1: 20, 2: 20}) == ([0, 1, 2], (32, 3, None, False))
    narrow = shapes_of(tokens=100, lanes=3)
    assert narrow.next_batch({0: 600, 1: 600}) == ([0], (512, 1, None, True))


every_kind = pytest.mark.parametrize(
    ("shapes", "most"),
    [(SHAPES, 4), (shapes_of(64, 256, 8), 4), (PADDED, 4), (MANY, 6)],
    ids=["unpadded", "small", "padded", "many"],
)


@every_kind
def test_all_prompts_run_in_few_shapes(shapes, most):
    random, seen = np.random.default_rng(0), set()
    for count in (1, 5, 40, shapes.num_lanes):
        left = dict(enumerate(random.integers(1, 5000, count).tolist()))
        left |= {lane: 1 + lane % 70 for lane in list(left)[::3]}
        tokens = 0
        for lanes, counts, shape in replay(shapes, [list(left.values())]):
            assert 0 < len(lanes) <= shape.entries
            assert len(set(lanes)) == len(lanes)
            assert sum(counts) <= shape.most
            seen.add(shape)
            tokens += sum(counts)
        assert tokens == sum(left.values())
    assert seen <= set(every_shape(shapes))
    assert len(every_shape(shapes)) <= most


@every_kind
def test_first_prompt_of_widest_shape_never_waits(shapes, most):
    """For any number of later prompts that fit together."""
    del most
    random = np.random.default_rng(5)
    left = dict(enumerate(random.integers(1, 2000, 60).tolist()))
    while left:
        lanes, shape = shapes.next_batch(left)
        widest = max(map(shapes.width, left.values()))
        assert lanes[0] == next(lane for lane in left if shapes.width(left[lane]) == widest)
        for lane in lanes:
            left[lane] -= shape.width
        left = {lane: count for lane, count in left.items() if count > 0}


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=strategies.data(), refilled=strategies.booleans())
@every_kind
def test_needed_shapes_are_predicted(shapes, most, data, refilled):
    """Also if lanes are refilled, a few at a time."""
    longest = data.draw(strategies.sampled_from([60, 300, 5000, 60_000]))
    counts = data.draw(strategies.lists(strategies.integers(1, longest), min_size=1, max_size=40))
    known = shapes.batches(counts, refilled=refilled)
    groups = [counts[i : i + 3] for i in range(0, len(counts), 3)]
    assert programs_of(shapes, [counts, *groups] if refilled else [counts]) <= known
    assert known <= shapes.every(longest)
    assert len({shape for shape, _ in known}) <= most


def programs_of(shapes: Shapes, batches: list[list[int]]) -> set[tuple[Shape, bool]]:
    """The prefill programs for batches of prompts, each with whether it ends a prompt."""
    found = set()
    for batch in batches:
        left = dict(enumerate(batch))
        for lanes, counts, shape in replay(shapes, [batch]):
            for lane, count in zip(lanes, counts, strict=True):
                left[lane] -= count
            found.add((shape, not all(left[lane] for lane in lanes)))
    return found


@every_kind
def test_shapes_of_single_prompt_are_exact(shapes, most):
    del most
    widest = shapes.widths[0]
    for count in (1, widest // 2, widest // 2 + 1, widest, widest + 1, 2 * widest, 5 * widest + 3):
        assert shapes.batches([count], refilled=False) == programs_of(shapes, [[count]])


@every_kind
def test_every_shape_is_needed_by_some_prompt(shapes, most):
    """With few widths a narrow chunk ends its prompt; with many it is one of two."""
    del most
    for longest in (3, shapes.widths[0] // 2, shapes.widths[0], 3 * shapes.widths[0]):
        met = set()
        for count in range(1, longest + 1):
            met |= shapes.batches([count], refilled=True)
        assert shapes.every(longest) == met
