"""Fairness in counted tokens: the delay of answers by prefill, and priorities."""

import dataclasses
import itertools
import random

import pytest

from dms_jax.generation.engine import Engine, Source
from dms_jax.generation.requests import State, make_request
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    check_requests,
    host_engine,
    prompts,
    requests_of,
    serve_arrivals,
    squeezed,
    stories,
    story_tokens,
)
from tests.support.instances import nightly_but

pytestmark = pytest.mark.usefixtures("fakes")
CHUNK, WIDTH, POSITIONS = 4, 8, 192
SHAPE = dict(chunk=CHUNK, prefill_chunk=WIDTH, max_tokens=POSITIONS)
BY_CHUNK = dict(prefill_tokens=WIDTH)


@dataclasses.dataclass
class Watch:
    """Prefill between two chunks of steps.

    Attributes:
      turns: prompt tokens of each prefill program, for every pause between two chunks.
      paused: whether a chunk has been launched.
    """

    turns: list[list[int]] = dataclasses.field(default_factory=list)
    paused: bool = False

    @classmethod
    def over(cls, engine: Engine, monkeypatch) -> "Watch":
        watch, extend, decode = cls(), engine.runner.extend, engine.runner.decode

        def extended(batch):
            if watch.paused and engine._call.scheduler.decoding:
                watch.turns[-1].append(sum(map(len, batch.tokens.values())))
            return extend(batch)

        def decoded(*given, **more):
            watch.paused = True
            watch.turns.append([])
            return decode(*given, **more)

        monkeypatch.setattr(engine.runner, "extend", extended)
        monkeypatch.setattr(engine.runner, "decode", decoded)
        return watch

    @property
    def pauses(self) -> list[int]:
        """Prompt tokens of every pause."""
        return list(map(sum, self.turns))


def arrivals_at_random(choose, count):
    """Returns random requests, some of them long."""
    requests = []
    for index in range(count):
        length = choose.choice((3, 9, 20, 40, 150))
        start = choose.randrange(500)
        most = choose.choice((1, 6, 20))
        sampling = dataclasses.replace(GREEDY, max_new_tokens=most)
        prompt = story_tokens()[start : start + length]
        priority = choose.choice((0, 0, 0, 1, -1))
        requests.append(
            make_request(stories().config, prompt, sampling, index=index, priority=priority)
        )
    return requests


@pytest.mark.parametrize(
    ("name", "bound"),
    nightly_but(
        [("keeps", 8), ("cuts often", 40)],
        itertools.product(("keeps", "evicts", "cuts often"), (8, 16, 40)),
    ),
)
def test_pauses_are_bounded_by_prefill_tokens(name, bound, monkeypatch):
    engine = host_engine(name, 6, prefill_tokens=bound, **SHAPE)
    watch = Watch.over(engine, monkeypatch)
    for seed in range(6):
        choose = random.Random(seed)
        requests = arrivals_at_random(choose, 12)
        coming = list(requests)

        def incoming(wait, coming=coming, choose=choose):
            if not coming:
                return None
            count = choose.randint(1 if wait else 0, 2)
            came, coming[:count] = coming[:count], []
            return came

        watch.paused = False
        engine.serve(Source(incoming=incoming))
        check_requests(requests, name)
    assert max(watch.pauses) == bound  # the bound is reached and never exceeded
    assert max(map(len, watch.turns)) == bound // WIDTH  # also by one long prompt


@pytest.mark.parametrize(("options", "steps"), [(BY_CHUNK, 1), ({}, CHUNK)])
def test_chunk_is_one_step_while_prompts_wait(options, steps, monkeypatch):
    engine = host_engine(lanes=6, **SHAPE, **options)
    assert engine.steps_between_prompts == steps  # depends on whether prompts can wait at all
    decode, sizes = engine.runner.decode, {True: set(), False: set()}

    def decoded(*given, **more):
        sizes[engine._call._prefill.has_tokens].add(more["num_steps"])
        return decode(*given, **more)

    monkeypatch.setattr(engine.runner, "decode", decoded)
    sampling = dataclasses.replace(GREEDY, max_new_tokens=60)
    requests = requests_of([story_tokens()[:5], story_tokens()[10:90]], sampling)
    serve_arrivals(engine, [requests[:1], [], requests[1:]], lambda each: None)
    check_requests(requests)
    assert sizes == {True: {1} if steps == 1 else set(), False: {CHUNK}}


def test_short_prompt_overtakes_a_long_one():
    """It is answered while the long one is still prefilled, in turns of one program."""
    engine, told = host_engine(lanes=3, **SHAPE, **BY_CHUNK), []
    requests = requests_of([story_tokens()[:150], story_tokens()[200:205]], GREEDY)
    serve_arrivals(engine, [requests[:1], requests[1:]], lambda each: told.append(each.index))
    check_requests(requests)
    assert told[0] == 1
    assert told.index(0) > told.count(1) // 2


# -- priorities ----------------------------------------------------------------------------------


def with_priorities(given, *priorities):
    requests = requests_of(given, GREEDY)
    for request, priority in zip(requests, priorities, strict=True):
        request.priority = priority
    return requests


def ends_of(engine, looks):
    """Returns the indices of requests in the order in which they end."""
    ended = []
    serve_arrivals(engine, looks, lambda each: ended.append(each.index) if each.finished else None)
    return ended


def test_requests_run_by_priority_then_arrival():
    engine, given = host_engine(lanes=1), prompts((5, 6, 7, 8, 9, 4))
    requests = with_priorities(given, 1, 5, 0, 5, -2, 0)
    assert ends_of(engine, [requests[:5], requests[5:]]) == [4, 2, 5, 0, 1, 3]
    check_requests(requests)


@pytest.mark.parametrize("priorities", [(1, 0, 0), (0, 0, 0), (0, 0, 1), (1, 1, 0)])
def test_least_urgent_youngest_is_preempted(priorities, monkeypatch):
    """Three answers grow beyond the pool."""
    engine, left = host_engine(lanes=3), []
    preempt = Scheduler.preempt

    def watched(scheduler):
        running = list(scheduler.running.values())
        lane = preempt(scheduler)
        (gone,) = [each for each in running if each.state is State.WAITING]
        lowest = max(each.priority for each in running)
        youngest = [each for each in running if each.priority == lowest][-1]
        assert gone is youngest
        same = [each for each in scheduler.waiting if each.priority == lowest]
        assert same[0] is gone
        left.append(gone.index)
        return lane

    monkeypatch.setattr(Scheduler, "preempt", watched)
    requests = with_priorities(prompts((13, 14, 15)), *priorities)
    waiting = requests_of(prompts((5, 6)), dataclasses.replace(GREEDY, max_new_tokens=4))
    for each, priority in zip(waiting, (0, 1), strict=True):
        each.index, each.priority = 3 + each.index, priority
    with squeezed(engine, 7 * 20):
        serve_arrivals(engine, [requests, waiting])
    check_requests([*requests, *waiting])
    assert left[0] == {(1, 0, 0): 0, (0, 0, 0): 2, (0, 0, 1): 2, (1, 1, 0): 1}[priorities]


def test_prompt_is_not_shared_across_priorities():
    """Otherwise the request that prefills for others could be preempted before them."""
    (prompt,) = prompts((30,))
    requests = with_priorities([prompt] * 3, 1, 0, 0)
    serve_arrivals(host_engine(lanes=4), [requests])
    check_requests(requests)
    assert [each.usage.prefilled_tokens for each in requests] == [30, 30, 0]


@pytest.mark.parametrize("urgent", [True, False])
def test_urgent_request_does_not_wait_for_less_urgent_prefix(urgent):
    """Requests of equal priority wait for the prefix and prefill only the rest."""
    text, engine = story_tokens(), host_engine(lanes=4, prefix_cache=0, **SHAPE, **BY_CHUNK)
    shared = text[200:264] if urgent else text[:64]
    given = [shared + text[start : start + 5] for start in (300, 310, 320)]
    requests = with_priorities(given, 1, 1, 0 if urgent else 1)
    serve_arrivals(engine, [requests[:2], [], requests[2:]])
    engine.runner.prefixes.clear()
    check_requests(requests)
    assert [each.usage.cached_tokens for each in requests] == [0, 64, 0 if urgent else 64]
