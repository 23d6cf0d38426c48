"""A second Ctrl-C at every line of the cleanup after the first: later answers are correct.

CPython handles signals after calls and at the end of loop iterations. These tests raise more often:
at every line of this library that runs while an interrupt propagates, except lines that release a
lock, where no signal can arrive before they have run. Nightly tests interrupt at every line, the
gate at every few.
"""

import dataclasses
import itertools
import linecache
import sys
from pathlib import Path

import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation import Completion, Engine
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    MECHANISMS,
    ROWS_OF,
    SHAPE,
    host_engine,
    model_for,
    prompts,
)

LIBRARY = str(Path(dms_jax.__file__).parent)
SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
# With the programs of engines of that shape.
TALK = dict(max_tokens=64, branches=1, page_size=16, chunk=8, prefill_chunk=8)
fakes = pytest.mark.usefixtures("fakes")
every_few_lines = pytest.mark.parametrize(
    "step", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["some lines", "every line"]
)


class Strike:
    """Raises KeyboardInterrupt at the n-th distinct line of the library from now on."""

    def __init__(self, nth: int):
        self.nth, self.before = nth, sys.gettrace()
        self.lines: set[tuple[str, int]] = set()

    def arm(self) -> None:
        """Starts counting, also in running frames."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(LIBRARY):
                frame.f_trace = self
            frame = frame.f_back
        sys.settrace(self)

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "unless_busy(" not in linecache.getline(*place):
            self.lines.add(place)
            if len(self.lines) == self.nth:
                sys.settrace(self.before)
                raise KeyboardInterrupt("the second")
        return self

    def disarm(self) -> bool:
        """Stops counting; returns whether the interrupt was raised."""
        sys.settrace(self.before)
        return len(self.lines) >= self.nth


def interrupted(call, nth: int) -> bool:
    """Interrupts a call at its second update, and its cleanup at the n-th line.

    Returns whether the cleanup has that many lines.
    """
    strike, updates = Strike(nth), []

    def interrupt(update):
        updates.append(update)
        if len(updates) == 2:
            strike.arm()
            raise KeyboardInterrupt("the first")

    try:
        with pytest.raises(KeyboardInterrupt):
            call(interrupt)
    finally:
        struck = strike.disarm()
    return struck


def same(left: Completion, right: Completion) -> bool:
    """Whether tokens and usage are equal; different prompts may have equal answers."""
    usages = [(usage.kv_reads, usage.live_tokens) for usage in (left.usage, right.usage)]
    return left.tokens == right.tokens and usages[0] == pytest.approx(usages[1])


def model():
    return model_for("vanilla", ends=False)


def struck_while_it_cleans_up(engine, lines):
    """Makes calls whose cleanup is interrupted at each of some lines; returns the last line."""
    given = prompts((5, 9, 13))
    expected = engine.generate(given, sampling=SHORT)
    for nth in lines:
        struck = interrupted(
            lambda listen: engine.generate(given, sampling=SHORT, on_tokens=listen), nth
        )
        assert engine.generate(given, sampling=SHORT) == expected, nth
        assert engine.runner.reservation.allocator.pages_in_use == 0
        if not struck:
            return nth
    raise AssertionError("there was no last line")


@fakes
@every_few_lines
def test_answers_after_interrupted_cleanup(step):
    assert struck_while_it_cleans_up(host_engine("evicts"), itertools.count(1, step)) > 40


@pytest.mark.nightly
def test_kcache_answers_after_interrupted_cleanup():
    """KCache has separate cleanup code."""
    engine = Engine(model(), MECHANISMS["kcache"], max_tokens=64, **SHAPE)
    assert struck_while_it_cleans_up(engine, itertools.count(1, 2)) > 40


@fakes
@every_few_lines
def test_conversation_after_interrupted_cleanup(step, monkeypatch):
    """The interrupt comes before the turn changes the cache, which still equals the history."""
    turns, policy = prompts((9, 4)), ROWS_OF["evicts"]
    undisturbed = dms_jax.Conversation(model(), policy, **TALK)
    expected = [undisturbed.say(turn, sampling=SHORT) for turn in turns]
    for nth in itertools.count(1, step):
        conversation = dms_jax.Conversation(model(), policy, **TALK)
        conversation.say(turns[0], sampling=SHORT)
        strike = Strike(nth)

        def interrupt(*arguments, strike=strike, **options):
            strike.arm()
            raise KeyboardInterrupt("the first")

        with monkeypatch.context() as patch:
            patch.setattr(Runner, "extend", interrupt)
            try:
                with pytest.raises(KeyboardInterrupt):
                    conversation.say([5, 6], sampling=SHORT)
            finally:
                struck = strike.disarm()
        assert conversation.turns == expected[:1]
        assert same(conversation.say(turns[1], sampling=SHORT), expected[1]), nth
        if not struck:
            break
    assert nth > 40


@fakes
@every_few_lines
def test_interrupted_restart_before_next_call(step):
    """The cache counts as valid only after the whole restart."""
    given, engine = prompts((5, 13)), host_engine("evicts")
    expected = engine.generate(given, sampling=SHORT)
    for nth in itertools.count(1, step):
        interrupted(lambda listen: engine.generate(given, sampling=SHORT, on_tokens=listen), 8)
        assert engine.runner.dirty
        strike = Strike(nth)
        restart = engine.runner.restart

        def restart_struck(strike=strike, restart=restart):
            strike.arm()
            try:
                restart()
            finally:
                strike.disarm()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.runner, "restart", restart_struck)
            try:
                first = engine.generate(given, sampling=SHORT)
            except KeyboardInterrupt:
                first = None
        assert first in (None, expected)
        assert engine.generate(given, sampling=SHORT) == expected, nth
        if first is not None:
            break
    assert nth > 25


@fakes
@every_few_lines
def test_turn_is_recorded_atomically(step):
    """Interrupts at the lines that record a turn, after its answer."""
    turns = prompts((9, 4))
    undisturbed = dms_jax.Conversation(model(), **TALK)
    expected = [undisturbed.say(turn, sampling=SHORT) for turn in turns]
    for nth in itertools.count(1, min(step, 4)):
        conversation = dms_jax.Conversation(model(), **TALK)
        strike = Strike(nth)

        def last(update, strike=strike):
            if update.finished:
                strike.arm()

        try:
            conversation.say(turns[0], sampling=SHORT, on_tokens=last)
        except KeyboardInterrupt:
            pass
        finally:
            struck = strike.disarm()
        if not conversation.turns:
            conversation.say(turns[0], sampling=SHORT)
        assert len(conversation.turns) == 1
        assert same(conversation.turns[0], expected[0]), nth
        assert same(conversation.say(turns[1], sampling=SHORT), expected[1]), nth
        if not struck:
            break
    assert nth > 10


@fakes
def test_failed_restart_does_not_hide_first_error(monkeypatch):
    given, engine = prompts((5, 13)), host_engine()
    expected = engine.generate(given, sampling=SHORT)

    def refuse(self):
        self.dirty = True
        raise CapacityError("no room for a cache")

    def interrupt(update):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "restart", refuse)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(given, sampling=SHORT, on_tokens=interrupt)
        with pytest.raises(CapacityError, match="no room for a cache"):
            engine.generate(given, sampling=SHORT)
    assert engine.generate(given, sampling=SHORT) == expected
