"""While the device is idle, the host does only the work that the next launch needs."""

import collections
import itertools
import threading

import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import programs, scheduler
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests, record_usage
from dms_jax.generation.runner import Runner
from tests.generation.support import host_engine, prompts

pytestmark = pytest.mark.usefixtures("fakes")
SAMPLED = dms_jax.Sampling(temperature=0.8, max_new_tokens=20, logprobs=True)
NAMES = {"extend": "prompts", "first_tokens": "first", "decode": "steps"}


def events_of(call, monkeypatch) -> list[str]:
    """Returns launches, waits, collections and usage records in order."""
    order: list[str] = []
    own = threading.get_ident()
    launch, read = programs.Program.__call__, Runner.collect
    known = {getattr(programs, name): told for name, told in NAMES.items()}

    def note(event):  # not of programs that an earlier test left running
        if threading.get_ident() == own:
            order.append(event)

    def launched(program, *arguments):
        results = launch(program, *arguments)
        if program in known:
            note(known[program])
        return results

    def chunk(runner, *arguments):
        note("chunk:")
        steps = read(runner, *arguments)
        note(":chunk")
        return steps

    def used(*arguments, **options):
        note("usage")
        record_usage(*arguments, **options)

    def watched(function):
        def waited(tree, *arguments, **options):
            leaves = jax.tree.leaves(tree)
            if any(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves):
                note("wait")
            return function(tree, *arguments, **options)

        return waited

    call()  # which compiles
    with monkeypatch.context() as patch:
        patch.setattr(programs.Program, "__call__", launched)
        patch.setattr(Runner, "collect", chunk)
        patch.setattr(scheduler, "record_usage", used)
        for owner, name in (
            (np, "asarray"),
            (np, "array"),
            (jax, "device_get"),
            (jax, "block_until_ready"),
        ):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        call()
    return order


def turns_of(order: list[str]) -> list[list[str]]:
    """Returns the events of each period in which the device is idle, up to the next launch.

    Programs launched before collected steps have run as well.
    """
    turns: list[list[str]] = []
    on_device: list[str] = []
    for event in order:
        if event == ":chunk":
            del on_device[: on_device.index("steps") + 1]
            if not on_device:
                turns.append([])
            continue
        if not on_device and turns:
            turns[-1].append(event)
        if event in NAMES.values():
            on_device.append(event)
    return turns


@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded"])
@pytest.mark.parametrize("joined", [False, True], ids=["call", "arrivals"])
def test_host_waits_for_nothing_between_chunk_and_next_launch(name, joined, monkeypatch):
    """It waits neither for keys of new requests nor for lengths; usage is recorded later."""
    engine = host_engine(name, prefill_chunk=32)
    given = prompts((5, 30, 1, 13, 9, 7))

    def call():
        requests = make_requests(engine.model.config, given, SAMPLED)
        for request, count in zip(requests, (9, 20, 12, 7, 17, 20), strict=True):
            request.max_new_tokens = count
        if not joined:
            engine.serve(Source(requests, SAMPLED))
            return
        coming = collections.deque([requests[:4], [], requests[4:]])
        engine.serve(
            Source(
                [],
                SAMPLED,
                on_tokens=lambda update: None,
                incoming=lambda wait: coming.popleft() if coming else None,
            )
        )

    order = events_of(call, monkeypatch)
    chunks = [order[i + 1 : order.index(":chunk", i)] for i, x in enumerate(order) if x == "chunk:"]
    assert chunks == [["wait"]] * len(chunks)  # in one transfer
    turns = turns_of(order)
    assert len(turns) >= 2
    for each in turns[:-1]:
        assert each[0] in ("prompts", "steps"), turns  # no usage record and no wait
    assert set(turns[-1]) <= {"usage"}, turns
    unread = np.cumsum([(each == "steps") - (each == ":chunk") for each in order])
    while_steps_run = {each for each, before in zip(order[1:], unread, strict=False) if before}
    assert set(NAMES.values()) <= while_steps_run
    assert order.count("first") >= 3
    assert order.count("usage") == len(given)


@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded"])
def test_parts_of_prompt_leave_device_no_gap(name, monkeypatch):
    """The next part and its steps are launched before the last ones are collected.

    The host waits for no prompt until it ends, so the device is never idle between two parts.
    """
    engine = host_engine(name, 8, prefill_chunk=4, prefill_tokens=4)
    given = [*prompts((3, 4, 2, 3)), prompts((40,))[0]]

    def call():
        requests = make_requests(engine.model.config, given, SAMPLED)
        for request in requests[:4]:
            request.max_new_tokens = 50
        coming = collections.deque([requests[:4], [], requests[4:]])
        engine.serve(
            Source(
                [],
                SAMPLED,
                on_tokens=lambda update: None,
                incoming=lambda wait: coming.popleft() if coming else None,
            )
        )

    order = [each for each in events_of(call, monkeypatch) if each != "usage"]
    parts = [place for place, each in enumerate(order) if each == "prompts"]
    between = [order[a:b] for a, b in itertools.pairwise(parts)][-8:]
    lengths = [] if name == "keeps" else ["wait"]  # of the previous part, which has run by then
    for each in between:  # of the last programs only the earlier steps are read
        assert each == ["prompts", *lengths, "steps", "chunk:", "wait", ":chunk"], between
