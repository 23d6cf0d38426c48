"""The last steps of a chunk run on while lanes are given away, and change nothing."""

import dataclasses

import pytest

from dms_jax.generation import compiling, programs
from dms_jax.generation import launched as launched_programs
from dms_jax.generation.launched import Launched
from dms_jax.generation.reporting import Reporter
from dms_jax.generation.requests import NotNumbersError, make_request, make_requests
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    POLICIES,
    SHAPE,
    engine_for,
    prompts,
    text_behind,
)
from tests.generation.test_ahead import SIX, TWO, noted, spelled
from tests.generation.test_generate import same_usage
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("two_programs", "unfiltered")


def arrived(engine, requests, on_tokens=None):
    """Serves requests that come together while the engine waits for some."""
    coming = [requests]
    engine.serve([], GREEDY, on_tokens, incoming=lambda wait: coming.pop() if coming else None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "fewest"),
    [*((name, 4) for name in POLICIES), ("vanilla", 8), ("dms", 8)],
    ids=[*POLICIES, "vanilla in one program", "dms in one program"],
)
def test_the_last_steps_of_a_chunk_run_while_prompts_take_the_lanes_of_others(
    name, fewest, monkeypatch
):
    """Answers and every figure of usage are those of chunks that run in turn."""
    engine, order = engine_for(name), []
    lengths = (3, 9, 20, 6, 17, 12, 1, 20, 11)
    launch, read = compiling.Program.__call__, Runner.read
    known = {programs.extend: "prompts", programs.first_tokens: "first", programs.decode: "steps"}
    unread = 0

    def launched(program, *arguments):
        nonlocal unread
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
        return engine.serve(requests, GREEDY, on_tokens)

    expected = answers(lambda update: None)
    with monkeypatch.context() as patch:
        patch.setattr(launched_programs, "_FEWEST_STEPS", fewest)
        patch.setattr(compiling.Program, "__call__", launched)
        patch.setattr(Runner, "read", fetched)
        found = answers(None)
    for one, other in zip(found, expected, strict=True):  # prompts were read beside others
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert dataclasses.replace(one, logprobs=other.logprobs) == other
    # A lane was given away, and its first token and next ones drawn, while steps ran.
    assert {name for name, before in order if before} == set(known.values())
    assert unread == 0  # nothing is left on the device
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.runner.unread.any()


@pytest.mark.parametrize("name", ["dms", *further("quest", "vanilla")])
def test_a_lane_is_given_away_while_the_answer_that_a_stop_string_ended_goes_on(name, monkeypatch):
    """The device does not know that it has ended: what it gives there is nobody's."""
    engine, given_away, settle, clear = engine_for(name), [], Reporter.settle, Runner.clear
    text = engine.model.tokenizer.decode
    alone = [engine.generate([prompt], sampling=GREEDY)[0] for prompt in SIX]
    running_on = []

    def cleared(runner, lanes):
        given_away.extend(lane for lane in lanes if runner.unread[lane])
        clear(runner, lanes)

    def settled(reporter, *arguments):
        running_on.append(bool(reporter.runner.unread.any()))
        settle(reporter, *arguments)

    monkeypatch.setattr(Reporter, "settle", settled)
    monkeypatch.setattr(Runner, "clear", cleared)
    # The third to fifth token of each is the end of its answer.
    stops = [text(each.tokens[2:5]).strip() for each in alone]
    samplings = [dataclasses.replace(GREEDY, stop=stop) for stop in stops]
    want = [engine.generate([SIX[i]], sampling=each)[0] for i, each in enumerate(samplings)]
    assert {each.finish_reason for each in want} == {"stop"}
    requests = [
        make_request(engine.model.config, prompt, sampling, index=index)
        for index, (prompt, sampling) in enumerate(zip(SIX, samplings, strict=True))
    ]
    given_away.clear()
    running_on.clear()
    arrived(engine, requests, lambda update: None)
    assert any(running_on)
    assert given_away
    for request, one in zip(requests, want, strict=True):
        assert (request.generated, request.text) == (one.tokens, one.text)
        assert request.finish_reason == "stop"
        same_usage(request.usage, one.usage)
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.runner.unread.any()


def test_what_the_last_steps_of_a_chunk_gave_is_told_while_the_next_ones_run(monkeypatch):
    """An answer that ends with a chunk is not told behind the next one."""
    engine, order = engine_for("vanilla"), noted(monkeypatch)
    requests = make_requests(engine.model.config, prompts((5, 7)), GREEDY)
    requests[0].max_new_tokens = 1 + SHAPE["chunk"]

    def told(update):
        if update.finished:
            order.append(f"end {update.index}")

    arrived(engine, requests, told)
    assert order == [*spelled("LL R LL R"), "end 0", *spelled("R L R R"), "end 1"]


def test_steps_that_run_on_for_nobody_are_read_before_the_engine_waits_or_ends(monkeypatch):
    """A stop string has ended the only answer, of which is told first."""
    engine = engine_for("vanilla")
    (whole,) = engine.generate(TWO[:1], sampling=GREEDY)
    stop = text_behind(TWO[0], whole.tokens[:4])[-3:]
    sampling = dataclasses.replace(GREEDY, stop=stop)
    requests = [make_request(engine.model.config, TWO[0], sampling, index=i) for i in range(2)]
    coming, order = list(requests), noted(monkeypatch)

    def incoming(wait):
        if not wait:
            return []
        order.append("wait")
        return [coming.pop(0)] if coming else None

    def told(update):
        if update.finished:
            order.append("end")

    engine.serve([], GREEDY, told, incoming=incoming)
    assert {request.finish_reason for request in requests} == {"stop"}
    assert order == ["wait", *[*spelled("LL R"), "end", "read", "wait"] * 2]


@pytest.mark.nightly
@pytest.mark.parametrize("wider", [False, True])
def test_a_wider_program_waits_for_the_steps_that_run_on(wider, monkeypatch):
    """The table would be wider than that of exact lengths: they are read first."""
    engine, order = engine_for("dms"), noted(monkeypatch)
    if wider:
        monkeypatch.setattr(type(engine.runner), "fits_table", lambda *_: False)
    arrived(engine, make_requests(engine.model.config, prompts((5, 7)), GREEDY))
    assert order == spelled("LL RR LL RR L R" if wider else "LL R LL RR L RR")


def test_an_answer_that_has_ended_reads_its_whole_prompt_again_after_an_error(monkeypatch):
    """It was drawn, and before anybody was told, steps of another one failed that ran on."""
    engine, (short, prompt) = engine_for("vanilla"), prompts((5, 20))
    (alone,) = engine.generate([prompt], sampling=GREEDY)
    wrong, ended, other = make_requests(engine.model.config, [short, prompt, short], GREEDY)
    ended.max_new_tokens = 1
    read_chunk = Launched.read_chunk

    def failing(launched):
        if ended.generated and not other.generated:
            raise NotNumbersError("steps that ran on", [wrong.index])
        read_chunk(launched)

    monkeypatch.setattr(Launched, "read_chunk", failing)
    with pytest.raises(NotNumbersError):
        arrived(engine, [wrong, ended])
    assert (ended.generated, ended.finish_reason) == (alone.tokens[:1], None)
    coming = [[ended], [other]]  # which decodes while the prompt is read
    engine.serve([], GREEDY, incoming=lambda wait: coming.pop() if coming else None)
    assert (ended.generated, ended.finish_reason) == (alone.tokens[:1], "length")
    assert ended.usage is not None
    assert ended.usage.prefilled_tokens == 2 * len(prompt)
    assert engine.runner.allocator.pages_in_use == 0
