"""Requests that join a running call."""

import dataclasses

import pytest

import dms_jax
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from tests.generation.support import (
    GREEDY,
    SHAPE,
    check_requests,
    host_engine,
    prompts,
    requests_of,
    squeezed,
)

pytestmark = pytest.mark.usefixtures("fakes")
CHUNK, WIDTH = SHAPE["chunk"], SHAPE["prefill_chunk"]
BY_CHUNK = dict(prefill_tokens=WIDTH)  # one prefill program between two chunks of steps
SETTINGS = [
    GREEDY,
    dms_jax.Sampling(temperature=0.9, top_k=4, max_new_tokens=15, seed=3, logprobs=True),
    dms_jax.Sampling(temperature=1.1, top_p=0.8, min_p=0.01, max_new_tokens=9, seed=4),
]


def test_requests_join_running_call():
    engine = host_engine()
    requests = requests_of(prompts()[: len(SETTINGS)], SETTINGS)
    coming, waited, together, ended = list(requests), [], [], []

    def incoming(wait):
        waited.append(wait)
        together.append(len(engine.running))
        return [coming.pop(0)] if coming else None

    def on_tokens(update):
        if update.finished:
            ended.append(update.index)

    assert engine.serve(Source(on_tokens=on_tokens, incoming=incoming)) == []
    assert sorted(ended) == [0, 1, 2]
    check_requests(requests)
    assert waited[:2] == [True, False]  # nothing else to do before the first one
    assert max(together) == 2  # the third one came while these ran
    assert not engine.running


def test_requests_are_polled_between_chunks():
    """An answer of 20 tokens takes chunks of 8, 8 and 3 steps."""
    engine, looked = host_engine("evicts"), []
    coming = make_requests(engine.model.config, prompts((5,)), GREEDY)

    def incoming(wait):
        looked.append(wait)
        return [coming.pop()] if coming else None if wait else []

    engine.serve(Source(incoming=incoming))
    assert looked == [True, False, False, True]


def test_prefill_continues_in_turn_of_preemption(monkeypatch):
    """Two prompts arrive together, and the pool holds only one beside the growing answer."""
    shape = dict(page_size=8, chunk=4, prefill_chunk=16, prefill_tokens=32, max_tokens=96)
    engine = host_engine("evicts", 3, **shape)
    given = prompts((5, 70, 70))
    samplings = [dataclasses.replace(GREEDY, max_new_tokens=most) for most in (60, 4, 4)]
    first, *others = requests = requests_of(given, samplings)
    coming, programs, looks, extend = [[first], others], [], [], engine.runner.extend

    def counted(*given, **more):
        programs.append(more)
        return extend(*given, **more)

    def incoming(wait):
        if not others[0].generated:
            looks.append(len(programs))
        return coming.pop(0) if coming else None

    monkeypatch.setattr(engine.runner, "extend", counted)
    with squeezed(engine, 234):
        engine.serve(Source(on_tokens=lambda update: None, incoming=incoming))
    check_requests(requests, "evicts")
    # One prefill program per poll until the older one is complete; its last two in one turn.
    assert looks == list(range(5))
    assert others[1].usage.prefilled_tokens > len(given[2])  # the younger one was preempted
