"""Cancelled requests end before the next chunk; `test_arrivals_at_random` checks the others."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Update
from dms_jax.generation.engine import Source
from dms_jax.generation.reservation import Reservation
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    requests_of,
    serve_arrivals,
)
from tests.generation.test_streaming import Listener

pytestmark = pytest.mark.usefixtures("fakes")
CHUNK, WIDTH = SHAPE["chunk"], SHAPE["prefill_chunk"]


class Cancel(Listener):
    """Cancels some requests at the update of another, and keeps all updates."""

    def __init__(self, engine: Engine, count: int, at: int, indices, *, nth: int = 1):
        super().__init__(count)
        self.engine, self.at, self.indices, self.nth = engine, at, indices, nth

    def __call__(self, update: Update) -> None:
        super().__call__(update)
        if update.index == self.at and len(self.updates[self.at]) == self.nth:
            self.engine.cancel(self.indices)


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_cancel_running_and_queued_requests(name):
    """Four prompts over two lanes: the second runs and the third waits when the first reports."""
    engine, given = host_engine(name), prompts()
    listener = Cancel(engine, 4, at=0, indices=[1, 2], nth=2)
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    first, one, never, last = completions
    assert [each.finish_reason for each in (one, never)] == ["cancelled"] * 2
    answer(given[0], name=name).check(first)
    answer(given[3], name=name).check(last)
    # The prompt's token and one chunk, as if no more had been requested.
    short = dataclasses.replace(GREEDY, max_new_tokens=1 + CHUNK)
    want = answer(given[1], short, name)
    dataclasses.replace(want, finish_reason="cancelled").check(one)
    assert (never.tokens, never.text, never.logprobs) == ([], "", [])
    assert (never.usage.kv_reads, never.usage.peak_tokens, never.usage.cache_bytes) == (0, 0, 0)


def test_cancel_waits_for_first_token_in_flight(monkeypatch):
    """Another thread cancels while the token is in flight after collected steps."""
    engine, sampling = host_engine(), dataclasses.replace(GREEDY, max_new_tokens=30)
    requests = requests_of(prompts((5, 9)), sampling)
    listener, trim = Listener(2), Reservation.trim

    def cancelled(runner):
        if engine._call.in_flight.drawn and requests[0].generated:
            engine.cancel([1])
        trim(runner)

    monkeypatch.setattr(Reservation, "trim", cancelled)
    monkeypatch.setattr(Reservation, "fits_table", lambda *_: False)  # which collects the steps
    serve_arrivals(engine, [requests[:1], [], requests[1:]], listener)
    first, one = requests
    answer(first.prompt, sampling).check(first)
    assert one.finish_reason == "cancelled"
    assert one.generated == [token for each in listener.updates[1] for token in each.tokens]
    count = len(one.generated)
    want = answer(one.prompt, dataclasses.replace(sampling, max_new_tokens=count))
    dataclasses.replace(want, finish_reason="cancelled").check(one)
    assert one.usage is not None
    assert one.usage.prefilled_tokens == len(one.prompt)


def test_cancel_takes_effect_before_next_chunk():
    """No chunk runs for a request that is cancelled at its first token."""
    engine, given = host_engine(), prompts()
    listener = Cancel(engine, 4, at=0, indices=range(4))
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    assert [len(completion.tokens) for completion in completions] == [1, 1, 0, 0]
    assert {completion.finish_reason for completion in completions} == {"cancelled"}
    # The next call is not affected.
    assert engine.generate(given, sampling=GREEDY)[0].finish_reason == "length"


def test_cancel_refuses_invalid_index():
    with pytest.raises(ConfigError, match="cancel: index"):
        host_engine().cancel([-1])


def test_cancel_while_steps_run_takes_effect_before_next_chunk():
    """Half of a chunk is in flight when the request is cancelled."""
    engine = host_engine()
    (request,) = requests_of(prompts((5,)), GREEDY)
    coming, running_on = [[request]], []

    def incoming(wait):
        if coming:
            return coming.pop()
        if request.generated:
            running_on.append(bool(engine.runner.reservation.steps_in_flight.any()))
            engine.cancel([0])
        return None

    engine.serve(Source([], GREEDY, on_tokens=lambda update: None, incoming=incoming))
    assert running_on[0]
    assert request.finish_reason == "cancelled"
    assert request.generated == answer(request.prompt).tokens[: 1 + CHUNK]


def cancelled_while_it_is_read(engine, prompts, *indices, listens=True):
    """Serves prompts together; cancels some after their first prefill chunk."""
    requests = requests_of(prompts, GREEDY, copies=True)
    coming = [requests]

    def incoming(wait):
        if coming:
            return coming.pop()
        if engine.runner.seen.any():
            engine.cancel(indices)
        return None

    told = []
    engine.serve(Source([], GREEDY, on_tokens=told.append if listens else None, incoming=incoming))
    ended = range(len(prompts)) if listens else ()
    assert sorted(each.index for each in told if each.finished) == list(ended)
    return requests


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_cancel_stops_prefill(name):
    long, other = cancelled_while_it_is_read(host_engine(name), prompts((30, 13)), 0)
    assert (long.finish_reason, long.generated) == ("cancelled", [])
    assert long.usage.prefilled_tokens == long.usage.live_tokens == WIDTH
    assert long.usage.compression_ratio == 1  # of the prefilled part; the window evicts nothing yet
    answer(other.prompt, GREEDY, name).check(other)


def test_cancelled_prompt_is_completed_for_its_sharer():
    (prompt,) = prompts((30,))
    first, second = cancelled_while_it_is_read(host_engine("evicts"), [prompt, prompt], 0)
    assert first.finish_reason == "cancelled"
    assert first.usage.prefilled_tokens == len(prompt)
    answer(second.prompt, GREEDY, "evicts").check(second)


@pytest.mark.parametrize("listens", [True, False])
def test_cancel_of_all_sharers_stops_prefill(listens):
    """As when a client that requested several answers disconnects."""
    engine, (prompt, after) = host_engine("evicts"), prompts((30, 13))
    for request in cancelled_while_it_is_read(engine, [prompt, prompt], 0, 1, listens=listens):
        assert (request.finish_reason, request.generated) == ("cancelled", [])
        assert request.usage.prefilled_tokens <= WIDTH
        assert request.usage.compression_ratio == 1  # of the prefilled part
    answer(after, name="evicts").check(*engine.generate([after], sampling=GREEDY))
