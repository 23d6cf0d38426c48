"""Requests that come while a call runs, each with its own sampling."""

import collections
import dataclasses

import pytest

import dms_jax
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    requests_of,
    serve_arrivals,
    squeezed,
    stories,
    story_tokens,
)
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
CHUNK, WIDTH = SHAPE["chunk"], SHAPE["prefill_chunk"]
BY_CHUNK = dict(prefill_tokens=WIDTH)  # prompts are read by a chunk of one between two of steps
ONE = dataclasses.replace(GREEDY, max_new_tokens=1)
SETTINGS = [
    GREEDY,
    dms_jax.Sampling(temperature=0.9, top_k=4, max_new_tokens=15, seed=3, logprobs=True),
    dms_jax.Sampling(temperature=1.1, top_p=0.8, min_p=0.01, max_new_tokens=9, seed=4),
]


def check(requests, name="keeps", **given):
    """Compares requests with what they are to be answered."""
    for each in requests:
        answer(each.prompt, each.sampling, name, **given).check(each)


def test_a_shared_prompt_is_cut_while_steps_of_others_are_in_flight():
    """Its pages behind the cut are freed at once; the host knows of the cut only later."""
    engine, long = host_engine("cuts often", 4), story_tokens()[:30]
    requests = requests_of([long[:5], long, long], GREEDY)
    serve_arrivals(engine, [requests[:1], [], requests[1:]])
    check(requests, "cuts often")


def test_requests_join_those_that_run_and_draw_as_they_do_alone():
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
    assert waited[:2] == [True, False]  # nothing else was to be done before the first one
    assert max(together) == 2  # and the third one came while these ran
    assert not engine.running


def test_what_a_lane_asks_is_looked_at_once(monkeypatch):
    """With 256 lanes it took half a millisecond a program, for which the device waited."""
    looked, own = collections.Counter(), Sampling.filter.func

    def counted(self):
        looked[self.seed] += 1
        return own(self)

    monkeypatch.setattr(Sampling, "filter", property(counted))
    samplings = [dataclasses.replace(GREEDY, seed=100 + each) for each in range(3)]
    joined_while_it_decodes(host_engine(), prompts()[:3], samplings)
    assert [looked[each.seed] for each in samplings] == [1, 1, 1]


@pytest.mark.parametrize("listens", [True, False], ids=["told", "untold"])
def test_a_stop_string_in_a_first_token_ends_an_answer_before_the_next_chunk(listens):
    """Whether or not anybody is told."""
    given = prompts((5, 13))
    stop = stories().tokenizer.decode(answer(given[1]).tokens[:1]).strip()
    samplings = [GREEDY, dataclasses.replace(GREEDY, stop=stop)]
    requests, *_ = joined_while_it_decodes(host_engine(), given, samplings, listens=listens)
    check(requests)
    assert [len(each.generated) for each in requests] == [20, 1]
    assert requests[1].totals() == ([], [])  # no step ran for it


def test_requests_are_looked_for_between_chunks_of_those_that_nobody_listens_to():
    """An answer of 20 tokens takes chunks of 8, 8 and 3 steps."""
    engine, looked = host_engine("evicts"), []
    coming = make_requests(engine.model.config, prompts((5,)), GREEDY)

    def incoming(wait):
        looked.append(wait)
        return [coming.pop()] if coming else None if wait else []

    engine.serve(Source([], GREEDY, incoming=incoming))
    assert looked == [True, False, False, True]


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_what_an_answer_holds_that_its_first_token_ends_is_without_the_steps_that_run(name):
    """They were launched before the token was read, and their pages are reserved for its lane."""
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
def test_what_is_cancelled_while_it_waits_is_never_read(lengths):
    """A lane is free for it at the moment when it is cancelled, while steps of another may run."""
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


def test_what_is_cancelled_while_steps_run_ends_before_the_next_chunk():
    """Half of a chunk still runs at the look at which the request is cancelled."""
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


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("listens", [False, True], ids=["incoming", "told"])
def test_what_a_cancelled_prompt_took_counts_where_steps_ran_meanwhile(listens, copies):
    """It is cancelled when its first part was launched behind steps that nobody has read."""
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


def cancelled_while_it_is_read(engine, prompts, *indices, listens=True):
    """Serves prompts together; some are cancelled after their first chunk of tokens."""
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
def test_a_prompt_that_is_cancelled_is_not_read_to_its_end(name):
    long, other = cancelled_while_it_is_read(host_engine(name), prompts((30, 13)), 0)
    assert (long.finish_reason, long.generated) == ("cancelled", [])
    assert long.usage.prefilled_tokens == long.usage.live_tokens == WIDTH
    assert long.usage.compression_ratio == 1  # of what was read: the window evicts nothing yet
    check([other], name)


def test_a_prompt_that_another_request_shares_is_read_to_its_end():
    (prompt,) = prompts((30,))
    first, second = cancelled_while_it_is_read(host_engine("evicts"), [prompt, prompt], 0)
    assert first.finish_reason == "cancelled"
    assert first.usage.prefilled_tokens == len(prompt)
    check([second], "evicts")


@pytest.mark.parametrize("listens", [True, False])
def test_a_prompt_whose_sharers_are_all_cancelled_is_not_read_to_its_end(listens):
    """As when a client that asked for several answers goes away."""
    engine, (prompt, after) = host_engine("evicts"), prompts((30, 13))
    for request in cancelled_while_it_is_read(engine, [prompt, prompt], 0, 1, listens=listens):
        assert (request.finish_reason, request.generated) == ("cancelled", [])
        assert request.usage.prefilled_tokens <= WIDTH
        assert request.usage.compression_ratio == 1  # of what was read, not of the whole prompt
    answer(after, name="evicts").check(*engine.generate([after], sampling=GREEDY))


def joined_while_it_decodes(engine, given, samplings, *, after=1, listens=True):
    """Serves the first prompt, and the others from when it has `after` tokens.

    Returns the requests, what was told, and at each look for more the tokens of the first answer
    and those that the others have read.
    """
    first, *others = requests_of(given, samplings)
    coming, looks, told = [[first], others], [], []

    def incoming(wait):
        lanes = [lane for lane, each in engine._call.scheduler.running.items() if each is not first]
        looks.append((len(first.generated), int(engine.runner.seen[lanes].sum())))
        if len(coming) == 2 or (coming and len(first.generated) > after):
            return coming.pop(0)
        return [] if coming else None

    engine.serve(Source([], GREEDY, on_tokens=told.append if listens else None, incoming=incoming))
    ended = list(range(len(given))) if listens else []
    assert sorted(each.index for each in told if each.finished) == ended
    return [first, *others], told, looks


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts", "cuts often"])
def test_an_answer_goes_on_while_the_prompt_of_another_is_read(name):
    engine = host_engine(name, **BY_CHUNK)
    requests, _, looks = joined_while_it_decodes(engine, prompts((5, 30)), [GREEDY] * 2)
    check(requests, name)
    # A step of the answer after each chunk of the prompt, as long as there is one; at the first of
    # these looks half a chunk still runs.
    read = 1 + CHUNK // 2
    at = looks.index((read, 0))
    there = read + CHUNK // 2
    assert looks[at : at + 3] == [(read, 0), (there, WIDTH), (there + 1, 2 * WIDTH)]


def test_a_request_joins_a_prompt_that_is_half_read():
    first, prompt = prompts((5, 30))
    one, two, three = requests = requests_of([first, prompt, prompt], GREEDY)
    engine = host_engine(lanes=4, **BY_CHUNK)
    serve_arrivals(engine, [[one], [two], [], [three]], lambda update: None)
    check(requests)
    assert (two.usage.prefilled_tokens, three.usage.prefilled_tokens) == (30, 0)


def test_a_prompt_that_an_answer_leaves_no_room_is_read_again():
    """The answer grows while the prompt is read, and the pool does not hold both to the end."""
    engine, given = host_engine(**BY_CHUNK), prompts((5, 58))
    samplings = [dataclasses.replace(GREEDY, max_new_tokens=most) for most in (58, 4)]
    with squeezed(engine, 6 * 20):
        requests, *_ = joined_while_it_decodes(engine, given, samplings, after=9)
    check(requests)
    assert requests[1].usage.prefilled_tokens > 58


@pytest.mark.parametrize("reason", ["end", "length"])
def test_an_answer_of_one_token_makes_room_before_anything_is_put_back(reason):
    """Neither it nor the younger one leaves a full pool, and is read again."""
    ends = ENDS if reason == "end" else ()
    samplings = [dataclasses.replace(GREEDY, max_new_tokens=50), GREEDY, GREEDY]

    def found(length, sampling, count, start=0):
        """Returns a prompt whose answer has so many tokens."""
        text = story_tokens()
        given = (text[at : at + length] for at in range(start, 700))
        return next(
            each for each in given if len(answer(each, sampling, ends=ends).tokens) == count
        )

    one = found(30, GREEDY, 1 if ends else 20)
    given = [found(5, samplings[0], 50), one, found(30, GREEDY, 20, start=40)]
    if reason == "length":
        samplings[1] = ONE
    engine = host_engine(lanes=4, ends=ends)
    # The oldest has 21 tokens in the cache when the others come, and 45 when their prompts have
    # been read. Its next chunk takes four pages then, that of the youngest three, and the prompt of
    # the one that has ended two: nine, of eight.
    with squeezed(engine, 8 * 20):
        requests, told, _ = joined_while_it_decodes(engine, given, samplings, after=2 * CHUNK)
    check(requests, ends=ends)
    assert [each.finish_reason for each in requests] == ["length", reason, "length"]
    assert [each.usage.prefilled_tokens for each in requests] == [5, 30, 30]
    assert requests[1].usage.live_tokens == 30
    assert next(each.index for each in told if each.finished) == 1


def test_a_prompt_is_read_on_when_another_one_is_put_back(monkeypatch):
    """Two come together, and the pool holds one of them beside the answer that grows."""
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
    # A program of prompts at each look, until the older one is read; its last two in one turn.
    assert looks == list(range(5))
    assert others[1].usage.prefilled_tokens > len(given[2])  # the younger one was put back


@pytest.mark.parametrize("shared", [False, True], ids=["no room", "a prefix is read"])
def test_who_ran_when_a_call_failed_waits_in_the_next_one(shared, monkeypatch):
    """As the others do: a server queues them again, perhaps behind more urgent requests."""
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
