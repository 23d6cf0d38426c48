"""Random schedules of arrivals, listeners, cancellations and failures."""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from dms_jax.generation import Engine, Update
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import Request, State
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import answer

# An open stream; closed lists without a listener, and with one of tokens or of ends.
MODES = ("open", "list", "heard", "late")
KEEP_ALL = ("keeps", "might evict")  # rows in which every token stays


class DeviceGoneError(Exception):
    """A program fails."""


@dataclasses.dataclass
class Events:
    """Counts of events.

    Attributes:
      preempted: the index of a request for each of its preemptions.
      released: the number of lanes reassigned while their steps were in flight.
      failures: how many programs failed.
      unread: the indices of requests that were cancelled before their prefill began.
    """

    preempted: list[int] = dataclasses.field(default_factory=list)
    released: int = 0
    failures: int = 0
    unread: set[int] = dataclasses.field(default_factory=set)


def serve_at_random(
    engine: Engine,
    requests: Sequence[Request],
    choose: random.Random,
    *,
    mode: str = "open",
    fails: bool = False,
) -> Events:
    """Serves requests in one of the `MODES` and cancels some; with `fails` a program may fail."""
    events, told = Events(), {each.index: list[Update]() for each in requests}
    ended = list[int]()  # as they were told
    known, share = {each.index: each for each in requests}, choose.choice((0, 0, 0.05, 0.2))
    here = set[int]() if mode == "open" else set(known)
    to_fail = fails and choose.random() < 0.4

    def perhaps_cancel(*, between: bool = True) -> None:
        """Cancels some requests; waiting ones cancelled `between` programs are never read."""
        if choose.random() >= share:
            return
        for each in choose.choices(requests, k=2):
            waits = each.state is State.WAITING and each.finish_reason is None
            waits &= each.index in here  # requests that have not arrived cannot be cancelled
            if between and waits and not (each.generated or each.meter.prefilled):
                events.unread.add(each.index)
            engine.cancel([each.index])

    def hear(update: Update) -> None:
        """The tokens of an update are the newest; a server relies on this for log-probabilities."""
        generated = known[update.index].generated
        assert generated[len(generated) - len(update.tokens) :] == update.tokens
        told[update.index].append(update)
        perhaps_cancel()

    def end(request: Request) -> None:
        assert request.usage is not None
        ended.append(request.index)
        perhaps_cancel()

    def incoming(pending: list[Request]) -> Callable[[bool], list[Request] | None]:
        def poll(wait: bool) -> list[Request] | None:
            perhaps_cancel()
            if not pending:
                return None
            count = choose.randint(1 if wait else 0, min(3, len(pending)))
            came, pending[:count] = pending[:count], []
            here.update(each.index for each in came)
            return came

        return poll

    def preempt(scheduler: Scheduler) -> int:
        """Nothing is preempted while a program in flight may end an answer and make room."""
        assert not scheduler.runner.reservation.steps_in_flight.any()
        assert not engine._call.in_flight.drawn
        running = dict(scheduler.running)
        lane = own_preempt(scheduler)
        events.preempted.append(running[lane].index)
        return lane

    def clear(runner: Runner, lanes: list[int]) -> None:
        events.released += int((runner.reservation.steps_in_flight[lanes] > 0).sum())
        own_clear(runner, lanes)

    def decode(runner: Runner, *given: Any, **more: Any) -> Any:
        nonlocal to_fail
        if to_fail and choose.random() < 0.2:
            to_fail = False
            raise DeviceGoneError
        return own_decode(runner, *given, **more)

    def trim(reservation: Reservation) -> None:
        """Another thread may cancel at any moment, also during admission."""
        perhaps_cancel(between=False)
        own_trim(reservation)

    own_preempt, own_clear = Scheduler.preempt, Runner.clear
    own_decode, own_trim = Runner.decode, Reservation.trim
    with contextlib.ExitStack() as stack:
        for owner, name, double in (
            (Scheduler, "preempt", preempt),
            (Runner, "clear", clear),
            (Runner, "decode", decode),
            (Reservation, "trim", trim),
        ):
            stack.enter_context(mock.patch.object(owner, name, double))
        while left := [each for each in requests if each.finish_reason is None]:
            source = Source(
                [] if mode == "open" else left,
                incoming=incoming(left) if mode == "open" else None,
                on_tokens=hear if mode in ("open", "heard") else None,
                on_end=end if mode == "late" else None,
            )
            try:
                engine.serve(source)
            except DeviceGoneError:
                events.failures += 1
                events.unread.clear()  # the engine has forgotten the pending cancellations
            else:
                assert all(each.finish_reason is not None for each in requests)
    assert sorted(ended) == (sorted(known) if mode == "late" else [])
    for index, updates in told.items() if mode in ("open", "heard") else ():
        assert [token for each in updates for token in each.tokens] == known[index].generated
        assert [each.finished for each in updates] == [False] * (len(updates) - 1) + [True]
        assert "".join(each.text for each in updates) == known[index].text
    assert not engine.runner.reservation.steps_in_flight.any()
    return events


def check_alone(request: Request, name: str, events: Events, ends: tuple[int, ...]) -> None:
    """Compares a request with its answer alone, up to its cancellation."""
    given = dict(copy=request.copy, ends=ends)
    want = functools.partial(answer, request.prompt, request.sampling, name, **given)
    if request.finish_reason != "cancelled":
        want(new_tokens=request.max_new_tokens).check(request)
        return
    if count := len(request.generated):
        expected = dataclasses.replace(want(new_tokens=count), finish_reason="cancelled")
        assert request.usage is not None
        if request.usage.live_tokens < expected.usage["live_tokens"]:
            assert request.slots is not None  # it lost its lane, and prefills again
            assert request.generated == expected.tokens
            return
        expected.check(request)
        return
    usage = request.usage
    assert usage is not None
    assert (request.text, request.logprobs) == ("", [])
    assert (usage.new_tokens, usage.kv_reads) == (0, 0)
    if request.index in events.unread:
        assert (usage.prefilled_tokens, usage.live_tokens, usage.cache_bytes) == (0, 0, 0)
    if name in KEEP_ALL and not events.failures and request.index not in events.preempted:
        assert usage.live_tokens == usage.peak_tokens
        assert usage.live_tokens == usage.prefilled_tokens + usage.cached_tokens
