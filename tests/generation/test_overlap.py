"""Programs are launched before the last ones are collected, and answers stay the same."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from dms_jax.generation import in_flight as programs_in_flight
from dms_jax.generation import programs
from dms_jax.generation.engine import Source
from dms_jax.generation.in_flight import InFlight
from dms_jax.generation.prefill import PrefillBatch, Shape
from dms_jax.generation.requests import NotNumbersError, make_requests
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
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


def ends_at_its_third_to_fifth(prompt, name):
    """Returns greedy sampling that stops where the answer first has those tokens."""
    tokens = answer(prompt, name=name).tokens[2:5]
    return dataclasses.replace(GREEDY, stop=stories().tokenizer.decode(tokens).strip())


# -- a call whose requests are all known -------------------------------------------------------


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
