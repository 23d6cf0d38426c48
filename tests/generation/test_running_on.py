"""Steps run behind stop strings, late listeners and lanes that are given away; nothing changes."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from dms_jax.generation import in_flight as programs_in_flight
from dms_jax.generation import programs
from dms_jax.generation.engine import Source
from dms_jax.generation.in_flight import InFlight
from dms_jax.generation.requests import NotNumbersError, make_requests
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    requests_of,
    serve_arrivals,
    stories,
    text_behind,
)
from tests.generation.test_ahead import SIX, TWO, noted, spelled

pytestmark = pytest.mark.usefixtures("fakes")


def ends_at_its_third_to_fifth(prompt, name):
    """Returns greedy sampling that stops at those tokens of the answer, or where it has them."""
    tokens = answer(prompt, name=name).tokens[2:5]
    return dataclasses.replace(GREEDY, stop=stories().tokenizer.decode(tokens).strip())


# -- a call whose requests are all known -------------------------------------------------------


def test_stop_strings_hold_up_no_chunk_of_a_call_that_nobody_listens_to(monkeypatch):
    """Answers, log-probabilities and what they used are those of chunks in turn."""
    engine, name = host_engine("evicts"), "evicts"
    stops = tuple(ends_at_its_third_to_fifth(SIX[place], name).stop for place in (1, 4))
    sampling = dataclasses.replace(GREEDY, stop=stops)
    order = noted(monkeypatch)
    found = engine.generate(SIX, sampling=sampling)
    ahead = list(order)
    order.clear()
    told = engine.generate(SIX, sampling=sampling, on_tokens=lambda update: None)
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for prompt, *both in zip(SIX, found, told, strict=True):
        for one in both:
            answer(prompt, sampling, name).check(one)
    unread = np.cumsum([1 if each == "launch" else -1 for each in ahead])
    assert unread.max() > 2  # programs of a chunk
    assert unread[-1] == 0
    assert np.cumsum([1 if each == "launch" else -1 for each in order]).max() == 2


def test_the_cut_behind_a_prompt_counts_where_the_first_token_completes_a_stop_string():
    """Nobody listens, so that steps ran behind it, whose rows are not those of the answer.

    While others wait the first of them are collected before the answer is known to have ended.
    """
    engine, prompt = host_engine("cuts"), SIX[2]
    stop = text_behind(prompt, answer(prompt, name="cuts").tokens[:1])
    assert stop.strip()
    sampling = dataclasses.replace(GREEDY, stop=stop)
    found = engine.generate([prompt] * 4, sampling=sampling)  # a prompt and a copy of it, twice
    told = engine.generate([prompt] * 2, sampling=sampling, on_tokens=lambda update: None)
    for one in (*found, *told):
        answer(prompt, sampling, "cuts").check(one)
        assert (len(one.tokens), one.usage.live_tokens) == (1, 8)
        assert one.usage.compression_ratio == len(prompt) / 8


def test_who_may_be_late_is_told_while_the_next_steps_run(monkeypatch):
    """The same is told of the same answers: of six over two lanes, and of two."""
    engine, launched, launch, read = (
        host_engine("evicts"),
        [],
        programs.Program.__call__,
        Runner.collect,
    )

    def launching(program, *arguments):
        if program in (programs.extend, programs.first_tokens, programs.decode):
            launched.append(program)
        return launch(program, *arguments)

    def reading(runner, chunk):
        steps = read(runner, chunk)
        if not runner.reservation.steps_in_flight.any():  # the device has nothing to do
            launched.clear()
        return steps

    monkeypatch.setattr(programs.Program, "__call__", launching)
    monkeypatch.setattr(Runner, "collect", reading)
    for given in (SIX, TWO):
        tokens, busy = collections.defaultdict(list), []

        def listen(update, tokens=tokens, busy=busy):
            tokens[update.index] += update.tokens
            busy.append(bool(launched))

        requests = make_requests(engine.model.config, given, GREEDY)
        found = engine.serve(Source(requests, GREEDY, on_tokens=listen, streaming=False, late=True))
        for index, (prompt, one) in enumerate(zip(given, found, strict=True)):
            answer(prompt, name="evicts").check(one)
            assert tokens[index] == one.tokens
        assert busy.index(False) == len(busy) - 2  # behind the last steps of all
        assert len(busy) >= 2 * len(given)


def test_what_a_listener_cancels_who_is_late_ends_behind_the_steps_that_run():
    engine = host_engine("evicts")
    requests = make_requests(engine.model.config, SIX, GREEDY)

    def cancel(update):
        if update.index == 0:
            engine.cancel([0, 1, 5])  # two in lanes, and one that waits

    found = engine.serve(Source(requests, GREEDY, on_tokens=cancel, streaming=False, late=True))
    cancelled = [each.finish_reason == "cancelled" for each in found]
    assert cancelled == [True, True, False, False, False, True]
    for prompt, one in zip(SIX, found, strict=True):
        assert one.tokens == answer(prompt, name="evicts").tokens[: len(one.tokens)]
    assert [len(each.tokens) for each in found][2:] == [20, 20, 20, 0]


@pytest.mark.parametrize(
    ("name", "fewest"), [("keeps", 4), ("evicts", 4), ("cuts", 4), ("evicts", 8)]
)
def test_the_last_steps_of_a_chunk_run_while_prompts_take_the_lanes_of_others(
    name, fewest, monkeypatch
):
    """Answers and every figure of usage are those of chunks that run in turn."""
    engine, order = host_engine(name), []
    lengths = (3, 9, 20, 6, 17, 12, 1, 20, 11)
    launch, read = programs.Program.__call__, Runner.collect
    known = {programs.extend: "prompts", programs.first_tokens: "first", programs.decode: "steps"}
    unread = 0

    def launched(program, *arguments):
        nonlocal unread
        if program in known:
            order.append((known[program], unread))
        unread += program is programs.decode
        return launch(program, *arguments)

    def fetched(runner, chunk):
        nonlocal unread
        unread -= 1
        return read(runner, chunk)

    def answers(on_tokens):
        requests = make_requests(engine.model.config, prompts(lengths), GREEDY)
        for request, count in zip(requests, lengths[::-1], strict=True):
            request.max_new_tokens = count
        return engine.serve(Source(requests, GREEDY, on_tokens=on_tokens))

    in_turn = answers(lambda update: None)
    monkeypatch.setattr(programs_in_flight, "_FEWEST_STEPS", fewest)
    monkeypatch.setattr(programs.Program, "__call__", launched)
    monkeypatch.setattr(Runner, "collect", fetched)
    found = answers(None)
    assert found == in_turn
    for prompt, count, one in zip(prompts(lengths), lengths[::-1], found, strict=True):
        answer(prompt, name=name, new_tokens=count).check(one)
    # A lane was given away, and its first token and next ones drawn, while steps ran.
    assert {name for name, before in order if before} == set(known.values())
    assert unread == 0  # nothing is left on the device


# -- requests that come ------------------------------------------------------------------------


def test_a_lane_is_given_away_while_the_answer_that_a_stop_string_ended_goes_on(monkeypatch):
    """The device does not know that it has ended: what it gives there is nobody's."""
    engine, finish, clear = host_engine("evicts"), Scheduler.finish, Runner.clear
    given_away, running_on = [], []

    def cleared(runner, lanes):
        given_away.extend(lane for lane in lanes if runner.reservation.steps_in_flight[lane])
        clear(runner, lanes)

    def finished(scheduler, **options):
        running_on.append(bool(scheduler.runner.reservation.steps_in_flight.any()))
        finish(scheduler, **options)

    monkeypatch.setattr(Scheduler, "finish", finished)
    monkeypatch.setattr(Runner, "clear", cleared)
    samplings = [ends_at_its_third_to_fifth(prompt, "evicts") for prompt in SIX]
    requests = requests_of(SIX, samplings)
    serve_arrivals(engine, [requests], lambda update: None)
    assert any(running_on)
    assert given_away
    for request in requests:
        assert request.finish_reason == "stop"
        answer(request.prompt, request.sampling, "evicts").check(request)


def test_what_the_last_steps_of_a_chunk_gave_is_told_while_the_next_ones_run(monkeypatch):
    """An answer that ends with a chunk is not told behind the next one."""
    engine, order = host_engine(), noted(monkeypatch)
    one_chunk = dataclasses.replace(GREEDY, max_new_tokens=1 + SHAPE["chunk"])
    requests = requests_of(prompts((5, 7)), [one_chunk, GREEDY])

    def told(update):
        if update.finished:
            order.append(f"end {update.index}")

    serve_arrivals(engine, [requests], told)
    assert order == [*spelled("LL R LL R"), "end 0", *spelled("R L R R"), "end 1"]


def test_steps_that_run_on_for_nobody_are_read_before_the_engine_waits_or_ends(monkeypatch):
    """A stop string has ended the only answer, of which is told first."""
    engine = host_engine()
    stop = text_behind(TWO[0], answer(TWO[0]).tokens[:4])[-3:]
    requests = requests_of([TWO[0]] * 2, dataclasses.replace(GREEDY, stop=stop))
    coming, order = list(requests), noted(monkeypatch)

    def incoming(wait):
        if not wait:
            return []
        order.append("wait")
        return [coming.pop(0)] if coming else None

    def told(update):
        if update.finished:
            order.append("end")

    engine.serve(Source([], GREEDY, on_tokens=told, incoming=incoming))
    assert {request.finish_reason for request in requests} == {"stop"}
    assert order == ["wait", *[*spelled("LL R"), "end", "read", "wait"] * 2]


@pytest.mark.parametrize("wider", [False, True])
def test_a_wider_program_waits_for_the_steps_that_run_on(wider, monkeypatch):
    """The table would be wider than that of exact lengths: they are read first."""
    engine, order = host_engine("evicts"), noted(monkeypatch)
    if wider:
        monkeypatch.setattr(Reservation, "fits_table", lambda *_: False)
    serve_arrivals(engine, [requests_of(prompts((5, 7)), GREEDY)])
    assert order == spelled("LL RR LL RR L R" if wider else "LL R LL RR L RR")


def test_an_answer_that_has_ended_reads_its_whole_prompt_again_after_an_error(monkeypatch):
    """It was drawn, and before anybody was told, steps of another one failed that ran on."""
    engine, (short, prompt) = host_engine(), prompts((5, 20))
    one = dataclasses.replace(GREEDY, max_new_tokens=1)
    wrong, ended, other = requests_of([short, prompt, short], [GREEDY, one, GREEDY])
    collect_steps, expected = InFlight.collect_steps, answer(prompt, one)

    def failing(in_flight, count=None):
        if in_flight.programs and count != 0 and ended.generated and not other.generated:
            raise NotNumbersError("steps that ran on", [wrong.index])
        collect_steps(in_flight, count)

    monkeypatch.setattr(InFlight, "collect_steps", failing)
    with pytest.raises(NotNumbersError):
        serve_arrivals(engine, [[wrong, ended]])
    assert (ended.generated, ended.finish_reason) == (expected.tokens, None)
    # Which decodes while the prompt is read; more may come all the time.
    looks = itertools.chain([[ended], [other]], itertools.repeat([]))
    engine.serve(
        Source(
            [], GREEDY, incoming=lambda wait: None if wait and other.finish_reason else next(looks)
        )
    )
    expected.check(ended)
    assert ended.usage.prefilled_tokens == 2 * len(prompt)
