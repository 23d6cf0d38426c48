"""Programs are launched before the last ones are collected, and answers stay the same."""

import dataclasses
import itertools

import pytest

from dms_jax.generation import in_flight as programs_in_flight
from dms_jax.generation import programs
from dms_jax.generation.engine import Source
from dms_jax.generation.in_flight import InFlight
from dms_jax.generation.requests import NotNumbersError, make_requests
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    answer,
    host_engine,
    on_launch,
    prompts,
    requests_of,
    serve_arrivals,
)

pytestmark = pytest.mark.usefixtures("fakes")
TWO = prompts((5, 13))


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


def test_ends_are_told_while_the_next_steps_run(monkeypatch):
    engine, ended = host_engine(), []
    requests = make_requests(engine.model.config, TWO, GREEDY)
    requests[0].max_new_tokens = 9
    order = noted(monkeypatch)

    def end(request):
        assert request.usage is not None
        ended.append((request.index, request.text, len(order)))

    engine.serve(Source(requests, on_end=end))
    assert order == AHEAD
    first, second = answer(TWO[0], new_tokens=9), answer(TWO[1])
    # The first one ends in the first chunk, and is told when the third was launched.
    assert ended == [(0, first.text, 7), (1, second.text, len(AHEAD))]


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_prefill_does_not_wait_for_lengths(name, monkeypatch):
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


# -- a call whose requests are all known -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fewest"), [("keeps", 4), ("evicts", 4), ("cuts", 4), ("evicts", 8)]
)
def test_lanes_refill_while_steps_run(name, fewest, monkeypatch):
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
        return engine.serve(Source(requests, on_tokens=on_tokens))

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


def test_ended_request_is_recomputed_after_error(monkeypatch):
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
        Source(incoming=lambda wait: None if wait and other.finish_reason else next(looks))
    )
    expected.check(ended)
    assert ended.usage.prefilled_tokens == 2 * len(prompt)
