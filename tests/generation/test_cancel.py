"""Requests that are cancelled end before the next chunk, and the others are as without them."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Update
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
CHUNK = SHAPE["chunk"]


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
def test_running_and_waiting_requests_end(name):
    """Four prompts over two lanes: the second runs and the third waits when the first reports."""
    engine, given = host_engine(name), prompts()
    listener = Cancel(engine, 4, at=0, indices=[1, 2], nth=2)
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    first, one, never, last = completions
    assert [each.finish_reason for each in (one, never)] == ["cancelled"] * 2
    answer(given[0], name=name).check(first)
    answer(given[3], name=name).check(last)
    # The prompt's token and one chunk: as if no more had been asked for.
    short = dataclasses.replace(GREEDY, max_new_tokens=1 + CHUNK)
    want = answer(given[1], short, name)
    dataclasses.replace(want, finish_reason="cancelled").check(one)
    assert (never.tokens, never.text, never.logprobs) == ([], "", [])
    assert (never.usage.kv_reads, never.usage.peak_tokens, never.usage.cache_bytes) == (0, 0, 0)


def test_a_request_that_came_ends_though_steps_run_on():
    """While others may come the last program of a chunk is not waited for; for these ends it is."""
    engine = host_engine()
    requests = requests_of(prompts((5, 9)), dataclasses.replace(GREEDY, max_new_tokens=50))
    serve_arrivals(engine, [requests], Cancel(engine, 2, at=1, indices=[0]))
    assert requests[0].finish_reason == "cancelled"
    assert len(requests[0].generated) <= 1 + 2 * CHUNK
    answer(requests[1].prompt, requests[1].sampling).check(requests[1])


def test_a_request_whose_first_token_was_not_read_is_not_ended_without_it(monkeypatch):
    """Another thread cancels it as steps that ran on have been read, behind which it was drawn."""
    engine, sampling = host_engine(), dataclasses.replace(GREEDY, max_new_tokens=30)
    requests = requests_of(prompts((5, 9)), sampling)
    listener, trim = Listener(2), Reservation.trim

    def cancelled(runner):
        if engine._call.in_flight.drawn and requests[0].generated:
            engine.cancel([1])
        trim(runner)

    monkeypatch.setattr(Reservation, "trim", cancelled)
    monkeypatch.setattr(Reservation, "fits_table", lambda *_: False)  # which has the steps read
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


def test_it_takes_effect_before_the_next_chunk():
    """After the tokens that the prompts gave, no chunk runs for what is cancelled."""
    engine, given = host_engine(), prompts()
    listener = Cancel(engine, 4, at=0, indices=range(4))
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    assert [len(completion.tokens) for completion in completions] == [1, 1, 0, 0]
    assert {completion.finish_reason for completion in completions} == {"cancelled"}
    # The next call is not touched.
    assert engine.generate(given, sampling=GREEDY)[0].finish_reason == "length"


def test_a_request_that_ends_by_itself_ends_so():
    engine, given = host_engine(), prompts((5, 13))
    short = dataclasses.replace(GREEDY, max_new_tokens=1 + CHUNK)
    listener = Cancel(engine, 2, at=1, indices=[0, 1, 7], nth=2)
    for prompt, one in zip(
        given, engine.generate(given, sampling=short, on_tokens=listener), strict=True
    ):
        answer(prompt, short).check(one)


def test_a_preempted_request_keeps_what_it_generated(monkeypatch):
    """It was put back in the queue with a chunk of its answer, and is cancelled there."""
    engine, given = host_engine(), prompts((13, 13))
    put_back, fits = [], engine.runner.reservation.fits

    def full(extra, **options):
        if len(engine.running) == 2 and (engine.runner.seen > 20).all():
            put_back.append(extra)
            return False
        return fits(extra, **options)

    monkeypatch.setattr(engine.runner.reservation, "fits", full)
    listener = Cancel(engine, 2, at=0, indices=[1], nth=3)
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    answer(given[0]).check(completions[0])
    assert put_back
    kept = len(completions[1].tokens)
    assert 1 + CHUNK <= kept < GREEDY.max_new_tokens
    want = answer(given[1], dataclasses.replace(GREEDY, max_new_tokens=kept))
    dataclasses.replace(want, finish_reason="cancelled").check(completions[1])


def test_what_is_no_index_is_refused():
    with pytest.raises(ConfigError, match="cancel: index"):
        host_engine().cancel([-1])
