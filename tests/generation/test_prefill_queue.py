"""The prefill queue: which tokens run next, and which lanes share a prompt."""

import dataclasses

import numpy as np
import pytest

from dms_jax.cache.accounting import Meter
from dms_jax.generation.prefill import Prefill, PrefillQueue, PromptShapes, Shapes
from dms_jax.generation.requests import Request
from dms_jax.generation.sampling import Sampling

# Programs of 4 x 64 tokens, of 8 x 32, and of a single entry for a single lane.
ONE_PASS = Shapes(
    widths=(64, 32), passes=1, tokens=256, num_lanes=8, launch=256, unpadded=False, one_pass=True
)
# For tokens read one by one also 8 x 16.
ONE_BY_ONE = dataclasses.replace(ONE_PASS, widths=(64, 16), passes=2, one_pass=False)
SHAPES = PromptShapes(ONE_PASS, ONE_BY_ONE)


def part(index, prompt, answer=0, key=None, whole=None):
    """Returns a prefill of a prompt and an answer with these numbers of distinct tokens.

    By default they attend in one pass.
    """
    tokens = list(range(1000 * index, 1000 * index + prompt + answer))
    request = Request(
        index=index,
        prompt=tokens[:prompt],
        seed=0,
        copy=0,
        max_new_tokens=1,
        max_length=prompt + answer + 1,
        meter=Meter(rows=1),
        sampling=Sampling(),
    )
    whole = len(tokens) if whole is None else whole
    return Prefill(request, tokens[:prompt], tokens[prompt:], whole, key)


def reading(*parts, takes_turns):
    state = PrefillQueue(SHAPES, takes_turns=takes_turns)
    for lane, each in enumerate(parts):
        state.add(lane, each)
    return state


def run(state):
    """Runs a program; returns whether it has prompts, its width and its lanes."""
    batch = state.next_batch()
    state.advance(batch)
    return batch.prompt, batch.shape.width, sorted(batch.tokens)


def test_prompts_come_before_answers():
    """Wide chunks come first, so that last parts share narrow programs; then answers."""
    state = reading(part(0, 150), part(1, 20), part(2, 70, answer=10), takes_turns=False)
    programs, complete = [], {}
    while not complete:
        programs.append(run(state))
        complete = state.take_complete()
    assert programs == [
        (True, 64, [0, 2]),
        (True, 64, [0]),
        (True, 32, [0, 1, 2]),
        (False, 32, [2]),
    ]
    assert complete == {0: 0, 1: 1, 2: 2}
    assert not state.items
    assert state.next_batch() is None


def test_oldest_and_shortest_prompt_alternate():
    state = reading(part(0, 300), part(1, 20), part(2, 20, answer=40), takes_turns=True)
    found = [(run(state), state.take_complete()) for _ in range(4)]
    assert found == [
        ((True, 64, [0]), {}),
        ((True, 32, [1, 2]), {1: 1}),
        ((True, 64, [0]), {}),
        ((False, 64, [2]), {2: 2}),
    ]
    state.add(1, part(3, 70))
    state.add(2, part(4, 10))
    assert [run(state) for _ in range(4)] == [
        (True, 64, [0, 1]),
        (True, 32, [1, 2]),  # prompts of 6 and of 10 tokens
        (True, 64, [0]),
        (True, 64, [0]),
    ]


def narrow_queue(*parts, tokens=64):
    """A queue whose programs have a single long chunk, or two short ones."""
    shapes = dataclasses.replace(ONE_PASS, tokens=tokens)
    state = PrefillQueue(PromptShapes(shapes, shapes), takes_turns=True)
    for lane, each in enumerate(parts):
        state.add(lane, each)
    return state


def test_short_prompt_alternates_with_the_oldest():
    state = narrow_queue(part(0, 300), part(1, 300), part(2, 150))
    lanes = [run(state)[2] for _ in range(10)]
    assert lanes == [[0], [2], [0], [2], [0], [2], [0], [0], [1], [1]]


def test_long_prompt_is_not_starved():
    """A short prompt arrives for every program and fills it."""
    state, ended = narrow_queue(part(0, 640)), []
    for lane in range(1, 20):
        state.add(lane, part(lane, 64))
        run(state)
        ended += state.take_complete()
    assert ended.index(0) == 8  # after eight short ones, because its last chunk is as short


def test_prefill_follows_priority():
    later, first, urgent = part(0, 64), part(1, 128), part(2, 192)
    for item, priority in ((later, 1), (first, 0), (urgent, -1)):
        item.request.priority = priority
    state = narrow_queue(later, first, urgent)
    assert [run(state)[2] for _ in range(6)] == [[2]] * 3 + [[1]] * 2 + [[0]]


def test_program_above_limit_stays_next():
    state = reading(*(part(index, 64) for index in range(4)), takes_turns=True)
    assert state.next_batch(63) is None
    assert len(state.next_batch(255).tokens) == 1  # not the program of four
    assert len(state.next_batch(256).tokens) == 4


def test_tokens_run_in_order_and_end_their_prompts():
    one = part(3, 70, answer=10)
    state, seen, ended = reading(one, takes_turns=True), [], []
    while batch := state.next_batch():
        state.advance(batch)
        seen += batch.tokens[0].tolist()
        ended.append(batch.ends_prompt)
        assert batch.tokens[0].dtype == np.int32
    assert seen == one.prompt + one.answer
    assert ended == [[], [0], []]


@pytest.mark.parametrize("takes_turns", [False, True])
def test_one_pass_tokens_run_alone(takes_turns):
    """An answer after a one-pass prompt runs token by token; a part of 16 runs narrower."""
    given = part(0, 90, whole=70), part(1, 50, answer=20, whole=50), part(2, 80, whole=0)
    state, seen, found = reading(*given, takes_turns=takes_turns), {}, []
    while batch := state.next_batch():
        state.advance(batch)
        for lane, tokens in batch.tokens.items():
            own, done = given[lane], len(seen.setdefault(lane, []))
            assert (done < own.whole) == batch.shape.one_pass
            assert done + len(tokens) <= own.whole or not batch.shape.one_pass
            seen[lane] += tokens.tolist()
            assert (lane in batch.ends_prompt) == (len(seen[lane]) == len(own.prompt))
        found.append((batch.prompt, batch.shape.one_pass, batch.shape.width, [*batch.tokens]))
    assert [seen[lane] for lane in range(3)] == [each.prompt + each.answer for each in given]
    if not takes_turns:
        assert found == [
            (True, True, 64, [0, 1]),
            (True, True, 32, [0]),
            (True, False, 64, [2]),
            (True, False, 16, [0, 2]),
            (True, False, 16, [0]),
            (False, False, 16, [1]),
            (False, False, 16, [1]),
        ]


@pytest.mark.parametrize("takes_turns", [False, True])
def test_shared_prompt_is_prefilled_once(takes_turns):
    state = PrefillQueue(SHAPES, takes_turns=takes_turns)
    assert state.add(4, part(0, 70, key="a"))
    run(state)
    assert not state.add(2, part(1, 70, key="a"))
    assert state.add(3, part(2, 70, key="b"))
    assert state.add(5, part(3, 70))  # shares nothing
    assert state.take_complete() == {}
    complete = {}
    while batch := state.next_batch():
        assert 2 not in batch.tokens
        state.advance(batch)
        complete |= state.take_complete()
    assert complete == {4: 4, 2: 4, 3: 3, 5: 5}


def test_sharers_spare_cancelled_prompt():
    shared = [part(index, 70, key="a") for index in range(3)]
    state = reading(*shared, part(3, 70), takes_turns=True)
    assert state.spared(set()) == set()
    assert state.spared({3, 9}) == set()  # no request waits for it; it is not in the queue
    assert state.spared({1}) == set()
    assert state.spared({0, 1, 3}) == {0}
    assert state.spared({0, 1, 2}) == set()
    # The last waiting request has left its lane.
    state.drop_departed({0: shared[0].request, 1: shared[1].request, 2: part(7, 1).request})
    assert list(state.items) == [0, 1]
    assert state.spared({0, 1}) == set()
