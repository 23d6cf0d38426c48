"""Cancelled requests end before the next chunk; `test_arrivals_at_random` checks the others."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Update
from dms_jax.generation.engine import Source
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    requests_of,
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
    engine.serve(Source(on_tokens=told.append if listens else None, incoming=incoming))
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
