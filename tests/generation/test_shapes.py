"""The few prefill shapes for prompts of any number and length."""

import hypothesis
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


every_kind = pytest.mark.parametrize(
    ("shapes", "most"),
    [(SHAPES, 4), (shapes_of(64, 256, 8), 4), (PADDED, 4), (MANY, 6)],
    ids=["unpadded", "small", "padded", "many"],
)


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
