"""The next programs are launched before the last ones are read, and that changes nothing."""

import dataclasses
import functools

import numpy as np
import pytest

from dms_jax.generation import programs
from dms_jax.generation.in_flight import LANES_AHEAD
from dms_jax.generation.prefill import PrefillBatch, Shape
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    answer,
    host_engine,
    prompts,
    squeezed,
    story_tokens,
)
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
TWO = prompts((5, 13))
SIX = prompts((5, 9, 13, 7, 11, 3))


def noted(monkeypatch):
    """Returns a list to which launches and reads of programs of steps are added in order."""
    order, call, read = [], programs.Program.__call__, Runner.collect

    def launched(program, *arguments):
        if program is programs.decode:
            order.append("launch")
        return call(program, *arguments)

    def fetched(runner, chunk):
        order.append("read")
        return read(runner, chunk)

    monkeypatch.setattr(programs.Program, "__call__", launched)
    monkeypatch.setattr(Runner, "collect", fetched)
    return order


def in_order(monkeypatch, engine, given, **options):
    """Returns the completions of a call, and the order in which chunks were launched and read."""
    with monkeypatch.context() as patch:
        order = noted(patch)
        completions = engine.generate(given, sampling=GREEDY, **options)
    return completions, order


def spelled(order: str) -> list[str]:
    return [{"L": "launch", "R": "read"}[letter] for letter in order.replace(" ", "")]


# Answers of 20 tokens: chunks of 8 steps in two programs, and of the last 3 in one.
AHEAD = spelled("LL LL RR L RR R")
IN_TURN = spelled("LL RR LL RR L R")
# While others wait the last program of a chunk runs on, unless answers end with it.
REFILLED = spelled("LL R LL R R L R R")


@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded", "cuts"])
def test_a_chunk_is_launched_before_the_last_one_is_read(name, monkeypatch):
    """Answers and every figure of usage are those of chunks that run in turn."""
    engine = host_engine(name)
    completions, order = in_order(monkeypatch, engine, TWO)
    assert order == AHEAD
    expected, order = in_order(monkeypatch, engine, TWO, on_tokens=lambda update: None)
    assert order == IN_TURN
    assert completions == expected
    for prompt, one in zip(TWO, completions, strict=True):
        answer(prompt, name=name).check(one)


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_prompts_are_launched_before_what_is_left_of_the_last_ones_is_read(name, monkeypatch):
    """Two programs of prompts and the first chunk of steps, whatever a policy evicts."""
    engine, order, call, read = (
        host_engine(name),
        [],
        programs.Program.__call__,
        Reservation._set_lengths,
    )

    def launched(program, *arguments):
        if program in (programs.extend, programs.decode):
            order.append("prompt" if program is programs.extend else "steps")
        return call(program, *arguments)

    def fetched(runner, *arguments):
        order.append("lengths")
        return read(runner, *arguments)

    monkeypatch.setattr(programs.Program, "__call__", launched)
    monkeypatch.setattr(Reservation, "_set_lengths", fetched)
    engine.generate(TWO, sampling=GREEDY)
    first = ["prompt", "prompt", *([] if name == "keeps" else ["lengths"]), "steps"]
    assert order[: len(first)] == first


@pytest.mark.parametrize(
    ("name", "lengths", "new_tokens", "page_size"),
    [("evicts", (5, 13), 20, 16), ("evicts", (30, 30), 2, 2), ("cuts", (30, 30), 2, 2)],
    ids=["answers take most", "prompts take most", "prompts that are cut take most"],
)
def test_prompts_evict_within_the_pages_that_they_took_in_turn(
    name, lengths, new_tokens, page_size, monkeypatch
):
    """Peaks do not grow because lengths are read late, and a full pool waits for them."""
    engine = host_engine(name, page_size=page_size)
    given, sampling = prompts(lengths), dataclasses.replace(GREEDY, max_new_tokens=new_tokens)
    runner, extend = engine.runner, Runner.extend
    expected = engine.generate(given, sampling=sampling)

    def in_turn(self, *arguments, **options):
        extended = extend(self, *arguments, **options)
        self.reservation.collect_prompts()
        return extended

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "extend", in_turn)
        assert engine.generate(given, sampling=sampling) == expected
    most = sum(each.usage.peak_cache_bytes - runner.reservation._state_bytes for each in expected)
    with squeezed(engine, most // runner.page_bytes):
        assert engine.generate(given, sampling=sampling) == expected


def test_a_lane_that_is_cleared_forgets_the_prompt_that_was_launched_for_it(monkeypatch):
    """It is not waited for, and the lengths that its program returns later are nobody's."""
    runner, given = host_engine("evicts").runner, [0, 1]
    waited, read = [], Reservation._set_lengths

    def fetched(runner, *arguments):
        waited.append(True)
        read(runner, *arguments)

    monkeypatch.setattr(Reservation, "_set_lengths", fetched)
    runner.recover()
    with runner.working():
        runner.reservation.reserve(np.array([8, 5]), prompt=True)
        tokens = {lane: np.asarray(prompts((8, 5))[lane], np.int32) for lane in given}
        shape = Shape(8, entries=2, places=None, one_pass=True)
        runner.extend(PrefillBatch(tokens, shape, True, given))
        runner.clear([0])
        assert runner.reservation.slots_held().max((0, 2)).tolist() == [0, 5]
        assert not runner.reservation.lengths_of(0).any()
        assert not waited
        assert set(runner.reservation.lengths_of(1).flat) == {5}  # the window evicts nothing yet
        assert waited
        assert runner.reservation.lengths.max((0, 2)).tolist() == [0, 5]
        runner.clear([1])


def test_lanes_are_refilled_before_the_next_chunk(monkeypatch):
    """While a request waits for a lane, an answer that ended is read at once."""
    engine, given = host_engine("evicts"), prompts()
    completions, order = in_order(monkeypatch, engine, given)
    assert order == REFILLED + AHEAD
    assert completions == engine.generate(given, sampling=GREEDY, on_tokens=lambda update: None)


@functools.cache
def ending(name: str, least: int, most: int, reason: str = "end") -> list[list[int]]:
    """Returns prompts whose answers end with the `least`-th to `most`-th token."""
    text = story_tokens()
    starts = [text[at : at + 5] for at in range(100)]
    found = [answer(each, name=name, ends=ENDS) for each in starts]
    return [
        prompt
        for prompt, each in zip(starts, found, strict=True)
        if each.finish_reason == reason and least <= len(each.tokens) <= most
    ]


def test_answers_that_end_at_a_token(monkeypatch):
    """Some end within a chunk behind which another one runs; with few of them left none is."""
    engine = host_engine("evicts", LANES_AHEAD, ends=ENDS)
    given = [
        *ending("evicts", 3, 8)[:1],
        *ending("evicts", 12, 17)[:1],
        *ending("evicts", 20, 20, "length")[:2],
    ]
    completions, order = in_order(monkeypatch, engine, given)
    for prompt, one in zip(given, completions, strict=True):
        answer(prompt, name="evicts", ends=ENDS).check(one)
    assert len({each.finish_reason for each in completions}) == 2
    assert order[:5] == AHEAD[:5]
    expected, in_turn = in_order(monkeypatch, engine, given, on_tokens=lambda update: None)
    assert completions == expected
    assert len(order) == len(in_turn)
    few, order = in_order(monkeypatch, engine, given[1:])
    assert [each.tokens for each in few] == [each.tokens for each in expected[1:]]
    assert order[:4] == IN_TURN[:4]
    assert "launch launch launch" not in " ".join(order)


def test_answers_that_all_end_at_once(monkeypatch):
    """The chunk behind them runs for nobody, and is waited for."""
    same = ending("keeps", 5, 9)[:1] * LANES_AHEAD
    engine = host_engine("keeps", LANES_AHEAD, ends=ENDS)
    completions, order = in_order(monkeypatch, engine, same)
    assert order == spelled("LLLL RRRR")
    assert completions == engine.generate(same, sampling=GREEDY, on_tokens=lambda update: None)
    assert not engine.runner.reservation.steps_in_flight.any()
    assert engine.generate(same, sampling=GREEDY) == completions
    for one in completions:
        answer(same[0], ends=ENDS).check(one)


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_a_pool_without_room_for_two_chunks(name, monkeypatch):
    """Lengths are read before a request is put back: it is the same one, as often, as in turn."""
    engine = host_engine(name)
    expected = engine.generate(TWO, sampling=GREEDY)
    runner = engine.runner
    most = sum(each.usage.peak_cache_bytes - runner.reservation._state_bytes for each in expected)
    orders, prefilled = [], []
    for missing in (0, 4, 12):
        with squeezed(engine, most // runner.page_bytes - missing):
            completions, order = in_order(monkeypatch, engine, TWO)
            in_turn = engine.generate(TWO, sampling=GREEDY, on_tokens=lambda update: None)
        assert completions == in_turn
        for prompt, one in zip(TWO, completions, strict=True):
            answer(prompt, name=name).check(one)
        orders.append(order)
        prefilled.append(sum(each.usage.prefilled_tokens for each in completions))
    assert AHEAD not in orders[1:]
    assert prefilled[-1] > prefilled[0] or name == "evicts"


def test_a_wider_program_waits_for_the_lengths(monkeypatch):
    """The page table would be wider if nothing were evicted, and so compiled anew."""
    engine = host_engine("evicts")
    monkeypatch.setattr(Reservation, "fits_table", lambda *_: False)
    _, order = in_order(monkeypatch, engine, TWO)
    assert order == IN_TURN


def test_page_tables_are_as_wide_from_the_first_program_as_a_whole_chunk_needs(monkeypatch):
    """12 tokens and a chunk of 8 take more than the narrowest 16 pages, whatever its programs."""
    engine = host_engine(page_size=1)
    widths, call = [], programs.Program.__call__

    def launched(program, *arguments):
        if program in (programs.extend, programs.decode):
            widths.append(arguments[3].shape[-1])
        return call(program, *arguments)

    monkeypatch.setattr(programs.Program, "__call__", launched)
    engine.generate(prompts((12,)), sampling=GREEDY)
    assert set(widths) == {64}


def test_a_cancellation_waits_for_the_chunk_that_was_launched(monkeypatch):
    """It comes from elsewhere, while two chunks are on the device."""
    engine, read = host_engine("evicts"), Runner.collect

    def cancelled(runner, launched):
        engine.cancel([0])
        return read(runner, launched)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "collect", cancelled)
        (one, other), order = in_order(patch, engine, TWO)
    assert order == spelled("LLLL RRRR L R")
    assert one.finish_reason == "cancelled"
    assert one.tokens == answer(TWO[0], name="evicts").tokens[:17]  # the first, and two chunks
    answer(TWO[1], name="evicts").check(other)
    again = engine.generate(TWO, sampling=GREEDY)
    assert [each.finish_reason for each in again] == ["length"] * 2
