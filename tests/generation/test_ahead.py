"""The next chunk of steps runs on the device before the last one is read, and changes nothing."""

import dataclasses

import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, compiling, programs
from dms_jax.generation.launched import LANES_AHEAD
from dms_jax.generation.runner import Runner
from dms_jax.generation.shapes import Shape
from tests.generation.support import (
    GREEDY,
    POLICIES,
    SHAPE,
    engine_for,
    model_for,
    prompts,
)
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("two_programs")
TWO = prompts((5, 13))
SIX = prompts((5, 9, 13, 7, 11, 3))


def noted(monkeypatch):
    """Returns a list to which launches and reads of programs of steps are added in order."""
    order, call, read = [], compiling.Program.__call__, Runner.read

    def launched(program, *arguments):
        if program is programs.decode:
            order.append("launch")
        return call(program, *arguments)

    def fetched(runner, chunk):
        order.append("read")
        return read(runner, chunk)

    monkeypatch.setattr(compiling.Program, "__call__", launched)
    monkeypatch.setattr(Runner, "read", fetched)
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", POLICIES)
def test_a_chunk_is_launched_before_the_last_one_is_read(name, monkeypatch):
    """Answers and every figure of usage are those of chunks that run in turn."""
    engine = engine_for(name)
    completions, order = in_order(monkeypatch, engine, TWO)
    assert order == AHEAD
    expected, order = in_order(monkeypatch, engine, TWO, on_tokens=lambda update: None)
    assert order == IN_TURN
    assert completions == expected
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.runner.unread.any()


@pytest.mark.nightly
@pytest.mark.parametrize("name", POLICIES)
def test_prompts_are_launched_before_what_is_left_of_the_last_ones_is_read(name, monkeypatch):
    """Two programs of prompts and the first chunk of steps, whatever a policy evicts."""
    engine, order, call, read = (
        engine_for(name),
        [],
        compiling.Program.__call__,
        Runner.read_lengths,
    )
    expected = engine.generate(TWO, sampling=GREEDY)

    def launched(program, *arguments):
        if program in (programs.extend, programs.decode):
            order.append("prompt" if program is programs.extend else "steps")
        return call(program, *arguments)

    def fetched(runner, *arguments):
        order.append("lengths")
        return read(runner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(compiling.Program, "__call__", launched)
        patch.setattr(Runner, "read_lengths", fetched)
        assert engine.generate(TWO, sampling=GREEDY) == expected
    keeps_all = name in ("vanilla", "quest")
    first = ["prompt", "prompt", *([] if keeps_all else ["lengths"]), "steps"]
    assert order[: len(first)] == first


@pytest.mark.parametrize(
    ("policy", "lengths", "new_tokens", "page_size"),
    [
        (POLICIES["dms"], (5, 13), 20, 16),
        (POLICIES["dms"], (30, 30), 2, 2),
        *further((dms_jax.SnapKV(budget=8, window=4), (30, 30), 2, 2)),
    ],
    ids=["answers take most", "prompts take most", "prompts that are cut take most"],
)
def test_prompts_evict_within_the_pages_that_they_took_in_turn(
    policy, lengths, new_tokens, page_size, monkeypatch
):
    """Peaks do not grow because lengths are read late, and a full pool waits for them."""
    options = dict(max_tokens=64, **SHAPE | dict(page_size=page_size))
    engine = Engine(model_for("vanilla", ends=False), policy, **options)
    given, sampling = prompts(lengths), dataclasses.replace(GREEDY, max_new_tokens=new_tokens)
    runner, extend = engine.runner, Runner.extend
    expected = engine.generate(given, sampling=sampling)

    def in_turn(self, *arguments, **options):
        extended = extend(self, *arguments, **options)
        self.read_prompts()
        return extended

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "extend", in_turn)
        assert engine.generate(given, sampling=sampling) == expected
    most = sum(each.usage.peak_cache_bytes - runner._state_bytes for each in expected)
    whole = runner.allocator._free[0]
    runner.allocator._free[0] = whole[len(whole) - most // runner.page_bytes :]
    try:
        assert engine.generate(given, sampling=sampling) == expected
    finally:
        runner.allocator._free[0] = whole


def test_a_lane_that_is_cleared_forgets_the_prompt_that_was_launched_for_it(monkeypatch):
    """It is not waited for, and the lengths that its program returns later are nobody's."""
    runner, given = Engine(model_for("dms", ends=False), max_tokens=64, **SHAPE).runner, [0, 1]
    waited, read = [], Runner.read_lengths

    def fetched(runner, *arguments):
        waited.append(True)
        read(runner, *arguments)

    monkeypatch.setattr(Runner, "read_lengths", fetched)
    with runner.working():
        runner.reserve(np.array([8, 5]), prompt=True)
        tokens = {lane: np.asarray(prompts((8, 5))[lane], np.int32) for lane in given}
        shape = Shape(8, entries=2, places=None, one_pass=True)
        runner.extend(tokens, shape=shape, prompt=True, ends_prompt=given)
        runner.clear([0])
        assert runner.slots_held().max((0, 2)).tolist() == [0, 5]
        assert not runner.lengths_of(0).any()
        assert not waited
        assert set(runner.lengths_of(1).flat) == {5}  # the window evicts nothing yet
        assert waited
        assert runner.lengths.max((0, 2)).tolist() == [0, 5]
        runner.clear([1])
    assert runner.allocator.pages_in_use == 0


def test_lanes_are_refilled_before_the_next_chunk(monkeypatch):
    """While a request waits for a lane, an answer that ended is read at once."""
    engine = engine_for("dms")
    given = prompts()
    completions, order = in_order(monkeypatch, engine, given)
    assert order == REFILLED + AHEAD
    assert completions == engine.generate(given, sampling=GREEDY, on_tokens=lambda update: None)


def ending_with(tokens: tuple[int, ...], lanes: int) -> Engine:
    model = model_for("dms", ends=False)
    defaults = dataclasses.replace(model.generation, eos_token_ids=tokens)
    model = dataclasses.replace(model, generation=defaults)
    return Engine(model, max_tokens=64, **SHAPE | dict(num_lanes=lanes))


@pytest.mark.nightly
def test_answers_that_end_at_a_token(monkeypatch):
    """Some end within a chunk behind which another one runs; with few of them left none is."""
    plain = engine_for("dms").generate(SIX, sampling=GREEDY)
    common = [token for answer in plain for token in set(answer.tokens[2:8])]
    end = max(set(common), key=common.count)
    engine = ending_with((end,), len(SIX))
    completions, order = in_order(monkeypatch, engine, SIX)
    ended = [each.tokens for each in completions if each.finish_reason == "end"]
    assert 1 < len(ended) < len(SIX)
    assert order[:5] == AHEAD[:5]
    expected, in_turn = in_order(monkeypatch, engine, SIX, on_tokens=lambda update: None)
    assert completions == expected
    assert len(order) == len(in_turn)
    assert engine.runner.allocator.pages_in_use == 0
    few, order = in_order(monkeypatch, engine, SIX[: LANES_AHEAD - 1])
    assert [each.tokens for each in few] == [each.tokens for each in expected[: len(few)]]
    assert order[:4] == IN_TURN[:4]
    assert "launch launch launch" not in " ".join(order)


@pytest.mark.nightly
def test_answers_that_all_end_at_once(monkeypatch):
    """The chunk behind them runs for nobody, and is waited for."""
    same = [TWO[0]] * LANES_AHEAD
    (answer,) = engine_for("dms").generate(same[:1], sampling=GREEDY)
    engine = ending_with((answer.tokens[5],), LANES_AHEAD)
    completions, order = in_order(monkeypatch, engine, same)
    assert order == spelled("LLLL RRRR")
    assert completions == engine.generate(same, sampling=GREEDY, on_tokens=lambda update: None)
    assert not engine.runner.unread.any()
    assert engine.generate(same, sampling=GREEDY) == completions


@pytest.mark.parametrize("name", ["vanilla", "dms"])
def test_a_pool_without_room_for_two_chunks(name, monkeypatch):
    """Lengths are read before a request is put back: it is the same one, as often, as in turn."""
    engine = engine_for(name)
    expected = engine.generate(TWO, sampling=GREEDY)
    runner, whole = engine.runner, engine.runner.allocator._free[0]
    most = sum(each.usage.peak_cache_bytes - runner._state_bytes for each in expected)
    orders, prefilled = [], []
    for missing in (0, 4, 12):
        runner.allocator._free[0] = whole[len(whole) + missing - most // runner.page_bytes :]
        try:
            completions, order = in_order(monkeypatch, engine, TWO)
            in_turn = engine.generate(TWO, sampling=GREEDY, on_tokens=lambda update: None)
        finally:
            runner.allocator._free[0] = whole
        assert completions == in_turn
        assert [each.tokens for each in completions] == [each.tokens for each in expected]
        orders.append(order)
        prefilled.append(sum(each.usage.prefilled_tokens for each in completions))
    assert AHEAD not in orders[1:]
    assert prefilled[-1] > prefilled[0] or name == "dms"


@pytest.mark.nightly
def test_values_in_host_memory_are_written_between_chunks(monkeypatch):
    policy = dms_jax.KCache(top=4, first_layers=1)
    engine = Engine(model_for("vanilla", ends=False), policy, max_tokens=64, **SHAPE)
    _, order = in_order(monkeypatch, engine, TWO)
    assert order == spelled("LR LR LR")
    _, order = in_order(monkeypatch, engine, SIX)  # of which four wait
    assert order == spelled("LR LR LR" * 3)


def test_a_wider_program_waits_for_the_lengths(monkeypatch):
    """The page table would be wider if nothing were evicted, and so compiled anew."""
    engine = engine_for("dms")
    monkeypatch.setattr(type(engine.runner), "fits_table", lambda *_: False)
    _, order = in_order(monkeypatch, engine, TWO)
    assert order == IN_TURN


def test_page_tables_are_as_wide_from_the_first_program_as_a_whole_chunk_needs(monkeypatch):
    """12 tokens and a chunk of 8 take more than the narrowest 16 pages, whatever its programs."""
    engine = Engine(model_for("vanilla", ends=False), max_tokens=64, **SHAPE | dict(page_size=1))
    widths, call = [], compiling.Program.__call__

    def launched(program, *arguments):
        if program in (programs.extend, programs.decode):
            widths.append(arguments[3].shape[-1])
        return call(program, *arguments)

    monkeypatch.setattr(compiling.Program, "__call__", launched)
    engine.generate(prompts((12,)), sampling=GREEDY)
    assert set(widths) == {64}


def test_a_cancellation_waits_for_the_chunk_that_was_launched(monkeypatch):
    """It comes from elsewhere, while two chunks are on the device."""
    engine = engine_for("dms")
    expected = engine.generate(TWO, sampling=GREEDY)
    read = Runner.read

    def cancelled(runner, launched):
        engine.cancel([0])
        return read(runner, launched)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "read", cancelled)
        completions, order = in_order(patch, engine, TWO)
    assert order == spelled("LLLL RRRR L R")
    assert completions[0].finish_reason == "cancelled"
    assert completions[0].tokens == expected[0].tokens[:17]  # the first one, and two chunks
    assert completions[1].tokens == expected[1].tokens
    assert engine.runner.allocator.pages_in_use == 0
    assert engine.generate(TWO, sampling=GREEDY) == expected
