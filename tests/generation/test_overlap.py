"""Programs are launched before the last ones are collected, and answers stay the same."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest

from dms_jax.generation import in_flight as programs_in_flight
from dms_jax.generation import programs
from dms_jax.generation.engine import Source
from dms_jax.generation.in_flight import LANES_AHEAD, InFlight
from dms_jax.generation.prefill import PrefillBatch, Shape
from dms_jax.generation.requests import NotNumbersError, make_requests
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    on_launch,
    prompts,
    requests_of,
    serve_arrivals,
    squeezed,
    stories,
    story_tokens,
    text_behind,
)
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
TWO = prompts((5, 13))
SIX = prompts((5, 9, 13, 7, 11, 3))


def launchable():
    """Returns the programs of prompts, first tokens and steps, real or fake."""
    return programs.extend, programs.first_tokens, programs.decode


def noted(monkeypatch):
    """Returns a list to which launches and collections of steps are added in order."""
    order, collect = [], Runner.collect

    def collected(runner, chunk):
        order.append("collect")
        return collect(runner, chunk)

    on_launch(monkeypatch, lambda program, _: program is programs.decode and order.append("launch"))
    monkeypatch.setattr(Runner, "collect", collected)
    return order


def in_order(monkeypatch, engine, given, **options):
    """Returns the completions of a call, and the order of its launches and collections."""
    with monkeypatch.context() as patch:
        order = noted(patch)
        completions = engine.generate(given, sampling=GREEDY, **options)
    return completions, order


def spelled(order: str) -> list[str]:
    return [{"L": "launch", "C": "collect"}[letter] for letter in order.replace(" ", "")]


# Answers of 20 tokens: chunks of 8 steps in two programs, and of the last 3 in one.
AHEAD = spelled("LL LL CC L CC C")
IN_TURN = spelled("LL CC LL CC L C")
# While requests wait, the last program of a chunk stays in flight, unless answers end with it.
REFILLED = spelled("LL C LL C C L C C")


@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded", "cuts"])
def test_chunk_is_launched_before_last_is_collected(name, monkeypatch):
    """Answers and usage equal those of chunks in turn."""
    engine = host_engine(name)
    completions, order = in_order(monkeypatch, engine, TWO)
    assert order == AHEAD
    expected, order = in_order(monkeypatch, engine, TWO, on_tokens=lambda update: None)
    assert order == IN_TURN
    assert completions == expected
    for prompt, one in zip(TWO, completions, strict=True):
        answer(prompt, name=name).check(one)


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_prefill_is_launched_before_last_lengths_are_collected(name, monkeypatch):
    """Two prefill programs and the first chunk of steps, under every policy."""
    order, set_lengths = [], Reservation._set_lengths
    names = {programs.extend: "prompt", programs.decode: "steps"}

    def lengths(reservation, *arguments):
        order.append("lengths")
        return set_lengths(reservation, *arguments)

    on_launch(monkeypatch, lambda program, _: order.extend(filter(None, [names.get(program)])))
    monkeypatch.setattr(Reservation, "_set_lengths", lengths)
    host_engine(name).generate(TWO, sampling=GREEDY)
    first = ["prompt", "prompt", *([] if name == "keeps" else ["lengths"]), "steps"]
    assert order[: len(first)] == first


@pytest.mark.parametrize(
    ("name", "lengths", "new_tokens", "page_size"),
    [("evicts", (5, 13), 20, 16), ("evicts", (30, 30), 2, 2), ("cuts", (30, 30), 2, 2)],
    ids=["answers take most", "prompts take most", "prompts that are cut take most"],
)
def test_overlapped_prefill_needs_no_more_pages(name, lengths, new_tokens, page_size, monkeypatch):
    """Late lengths do not raise the peak, and a full pool waits for them."""
    engine = host_engine(name, page_size=page_size)
    given, sampling = prompts(lengths), dataclasses.replace(GREEDY, max_new_tokens=new_tokens)
    runner, extend = engine.runner, Runner.extend
    expected = engine.generate(given, sampling=sampling)

    def in_turn(self, *arguments, **options):
        extended = extend(self, *arguments, **options)
        self.reservation.collect_prompts()
        return extended

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "extend", in_turn)
        assert engine.generate(given, sampling=sampling) == expected
    most = sum(each.usage.peak_cache_bytes - runner.reservation._state_bytes for each in expected)
    with squeezed(engine, most // runner.page_bytes):
        assert engine.generate(given, sampling=sampling) == expected


def test_cleared_lane_ignores_prefill_in_flight(monkeypatch):
    """The host does not wait for it, and ignores the lengths that it returns later."""
    runner, given = host_engine("evicts").runner, [0, 1]
    waited, read = [], Reservation._set_lengths

    def fetched(runner, *arguments):
        waited.append(True)
        read(runner, *arguments)

    monkeypatch.setattr(Reservation, "_set_lengths", fetched)
    runner.recover()
    with runner.working():
        runner.reservation.reserve(np.array([8, 5]), prompt=True)
        tokens = {lane: np.asarray(prompts((8, 5))[lane], np.int32) for lane in given}
        shape = Shape(8, entries=2, places=None, one_pass=True)
        runner.extend(PrefillBatch(tokens, shape, True, given))
        runner.clear([0])
        assert runner.reservation.slots_held().max((0, 2)).tolist() == [0, 5]
        assert not runner.reservation.lengths_of(0).any()
        assert not waited
        assert set(runner.reservation.lengths_of(1).flat) == {5}  # the window evicts nothing yet
        assert waited
        assert runner.reservation.lengths.max((0, 2)).tolist() == [0, 5]
        runner.clear([1])


def test_lanes_are_refilled_before_next_chunk(monkeypatch):
    """While a request waits for a lane, an answer that ended is collected at once."""
    engine, given = host_engine("evicts"), prompts()
    completions, order = in_order(monkeypatch, engine, given)
    assert order == REFILLED + AHEAD
    assert completions == engine.generate(given, sampling=GREEDY, on_tokens=lambda update: None)


@functools.cache
def ending(name: str, least: int, most: int, reason: str = "end") -> list[list[int]]:
    """Returns prompts whose answers end with the `least`-th to `most`-th token."""
    text = story_tokens()
    starts = [text[at : at + 5] for at in range(100)]
    found = [answer(each, name=name, ends=ENDS) for each in starts]
    return [
        prompt
        for prompt, each in zip(starts, found, strict=True)
        if each.finish_reason == reason and least <= len(each.tokens) <= most
    ]


def test_chunk_runs_ahead_of_end_tokens_only_with_enough_lanes(monkeypatch):
    """Some answers end within a chunk that another one follows."""
    engine = host_engine("evicts", LANES_AHEAD, ends=ENDS)
    given = [
        *ending("evicts", 3, 8)[:1],
        *ending("evicts", 12, 17)[:1],
        *ending("evicts", 20, 20, "length")[:2],
    ]
    completions, order = in_order(monkeypatch, engine, given)
    for prompt, one in zip(given, completions, strict=True):
        answer(prompt, name="evicts", ends=ENDS).check(one)
    assert len({each.finish_reason for each in completions}) == 2
    assert order[:5] == AHEAD[:5]
    expected, in_turn = in_order(monkeypatch, engine, given, on_tokens=lambda update: None)
    assert completions == expected
    assert len(order) == len(in_turn)
    few, order = in_order(monkeypatch, engine, given[1:])
    assert [each.tokens for each in few] == [each.tokens for each in expected[1:]]
    assert order[:4] == IN_TURN[:4]
    assert "launch launch launch" not in " ".join(order)


def test_first_page_table_is_wide_enough_for_whole_chunk(monkeypatch):
    """12 tokens and a chunk of 8 need more than the narrowest 16 pages."""
    engine, widths = host_engine(page_size=1), set()

    def note(program, arguments):
        if program in (programs.extend, programs.decode):
            widths.add(arguments[3].shape[-1])

    on_launch(monkeypatch, note)
    engine.generate(prompts((12,)), sampling=GREEDY)
    assert widths == {64}


def ends_at_its_third_to_fifth(prompt, name):
    """Returns greedy sampling that stops where the answer first has those tokens."""
    tokens = answer(prompt, name=name).tokens[2:5]
    return dataclasses.replace(GREEDY, stop=stories().tokenizer.decode(tokens).strip())


# -- a call whose requests are all known -------------------------------------------------------


def test_stop_strings_delay_no_chunk_without_listener(monkeypatch):
    """Answers, log-probabilities and usage equal those of chunks in turn."""
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
    in_flight = np.cumsum([1 if each == "launch" else -1 for each in ahead])
    assert in_flight.max() > 2  # programs of a chunk
    assert in_flight[-1] == 0
    assert np.cumsum([1 if each == "launch" else -1 for each in order]).max() == 2


def test_late_listener_is_called_while_next_steps_run(monkeypatch):
    """Six answers over two lanes, then two."""
    engine, launched, collect = host_engine("evicts"), [], Runner.collect

    def collected(runner, chunk):
        steps = collect(runner, chunk)
        if not runner.reservation.steps_in_flight.any():  # the device is idle
            launched.clear()
        return steps

    on_launch(monkeypatch, lambda program, _: program in launchable() and launched.append(program))
    monkeypatch.setattr(Runner, "collect", collected)
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
        assert busy.index(False) == len(busy) - 2  # after the last steps of all
        assert len(busy) >= 2 * len(given)


@pytest.mark.parametrize(
    ("name", "fewest"), [("keeps", 4), ("evicts", 4), ("cuts", 4), ("evicts", 8)]
)
def test_last_steps_of_chunk_run_while_lanes_are_refilled(name, fewest, monkeypatch):
    """Answers and usage equal those of chunks in turn."""
    engine, order, collect = host_engine(name), [], Runner.collect
    lengths = (3, 9, 20, 6, 17, 12, 1, 20, 11)
    in_flight = 0

    def launched(program, _):
        nonlocal in_flight
        order.append((program, in_flight))
        in_flight += program is programs.decode

    def collected(runner, chunk):
        nonlocal in_flight
        in_flight -= 1
        return collect(runner, chunk)

    def answers(on_tokens):
        requests = make_requests(engine.model.config, prompts(lengths), GREEDY)
        for request, count in zip(requests, lengths[::-1], strict=True):
            request.max_new_tokens = count
        return engine.serve(Source(requests, GREEDY, on_tokens=on_tokens))

    in_turn = answers(lambda update: None)
    monkeypatch.setattr(programs_in_flight, "_FEWEST_STEPS", fewest)
    on_launch(monkeypatch, launched)
    monkeypatch.setattr(Runner, "collect", collected)
    found = answers(None)
    assert found == in_turn
    for prompt, count, one in zip(prompts(lengths), lengths[::-1], found, strict=True):
        answer(prompt, name=name, new_tokens=count).check(one)
    # A lane was reassigned, and its first and next tokens were drawn, while steps were in flight.
    assert {program for program, before in order if before} >= set(launchable())
    assert in_flight == 0


# -- requests that come ------------------------------------------------------------------------


def test_lane_is_reused_while_stopped_answer_runs_on(monkeypatch):
    """The device does not know that it has ended; its further tokens are dropped."""
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


def test_updates_of_last_steps_are_sent_while_next_steps_run(monkeypatch):
    """The end of an answer is reported before the next chunk ends."""
    engine, order = host_engine(), noted(monkeypatch)
    one_chunk = dataclasses.replace(GREEDY, max_new_tokens=1 + SHAPE["chunk"])
    requests = requests_of(prompts((5, 7)), [one_chunk, GREEDY])

    def told(update):
        if update.finished:
            order.append(f"end {update.index}")

    serve_arrivals(engine, [requests], told)
    assert order == [*spelled("LL C LL C"), "end 0", *spelled("C L C C"), "end 1"]


def test_orphaned_steps_are_collected_before_engine_idles(monkeypatch):
    """A stop string has ended the only answer; its end is reported first."""
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
    assert order == ["wait", *[*spelled("LL C"), "end", "collect", "wait"] * 2]


@pytest.mark.parametrize("wider", [False, True])
def test_wider_page_table_waits_for_steps_in_flight(wider, monkeypatch):
    """The upper bound needs a wider table than the exact lengths, which are collected first."""
    engine, order = host_engine("evicts"), noted(monkeypatch)
    if wider:
        monkeypatch.setattr(Reservation, "fits_table", lambda *_: False)
    serve_arrivals(engine, [requests_of(prompts((5, 7)), GREEDY)])
    assert order == spelled("LL CC LL CC L C" if wider else "LL C LL CC L CC")


def test_ended_request_recomputes_whole_prompt_after_error(monkeypatch):
    """Its only token was drawn, and steps of another request failed before it was reported."""
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
    # The other one decodes during the prefill; more requests may come at any time.
    looks = itertools.chain([[ended], [other]], itertools.repeat([]))
    engine.serve(
        Source(
            [], GREEDY, incoming=lambda wait: None if wait and other.finish_reason else next(looks)
        )
    )
    expected.check(ended)
    assert ended.usage.prefilled_tokens == 2 * len(prompt)
