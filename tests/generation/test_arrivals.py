"""Requests that join a running call."""

import dataclasses

import pytest

import dms_jax
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    requests_of,
    serve_arrivals,
    squeezed,
    story_tokens,
)
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
CHUNK, WIDTH = SHAPE["chunk"], SHAPE["prefill_chunk"]
BY_CHUNK = dict(prefill_tokens=WIDTH)  # one prefill program between two chunks of steps
SETTINGS = [
    GREEDY,
    dms_jax.Sampling(temperature=0.9, top_k=4, max_new_tokens=15, seed=3, logprobs=True),
    dms_jax.Sampling(temperature=1.1, top_p=0.8, min_p=0.01, max_new_tokens=9, seed=4),
]


def check(requests, name="keeps", **given):
    """Compares requests with the expected answers."""
    for each in requests:
        answer(each.prompt, each.sampling, name, **given).check(each)


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

    assert engine.serve(Source([], GREEDY, on_tokens=on_tokens, incoming=incoming)) == []
    assert sorted(ended) == [0, 1, 2]
    check(requests)
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

    engine.serve(Source([], GREEDY, incoming=incoming))
    assert looked == [True, False, False, True]


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_usage_after_one_token_excludes_steps_in_flight(name):
    """They were launched before the token was known, and use pages of the request's lane."""
    text = story_tokens()
    prompt = next(
        text[at : at + 13]
        for at in range(400)
        if answer(text[at : at + 13], name=name).tokens[0] in ENDS
    )
    engine = host_engine(name, ends=ENDS)
    (request,) = requests_of([prompt], GREEDY)
    serve_arrivals(engine, [[request]])
    check([request], name, ends=ENDS)
    assert (len(request.generated), request.finish_reason) == (1, "end")
    page = 20 * engine.runner.page_bytes  # one holds the prompt of a row
    state = engine.runner.reservation._state_bytes
    assert 0 < request.usage.live_tokens <= 13
    assert request.usage.cache_bytes == page + state
    assert page + state < request.usage.peak_cache_bytes <= 2 * page + state


@pytest.mark.parametrize("lengths", [(5, 30, 1), (5, 7, 1)], ids=["alone", "steps-run"])
def test_cancelled_queued_request_is_never_prefilled(lengths):
    """It is cancelled just when a lane becomes free; steps of another request may run."""
    engine, told = host_engine(), []
    short = dataclasses.replace(GREEDY, max_new_tokens=5)
    requests = requests_of(prompts(lengths), [short, GREEDY, GREEDY])
    coming = [list(requests)]

    def incoming(wait):
        if coming:
            return coming.pop()
        if requests[0].finish_reason is not None:
            engine.cancel([2])
        return None

    engine.serve(Source([], GREEDY, on_tokens=told.append, incoming=incoming))
    check(requests[:2])
    assert (requests[2].finish_reason, requests[2].generated) == ("cancelled", [])
    usage = requests[2].usage
    assert (usage.prefilled_tokens, usage.live_tokens, usage.cache_bytes) == (0, 0, 0)
    assert [each.finished for each in told if each.index == 2] == [True]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("listens", [False, True], ids=["incoming", "told"])
def test_usage_of_cancelled_prefill(listens, copies):
    """It is cancelled once its first part is launched, after steps that are not collected."""
    engine, (short, long) = host_engine(lanes=4, **BY_CHUNK), prompts((5, 30))
    first, other, *copied = requests_of([short, *[long] * copies], GREEDY, copies=True)
    coming = [[first], [other, *copied]]

    def cancel_other():
        if engine.runner.seen[1] and not other.generated:
            engine.cancel([other.index, *(each.index for each in copied)])

    def incoming(wait):
        if not listens:
            cancel_other()
        return coming.pop(0) if coming else None

    engine.serve(
        Source(
            [],
            GREEDY,
            on_tokens=lambda update: cancel_other() if listens else None,
            incoming=incoming,
        )
    )
    assert other.finish_reason == "cancelled"
    usage = other.usage
    assert usage.prefilled_tokens == usage.peak_tokens == usage.live_tokens > 0
    assert [each.usage.prefilled_tokens for each in copied] == [0] * len(copied)
    check([first])


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
        engine.serve(Source([], GREEDY, on_tokens=lambda update: None, incoming=incoming))
    check(requests, "evicts")
    # One prefill program per poll until the older one is complete; its last two in one turn.
    assert looks == list(range(5))
    assert others[1].usage.prefilled_tokens > len(given[2])  # the younger one was preempted


@pytest.mark.parametrize("shared", [False, True], ids=["no room", "a prefix is read"])
def test_requests_of_failed_call_are_served_by_next_call(shared, monkeypatch):
    """A server queues them again, perhaps after more urgent requests."""
    engine = host_engine("keeps", 2, page_size=8, prefix_cache=0)
    first, second = prompts((30, 20))
    requests = requests_of([first, first[:24] + second if shared else second], GREEDY)
    requests[0].priority = -1
    launch, failing = Runner.decode, [RuntimeError("the device is gone")]

    def decode(runner, *arguments, **options):
        if failing:
            raise failing.pop()
        return launch(runner, *arguments, **options)

    monkeypatch.setattr(Runner, "decode", decode)
    with squeezed(engine, 320 if shared else 160):
        with pytest.raises(RuntimeError, match="gone"):
            serve_arrivals(engine, [requests if shared else requests[1:]])
        serve_arrivals(engine, [requests])
        check(requests)
        engine.runner.prefixes.clear()
