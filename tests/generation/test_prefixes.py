"""Cached prefixes: requests continue earlier sequences, and are answered as each alone.

The programs are fakes whose answers depend on every page, every length and the policy's state.
`tests/laws/test_prefixes.py` runs real ones.
"""

import collections
import contextlib
import dataclasses
import random
from unittest import mock

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Sampling, programs
from dms_jax.generation import prefixes as prefixes_module
from dms_jax.generation.prefixes import Prefixes
from dms_jax.generation.requests import make_request
from dms_jax.generation.scheduler import Scheduler
from tests.generation.schedules import serve_at_random
from tests.generation.support import (
    GREEDY,
    adapted,
    adapted_engine,
    answer,
    host_engine,
    prompts,
    serve_arrivals,
    squeezed,
    stories,
    story_tokens,
)
from tests.support.fake_programs import ENDS
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
SHORT = dataclasses.replace(GREEDY, max_new_tokens=6)
PAGE = 8
NAMES = ["keeps", "evicts", "bounded", "cuts"]
DOCUMENT, *QUESTIONS = prompts((30, 4, 6, 5, 9))


def engine_of(name: str, lanes: int = 2, **options) -> Engine:
    """An engine with an empty prefix cache."""
    engine = host_engine(name, lanes, page_size=PAGE, **dict(prefix_cache=1e6) | options)
    engine.runner.recover()
    engine.runner.prefixes.clear()
    return engine


def ask(engine: Engine, name: str, given: list[list[int]], sampling: Sampling = SHORT, **more):
    """Returns the completions, which are checked."""
    found = engine.generate(given, sampling=sampling)
    for one, prompt in zip(found, given, strict=True):
        answer(prompt, sampling, name, **more).check(one)
        assert one.usage.prefilled_tokens + one.usage.cached_tokens == len(prompt)
    return found


def cached(completions) -> list[int]:
    return [completion.usage.cached_tokens for completion in completions]


# -- lookup --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "of a call"])
def test_questions_prefill_shared_document_once(name, keeps):
    """Whole pages are shared; each question has its own copy of the other tokens."""
    engine = engine_of(name, 4, prefix_cache=1e6 if keeps else None)
    given = [DOCUMENT + question for question in QUESTIONS]
    assert cached(ask(engine, name, given)) == [0, 24, 24, 24]
    assert (engine.runner.reservation.allocator.pages_of_prefixes > 0) == keeps
    assert cached(ask(engine, name, given[:1])) == [32 if keeps else 0]


@pytest.mark.parametrize("name", NAMES)
def test_repeated_prompt_prefills_after_last_whole_page(name):
    engine, (prompt, other) = engine_of(name), prompts((29, 17))
    assert cached(ask(engine, name, [prompt, other])) == [0, 0]
    assert cached(ask(engine, name, [prompt])) == [24]
    assert cached(ask(engine, name, [prompt[:24]])) == [16 if name == "keeps" else 0]
    assert cached(ask(engine, name, [prompt[:25], [*prompt[:26], 7]])) == [24, 24]


@pytest.mark.parametrize(
    ("name", "expected"), [("keeps", 32), ("evicts", 35), ("bounded", 35), ("cuts", 24)]
)
def test_next_turn_continues_answer(name, expected):
    """All cached tokens are used if the policy treats prompts and answers alike."""
    engine, (prompt,) = engine_of(name), prompts((30,))
    (first,) = ask(engine, name, [prompt])
    (second,) = ask(engine, name, [prompt + first.tokens + [5, 6, 7]])
    assert second.usage.cached_tokens == expected


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_adapters_share_no_prefixes(name):
    """Neither within one call (one prefill per adapter) nor in later calls."""
    engine, (prompt,) = adapted_engine(name, 4, page_size=PAGE, prefix_cache=1e6), prompts((29,))
    engine.runner.recover()
    engine.runner.prefixes.clear()

    def ask(*names: str | None) -> list[int]:
        found = engine.generate([prompt] * len(names), sampling=SHORT, adapter=names)
        for one, adapter in zip(found, names, strict=True):
            slot = engine.runner.slots.names.index(adapter)
            answer(prompt, SHORT, name, slot=slot).check(one)
        return [one.usage.prefilled_tokens for one in found]

    assert ask("a", None, "a", "b") == [29, 29, 0, 29]
    assert ask("b") == ask("a") == ask(None) == [5]
    engine.update(adapters={"a": adapted("a")})
    assert ask("a", "b", None) == [29, 5, 5]
    assert ask("a") == [5]
    engine.update(stories().transformer)
    assert ask("a", "b", None) == [29, 29, 29]
    assert engine.runner.prefixes.counts.states > 0
    engine.update(stories().transformer)
    assert engine.runner.prefixes.counts == type(engine.runner.prefixes.counts)()
    assert engine.runner.reservation.allocator.pages_of_prefixes == 0


def test_prefixes_depend_on_max_length(monkeypatch):
    engine, (prompt,) = engine_of("bounded", 4), prompts((29,))
    monkeypatch.setattr(type(engine.policy), "for_length", lambda self, tokens: dms_jax.Quest())
    longer = dataclasses.replace(SHORT, max_new_tokens=7)
    asked = [ask(engine, "bounded", [prompt], each) for each in (SHORT, longer, SHORT)]
    assert list(map(cached, asked)) == [[0], [0], [24]]


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_queued_chains_find_their_prompt(name):
    """Five chains in two lanes: the first two prefill the prompt, the others its last page."""
    engine, (prompt,) = engine_of(name, prefix_cache=None), prompts((30,))
    sampling = dataclasses.replace(SHORT, temperature=1.0)
    found = engine.generate([prompt] * 5, sampling=sampling)
    for copy, one in enumerate(found):
        answer(prompt, sampling, name, copy=copy).check(one)
    assert [one.usage.prefilled_tokens for one in found] == [30, 0, 6, 0, 6]
    assert cached(found) == [0, 0, 24, 0, 24]


def test_open_stream_without_prefix_cache_keeps_no_tree():
    """A server is one endless call, whose tree would grow forever."""
    engine = engine_of("evicts", 4, prefix_cache=None)
    requests = [
        make_request(engine.model.config, DOCUMENT + question, SHORT, index=index)
        for index, question in enumerate(QUESTIONS)
    ]
    serve_arrivals(engine, [requests])
    assert [each.usage.cached_tokens for each in requests] == [0] * len(QUESTIONS)
    assert not engine.runner.prefixes._trees


# -- memory --------------------------------------------------------------------------------------


@contextlib.contextmanager
def squeezed_with_prefixes(engine: Engine, pages: int):
    """A context with a smaller pool; it begins and ends without prefixes."""
    engine.runner.prefixes.clear()
    with squeezed(engine, pages):
        try:
            yield
        finally:
            if not engine.runner.dirty:
                engine.runner.prefixes.clear()


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_return_from_host_memory(name):
    """Three prompts in a pool for one: each returns from the host, where all fit."""
    engine, given = engine_of(name), prompts((29, 27, 26))
    with squeezed_with_prefixes(engine, 5 * 20):
        for prompt in given:
            assert cached(ask(engine, name, [prompt])) == [0]
        counts = engine.runner.prefixes.counts
        assert counts.host_states >= 2
        assert 0 < counts.host_bytes <= 1e6
        for _ in range(2):
            for prompt in given:
                assert cached(ask(engine, name, [prompt])) == [24]


def test_host_memory_is_bounded():
    engine, given = engine_of("evicts", prefix_cache=64_000), prompts((29, 27, 26, 25, 28))
    with squeezed_with_prefixes(engine, 5 * 20):
        for prompt in given * 2:
            ask(engine, "evicts", [prompt])
            assert engine.runner.prefixes.counts.host_bytes <= 64_000
        assert engine.runner.prefixes.counts.host_bytes > 32_000
        assert cached(ask(engine, "evicts", given[-1:])) == [24]


def turns(engine: Engine, sessions: int, count: int, *, thinks: bool) -> list[int]:
    """Returns the cached tokens of each prompt, of sessions that alternate."""
    starts = [story_tokens()[100 * each : 100 * each + 17] for each in range(1, sessions + 1)]
    found, given = [], starts
    for turn in range(count):
        for number, prompt in enumerate(given):
            (one,) = ask(engine, "evicts", [prompt], dataclasses.replace(SHORT, max_new_tokens=3))
            found.append(one.usage.cached_tokens)
            said = one.tokens[1:] if thinks else one.tokens
            given[number] = prompt + said + [5 + turn] * 6
    return found


@pytest.mark.parametrize(
    ("thinks", "pages", "expected"), [(False, 14, (19, 28, 37)), (True, 16, (16, 24, 32))]
)
@pytest.mark.parametrize("host", [0, 1e6])
def test_session_holds_only_its_last_state(thinks, pages, expected, host):
    """Three sessions in a pool for little more than their last states: every turn is a hit.

    If a template leaves out reasoning, the last state is that of a prompt, and that of the answer
    leaves first. With all states of the last turn, the pools would need 17 and 24 pages per row.
    Superseded states are dropped without a copy to the host.
    """
    engine = engine_of("evicts", 4, prefix_cache=host)
    with squeezed_with_prefixes(engine, pages * 20):
        assert turns(engine, 3, 4, thinks=thinks) == [0, 0, 0, *np.repeat(expected, 3)]
        assert not any(each.superseded for each in engine.runner.prefixes._on_host)


def test_concurrent_turns_take_over_the_pages_of_their_sessions():
    """Four sessions at a time, in a pool for little more than their last states: 17 pages a row.

    With copies of the continued states the pool would need 30 pages a row, and sessions would lose
    their states to each other. All four are loaded at once.
    """
    engine = engine_of("evicts", 4, prefix_cache=0)
    given = [story_tokens()[100 * each : 100 * each + 17] for each in range(1, 5)]
    loads = mock.patch.object(programs, "load_lanes", wraps=programs.load_lanes)
    with squeezed_with_prefixes(engine, 19 * 20), loads as loaded:
        for turn in range(6):
            found = ask(engine, "evicts", given, dataclasses.replace(SHORT, max_new_tokens=3))
            assert cached(found) == [turn and 10 + 9 * turn] * 4
            assert loaded.call_count == turn
            given = [
                prompt + one.tokens + [5 + turn] * 6
                for prompt, one in zip(given, found, strict=True)
            ]


def test_turn_of_session_does_not_stop_in_its_prompt():
    """It continues an answer, as the next turn will; the end of its prompt becomes no state."""
    engine = engine_of("evicts", 4, prefix_cache=0)
    given, stops = story_tokens()[:17], []

    def recorded(*args, lane=None, **options):
        found = original(*args, lane=lane, **options)
        if lane is not None:
            stops.append(found)
        return found

    original = engine.runner.prefixes.stops
    with mock.patch.object(engine.runner.prefixes, "stops", recorded):
        for _ in range(3):
            (one,) = ask(engine, "evicts", [given], dataclasses.replace(SHORT, max_new_tokens=3))
            given = given + one.tokens + [7] * 13
    assert stops == [(16,), (), ()]


def test_turn_ended_by_stop_string_keeps_prompt():
    """The turn took over the pages of its session's state, and its answer becomes no state."""
    engine = engine_of("evicts", 4, prefix_cache=0)
    given = [story_tokens()[100 * each : 100 * each + 17] for each in range(1, 5)]
    short = dataclasses.replace(SHORT, max_new_tokens=3)
    with squeezed_with_prefixes(engine, 17 * 20):
        for turn in range(5):
            found = ask(engine, "evicts", given, short)
            given = [
                prompt + one.tokens + [5 + turn] * 6
                for prompt, one in zip(given, found, strict=True)
            ]
        prompt, long = given[-1] + [9] * 16, dataclasses.replace(SHORT, max_new_tokens=30)
        stop = answer(prompt, long, "evicts").text[8:11]
        (stopped,) = ask(engine, "evicts", [prompt], dataclasses.replace(long, stop=(stop,)))
        assert stopped.usage.cached_tokens == 55
        (again,) = ask(engine, "evicts", [prompt + stopped.tokens + [7] * 6], short)
        assert again.usage.cached_tokens >= 55


def test_questions_share_document_when_pool_is_short():
    engine, (prompt,) = engine_of("evicts", 2, prefix_cache=0), prompts((30,))
    with squeezed_with_prefixes(engine, 13 * 20):
        (first,) = ask(engine, "evicts", [prompt])
        start = prompt + first.tokens + story_tokens()[300:340]
        found = ask(engine, "evicts", [[*start, 5, 6, 7], [*start, 7, 6, 5]])
        assert cached(found) == [35, 72]


def test_state_that_another_queued_turn_continues_is_copied():
    """Two turns that fork after an answer both continue it, although room is short."""
    engine, (prompt,) = engine_of("evicts", 1, prefix_cache=0), prompts((30,))
    with squeezed_with_prefixes(engine, 7 * 20):
        (first,) = ask(engine, "evicts", [prompt])
        start = prompt + first.tokens
        assert cached(ask(engine, "evicts", [[*start, 5, 6, 7], [*start, 5, 7, 6]])) == [35, 35]


def test_prefixes_on_a_mesh_are_refused():
    model = dataclasses.replace(stories(), mesh=mock.Mock(spec=jax.sharding.Mesh))
    runner = mock.Mock(model=model)
    with pytest.raises(ConfigError, match=r"prefix_cache.*one device"):
        Prefixes(runner, 0)
    assert not Prefixes(runner, None).keeps


# -- at random -----------------------------------------------------------------------------------


def tree_of_prompts(choose: random.Random) -> list[list[int]]:
    """Prompts with common beginnings of random lengths."""
    given = [story_tokens()[: choose.randint(1, 20)]]
    for number in range(choose.randint(4, 10)):
        start = choose.choice(given)
        start = start[: choose.randint(0, len(start))] if choose.random() < 0.7 else start
        first = 50 * number + 1  # after the token that begins a text
        more = story_tokens()[first : first + choose.randint(1, 24)]
        given.append((start + more)[:40])
    return given


@pytest.mark.parametrize(
    ("name", "pages", "ends", "host"),
    [
        ("keeps", 9, (), 0),
        ("keeps", 14, ENDS, 1e6),
        ("evicts", 7, ENDS, 40_000),
        ("evicts", 10, (), 1e6),
        ("bounded", 8, ENDS, 1e6),
        ("cuts", 9, (), 40_000),
        ("cuts often", 12, ENDS, 0),
        ("might evict", 9, (), None),
    ],
)
@pytest.mark.parametrize(
    "seeds",
    [range(6, 14), *further(*(range(each, each + 125) for each in range(0, 625, 125)))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_random_prompt_trees_in_small_pools(name, pages, ends, host, seeds):
    """With evictions, cancellations and preemptions each answer is that of the request alone.

    Nightly: 5,000 trees.
    """
    engine = engine_of(name, 4, ends=ends, prefix_cache=host)
    told = collections.Counter()
    for seed in seeds:
        choose = random.Random(seed)
        given = tree_of_prompts(choose)
        samplings = [
            Sampling(
                temperature=float(number := choose.choice((0, 0, 1))),
                seed=number,
                max_new_tokens=choose.choice((1, 2, 9, 20)),
                stop=choose.choice(((), (), ("e",))),
            )
            for _ in given
        ]
        if host is None:  # a list, whose requests have one sampling
            samplings = [dataclasses.replace(samplings[0], stop=())] * len(given)
        order = choose.choices(range(len(given)), k=2 * len(given))
        requests = [
            make_request(
                engine.model.config, given[which], samplings[which], index=index, seed=sampling.seed
            )
            for index, which in enumerate(order)
            for sampling in [samplings[which]]
        ]
        mode = "heard" if host is None else "open"
        with squeezed_with_prefixes(engine, pages * 20):
            events = serve_at_random(engine, requests, choose, mode=mode)
            check_consistent(engine.runner.prefixes)
        told["preempted"] += len(events.preempted)
        for request in requests:
            want = answer(request.prompt, request.sampling, name, ends=ends)
            told[request.finish_reason] += 1
            told["cached"] += request.usage.cached_tokens
            if request.finish_reason == "cancelled":
                assert request.generated == want.tokens[: len(request.generated)]
            else:
                want.check(request)
    assert told["cached"] > 30
    assert told["cancelled"]
    assert told["preempted"] or (name, pages) not in (("keeps", 9), ("evicts", 7)), told


def check_consistent(prefixes: Prefixes) -> None:
    """Every page is free or has the right number of owners, on the device and on the host."""
    allocator = prefixes._allocator
    held = np.zeros_like(allocator._prefixes[0])
    for state in prefixes._on_device:
        held[state.pages] += 1
        assert state.node.state is state
    chex.assert_trees_all_equal(held, allocator._prefixes[0])
    assert not allocator._rows.any()
    assert not held[allocator._free[0]].any()
    if (host := prefixes._host) is None:
        assert not prefixes._on_host
        return
    uses = np.zeros_like(host._uses)
    for state in prefixes._on_host:
        uses[state.pages] += 1
        assert state.node.state is state
    chex.assert_trees_all_equal(uses, host._uses)
    assert sorted(host._free.tolist()) == np.flatnonzero(uses == 0).tolist()
    matched = np.flatnonzero(host._device_of >= 0)
    chex.assert_trees_all_equal(host._host_of[host._device_of[matched]], matched)
    assert np.count_nonzero(host._host_of >= 0) == len(matched)


def test_host_prefixes_are_dropped_with_adapter():
    engine, given = adapted_engine("evicts", 2, page_size=PAGE, prefix_cache=1e6), prompts((29,))
    engine.runner.recover()
    engine.runner.prefixes.clear()
    for adapter in ("a", "b"):
        engine.generate(given, sampling=SHORT, adapter=adapter)
    prefixes = engine.runner.prefixes
    prefixes._reclaim(0, prefixes._allocator.pages_of_prefixes)
    before = prefixes.counts
    engine.update(adapters={"a": adapted("a")})
    assert 0 < prefixes.counts.host_states < before.host_states
    assert 0 < prefixes.counts.host_bytes < before.host_bytes


@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_requests_overtake_those_that_wait_for_prefix(name):
    """No lane stays idle for the waiting request, and it runs next."""
    engine, other = engine_of(name, 4), story_tokens()[200:211]
    given = [DOCUMENT + QUESTIONS[0], DOCUMENT + QUESTIONS[1], other]
    order, start = [], Scheduler._start

    def noted(scheduler, started):
        order.append(sorted(each.index for each in started.values()))
        start(scheduler, started)

    with mock.patch.object(Scheduler, "_start", noted):
        ask(engine, name, given)
    assert order == [[0, 2], [1]]


def test_appending_policy_shares_pages():
    """The document is in the pool once, so five requests fit; without sharing two would."""
    engine = engine_of("keeps", 4)
    given = [DOCUMENT[:24] + question for question in QUESTIONS[:4]]
    ask(engine, "keeps", [[*DOCUMENT[:24], 7]])
    sampling = dataclasses.replace(SHORT, max_new_tokens=4)
    running = []
    with squeezed_with_prefixes(engine, (3 + 4 * 2) * 20):
        ask(engine, "keeps", [[*DOCUMENT[:24], 7]])
        found = engine.generate(
            given,
            sampling=sampling,
            on_tokens=lambda update: running.append(len(engine.running)),
        )
    for one, prompt in zip(found, given, strict=True):
        answer(prompt, sampling, "keeps").check(one)
    assert max(running) == 4


def test_states_of_delayed_eviction_share_frozen_pages():
    """A page that no continuation writes to is in the pool once, on the host too."""
    engine = engine_of("evicts", 4, prefix_cache=1e6)
    start = story_tokens()[:49]
    given = [start + question for question in QUESTIONS[:3]]
    for prompt in given:
        ask(engine, "evicts", [prompt])
    prefixes = engine.runner.prefixes
    states = [each for each in prefixes._on_device if each.node.depth >= 48]
    assert len(states) == 4  # the end of all prompts, and of each answer
    (document,) = (each for each in states if not each.ended)
    whole = int((document.frozen // PAGE).sum())
    assert whole >= document.frozen.size  # at least a page of each row
    for state in states:
        assert (state.lengths - state.frozen <= 11).all()  # the window and the newest token
        assert len(np.intersect1d(state.pages, document.pages)) in (whole, len(document.pages))
    once = prefixes._allocator.pages_of_prefixes
    assert once <= sum(len(each.pages) for each in prefixes._on_device) - 3 * whole
    held = np.unique(np.concatenate([each.pages for each in prefixes._on_device]))
    assert len(held) == once
    prefixes._reclaim(0, once)
    assert prefixes.counts.bytes == 0
    assert prefixes.counts.host_states >= 2
    assert cached(ask(engine, "evicts", given)) == [48] * 3


@pytest.mark.parametrize(("name", "own"), [("evicts", 2), ("bounded", 1)])
def test_least_recently_used_prefix_is_dropped_first(name, own):
    """The last prompt has used `own` states, of the prompt and of an earlier answer."""
    engine, (first, second) = engine_of(name, 4, prefix_cache=0), prompts((29, 27))
    for prompt in (first, second, first):
        ask(engine, name, [prompt])
    prefixes = engine.runner.prefixes
    states = list(prefixes._on_device)
    assert states[-own].node.depth == 24
    prefixes._reclaim(0, len(set(np.concatenate([each.pages for each in states[:-own]]).tolist())))
    assert list(prefixes._on_device) == states[-own:]
    assert cached(ask(engine, name, [second])) == [0]
    assert cached(ask(engine, name, [first])) == [24]


def test_prefixes_are_forgotten_with_the_cache():
    engine, (prompt,) = engine_of("evicts"), prompts((30,))
    ask(engine, "evicts", [prompt])
    engine.runner.release()
    assert engine.runner.prefixes.counts.states == 0
    assert cached(ask(engine, "evicts", [prompt])) == [0]


def test_host_copies_are_rate_limited(monkeypatch):
    """Copies beyond the rate are refused; one beyond the burst limit waits for a full allowance."""
    engine = engine_of("keeps", 2)
    states = engine.runner.prefixes
    monkeypatch.setattr(prefixes_module, "TO_HOST", 100.0)
    monkeypatch.setattr(prefixes_module, "TO_HOST_AT_ONCE", 1000.0)
    now = [0.0]
    monkeypatch.setattr(states, "clock", lambda: now[0])
    monkeypatch.setattr(states, "_may_copy", 1000.0)
    monkeypatch.setattr(states, "_asked", 0.0)
    takes = []
    for seconds, size in ((0, 600), (0, 500), (0.5, 500), (0.5, 500), (9, 5000), (0, 1), (40, 1)):
        now[0] += seconds
        takes.append(states._may_copy_now(size))
    assert takes == [True, False, False, True, False, True, True]
    now[0] += 100
    assert states._may_copy_now(5000)
    now[0] += 39
    assert not states._may_copy_now(1)
    now[0] += 2
    assert states._may_copy_now(1)
