"""Load and shutdown: disconnects, full queues, failures, metrics and draining."""

import dataclasses
import itertools
import json
import threading

import jax
import pytest

import dms_jax
from dms_jax.errors import CapacityError, CheckpointError, ConfigError, DataError
from dms_jax.generation import Sampling
from dms_jax.generation import engine as engine_module
from dms_jax.generation.grammar import Grammar
from dms_jax.serving import Delta, Service
from dms_jax.serving import service as service_module
from dms_jax.serving.app import OUT_OF_MEMORY
from dms_jax.serving.rpc import Cancel, Submit
from dms_jax.serving.service import QueueFullError
from tests.generation.support import answer
from tests.serving.support import (
    BODIES,
    LANES,
    SHAPE,
    hold_steps,
    make_service,
    serving,
    stories,
    wait_until,
)
from tests.support.fake_programs import BREAKS, BROKEN_TOKEN

pytestmark = pytest.mark.usefixtures("fakes")
LONG = dict(prompt="Once upon a time", max_tokens=150, temperature=0)


@pytest.fixture
def held(idle, monkeypatch):
    """The client, and the events of `hold_steps`."""
    go_on, waits = hold_steps(idle, monkeypatch)
    yield idle, go_on, waits
    go_on.set()


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(held, stream):
    client, go_on, waits = held
    before = client.metric("dms_jax_answers_total", "cancelled")
    connection = client.connect()
    connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": stream}))
    assert waits.wait(60)  # it has a lane
    connection.sock.shutdown(2)
    connection.close()
    wait_until(lambda: client.service._to_cancel)
    go_on.set()
    wait_until(lambda: not client.service.snapshot().pages_in_use and not client.service._jobs)
    assert client.metric("dms_jax_answers_total", "cancelled") == before + 1


def test_disconnect_before_a_lane_is_no_failure(held):
    client, go_on, waits = held

    def counts():
        return [client.metric("dms_jax_answers_total", each) for each in ("cancelled", "failed")]

    before = counts()
    thread = threading.Thread(target=client.ask, kwargs=LONG | {"max_tokens": 3})
    thread.start()
    assert waits.wait(60)
    connection = client.connect()
    connection.request("POST", "/v1/completions", json.dumps(LONG))
    wait_until(lambda: client.service._queue)
    connection.sock.shutdown(2)
    connection.close()
    wait_until(lambda: client.service._to_cancel)
    go_on.set()
    thread.join(60)
    wait_until(lambda: not client.service._jobs)
    wait_until(lambda: counts() == [before[0] + 1, before[1]])


@pytest.fixture
def compiling(idle, monkeypatch):
    """The client, an event that lets grammars compile, and one that is set when one waits."""
    go_on, waits = threading.Event(), threading.Event()

    def make_matchers(model, requests):
        if any(each.sampling.grammar is not None for each in requests):
            waits.set()
            assert go_on.wait(60)

    monkeypatch.setattr(engine_module, "make_matchers", make_matchers)
    yield idle, go_on, waits
    go_on.set()


def test_nothing_waits_for_a_grammar(compiling):
    """It may compile for seconds: neither its client nor others are kept from the engine."""
    client, go_on, waits = compiling
    before, connection = client.metric("dms_jax_answers_total", "cancelled"), client.connect()
    connection.request("POST", "/v1/completions", json.dumps(LONG | {"guided_regex": "a"}))
    assert waits.wait(60)
    assert client.get("/health")[0] == 200
    assert client.ask(prompt="Hello", max_tokens=1)["choices"]
    connection.sock.shutdown(2)
    connection.close()
    go_on.set()
    wait_until(lambda: client.metric("dms_jax_answers_total", "cancelled") == before + 1)


def test_cancelled_while_its_grammar_compiles(client, monkeypatch):
    go_on, cancelled, engine = threading.Event(), [], client.engine
    monkeypatch.setattr(client.service, "submit", lambda *given, **more: go_on.wait(60) and [5])
    monkeypatch.setattr(client.service, "cancel", lambda indices: cancelled.append([*indices]))
    sampling = Sampling(grammar=Grammar.regex("a"))
    engine._handle(Submit(-1, [[1]], sampling, adapter=None, priority=0))
    engine._handle(Cancel(-1))
    go_on.set()
    wait_until(lambda: cancelled == [[], [5]])
    assert -1 not in engine._indices


def test_full_queue_says_when_to_retry(held):
    client, go_on, _ = held
    answers = []
    ask = lambda: answers.append(client.ask(**LONG | {"max_tokens": 3}, n=LANES))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(client.service._jobs) == 3 * LANES)
    wait_until(lambda: client.service.snapshot().waiting)
    refused = client.metric("dms_jax_requests_total", 'status="429"')
    for path, body in BODIES.items():
        response = client.send(body | {"stream": path.startswith("/v1/chat")}, path=path)
        error = json.loads(response.read())["error"]
        assert (response.status, error["type"]) == (429, "rate_limit_error")
        assert error.get("code") == (None if path == "/v1/messages" else "rate_limit_exceeded")
        assert response.getheader("Retry-After") == "1"
        assert "12 requests run or wait already, of at most 12." in error["message"]
    assert client.metric("dms_jax_requests_total", 'status="429"') == refused + len(BODIES)
    assert client.get("/health")[0] == 200
    assert client.ask(**LONG, n=13, status=400)["error"]["message"].startswith("13 answers")
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert [len(answer["choices"]) for answer in answers] == [LANES] * 3


def test_full_queue_compiles_no_grammar(monkeypatch):
    service, compiled = make_service(), []
    monkeypatch.setattr(service.engine, "check_requests", compiled.append)
    monkeypatch.setattr(service, "_jobs", dict.fromkeys(range(service.max_requests)))
    with pytest.raises(QueueFullError):
        service.submit([[1]], Sampling(grammar=Grammar.regex("a"), max_new_tokens=1), print)
    assert not compiled


def test_too_complex_grammar_fails_its_request_alone(monkeypatch):
    """llguidance finds out after the first token; the other answer runs on."""
    ending = dataclasses.replace(stories().generation, eos_token_ids=(2,))
    model = dataclasses.replace(stories(), generation=ending)
    service, told = make_service(model=model, num_lanes=2), {"limited": [], "free": []}
    monkeypatch.setattr(service, "_recover", None)  # which would compute it again
    free = Sampling(temperature=0, max_new_tokens=30, ignore_eos=True)
    limited = dataclasses.replace(free, ignore_eos=False, grammar=Grammar.regex("a{1000000}"))
    with service._changed:
        service.submit([[1, 70, 90]], limited, told["limited"].append)
        service.submit([[1, 70, 90]], free, told["free"].append)
    service.start()
    assert service.drain(60.0)
    assert all(isinstance(each, Delta) for each in (*told["free"], *told["limited"][:-1]))
    assert told["free"][-1].completion.finish_reason == "length"
    error = told["limited"][-1]
    assert isinstance(error, DataError)
    assert "cannot be followed to its end: " in str(error)
    assert service.snapshot().pages_in_use == 0


def test_lower_priority_number_comes_first():
    service, ended = make_service(num_lanes=1), []

    def listener(name):
        return lambda delta: delta.completion is not None and ended.append(name)

    sampling = Sampling(temperature=0, max_new_tokens=5)
    with service._changed:  # so that they are let in together
        for name, priority in (("later", 3), ("first", 0), ("urgent", -3), ("second", 0)):
            service.submit([[1, 70, 90]], sampling, listener(name), priority=priority)
    service.start()
    assert service.drain(60.0)
    assert ended == ["urgent", "first", "second", "later"]


def test_metrics(idle, monkeypatch):
    client, go_on = idle, threading.Event()
    runner, chunks = client.service.engine.runner, itertools.count()
    decode = runner.decode

    def held_after_the_first(*given, **more):
        assert next(chunks) == 0 or go_on.wait(60)
        return decode(*given, **more)

    monkeypatch.setattr(runner, "decode", held_after_the_first)
    names = ("prompt_tokens_total", "generation_tokens_total", "kv_reads_total")
    before = {name: client.metric(f"dms_jax_{name}") for name in names}
    done = []
    thread = threading.Thread(target=lambda: done.append(client.ask(**LONG)))
    thread.start()
    wait_until(lambda: client.metric("dms_jax_running") == 1)
    assert client.metric("dms_jax_live_tokens") > 0
    in_use = client.metric("dms_jax_pages_in_use")
    go_on.set()
    thread.join(60)
    usage = done[0]["usage"]
    wait_until(lambda: client.metric("dms_jax_running") == 0)
    assert in_use > 0 == client.metric("dms_jax_pages_in_use")
    assert client.metric("dms_jax_pages_free") == client.service._pages
    assert client.metric("dms_jax_waiting") == 0
    spent = [client.metric(f"dms_jax_{name}") - before[name] for name in names]
    kept = (usage["prompt_tokens"], usage["completion_tokens"], usage["kv_cache"]["kv_reads"])
    assert spent == pytest.approx(kept)


def test_error_ends_only_running_requests(held, monkeypatch):
    client, go_on, _ = held
    runner, errors = client.service.engine.runner, [CapacityError("it is full"), ValueError("oh")]
    failed = client.metric("dms_jax_answers_total", "failed")
    decode = runner.decode

    def failing(*given, **more):
        assert go_on.wait(60)
        if errors:
            raise errors.pop(0)
        return decode(*given, **more)

    monkeypatch.setattr(runner, "decode", failing)
    answers = {}

    def ask(name, **body):
        response = client.send(LONG | {"max_tokens": 3} | body)
        answers[name] = response.status, response.read().decode()

    whole = threading.Thread(target=ask, args=("whole",), kwargs=dict(n=LANES))
    whole.start()
    wait_until(lambda: len(client.service._jobs) == LANES)
    later = [threading.Thread(target=ask, args=("stream",), kwargs=dict(n=LANES, stream=True))]
    later[0].start()
    wait_until(lambda: len(client.service._jobs) == 2 * LANES)
    later.append(threading.Thread(target=ask, args=("last",)))
    later[1].start()
    wait_until(lambda: len(client.service._jobs) == 2 * LANES + 1)
    go_on.set()
    for thread in (whole, *later):
        thread.join(60)
    status, text = answers["whole"]  # in terms of the request, not of the engine
    assert status == 400
    error = json.loads(text)["error"]
    assert error["code"] == "context_length_exceeded"
    prompt = len(stories().tokenizer.encode(LONG["prompt"]))
    assert error["message"] == (
        f"The prompt of {prompt} tokens with its answer of up to 3 does not fit into the cache "
        f"here, even alone: it was full at token {prompt} of these. Shorten the prompt, or ask "
        "for a shorter answer."
    )
    status, text = answers["stream"]  # its stream had begun, so the error is its last event
    assert status == 200
    assert json.loads(text.split("data: ")[-1])["error"]["type"] == "server_error"
    status, text = answers["last"]
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] == 3
    assert client.metric("dms_jax_answers_total", "failed") == failed + 2 * LANES


@pytest.mark.parametrize("stream", [True, False])
def test_out_of_memory_is_a_server_error(idle, monkeypatch, stream):
    runner = idle.service.engine.runner
    decode, errors = runner.decode, [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 bytes")]
    monkeypatch.setattr(
        runner,
        "decode",
        lambda *given, **more: refuse(*given) if errors else decode(*given, **more),
    )

    def refuse(*_):
        raise errors.pop()

    response = idle.send(LONG | {"max_tokens": 3, "stream": stream})
    error = json.loads(response.read().decode().split("data: ")[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "out_of_memory")
    assert error["message"] == OUT_OF_MEMORY
    if not stream:
        assert (response.status, response.getheader("Retry-After")) == (503, "1")
    assert idle.ask(**LONG | {"max_tokens": 3})["usage"]["completion_tokens"] == 3


def test_cancel_survives_failed_chunk(monkeypatch):
    """A queued request is cancelled during a prefill that fails."""
    service, deltas = make_service(num_lanes=1), ([], [])
    runner, calls = service.engine.runner, []
    extend, collect_prompts = runner.extend, runner.reservation.collect_prompts

    def cancelling(*given, **more):
        calls.append(more)
        if len(calls) == 1:
            service.cancel([1])
        return extend(*given, **more)

    def failing():
        if service.engine._call.scheduler.cancelled and len(calls) == 1:
            assert service.engine._call.scheduler.cancelled == {1}
            calls.append({})
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 bytes")
        collect_prompts()

    monkeypatch.setattr(runner, "extend", cancelling)
    monkeypatch.setattr(runner.reservation, "collect_prompts", failing)
    with service._changed:
        for prompt, heard in zip([[1] * 40, [1, 70, 90]], deltas, strict=True):
            service.submit([prompt], Sampling(temperature=0, max_new_tokens=5), heard.append)
    service.start()
    wait_until(lambda: not service._jobs)
    assert service.drain(60.0)
    assert [str(error) for error in deltas[1]] == ["The request was cancelled."]
    assert isinstance(deltas[0][0], Exception)
    assert len(calls) == 2


def test_preempted_request_continues_after_capacity_error(monkeypatch):
    """The younger request is preempted with a partial answer, and the older outgrows the pool."""
    service, sampling = make_service(), Sampling(temperature=0, max_new_tokens=24, stop="quite")
    engine, fits = service.engine, service.engine.runner.reservation.fits
    prompts = [[1, 70, 90], [1, 300, 200]]
    deltas: dict[int, list] = {}

    def full(extra, **options):
        running = engine.running
        if len(running) == 2 and all(len(each.generated) > 8 for each in running):
            return False
        alone = len(running) == 1 and len(running[0].generated) > 8
        return not (alone and running[0].index == 0) and fits(extra, **options)

    def told(number):
        def listen(delta):
            deltas.setdefault(number, []).append(delta)

        return listen

    service.start()
    service.submit(prompts[1:], sampling, told(2))
    wait_until(lambda: not service._jobs)
    monkeypatch.setattr(engine.runner.reservation, "fits", full)
    service._indices = itertools.count()
    with service._changed:  # so that they are let in together
        for number, prompt in enumerate(prompts):
            service.submit([prompt], sampling, told(number))
    wait_until(lambda: not service._jobs)
    assert service.drain(60.0)
    assert isinstance(deltas[0][-1], CapacityError)
    told = sum(len(delta.tokens) for delta in deltas[0][:-1])
    assert "prompt of 3 tokens with its answer of up to 24 does not" in str(deltas[0][-1])
    assert f"full at token {3 + told} of these" in str(deltas[0][-1])
    assert deltas[1][-1].completion.tokens == deltas[2][-1].completion.tokens
    tokens = [token for each in deltas[1] for token in each.tokens]
    assert tokens == deltas[1][-1].completion.tokens
    assert "".join(each.text for each in deltas[1]) == deltas[1][-1].completion.text
    assert deltas[1][-1].completion.usage.prefilled_tokens > len(prompts[1])  # it was put back


def together(model, prompts, sampling):
    """Returns the answers of a service to simultaneous prompts: tokens or an error."""
    deltas: dict[int, list] = {number: [] for number in range(len(prompts))}
    service = Service(model, num_lanes=LANES, max_tokens=64, **SHAPE)
    with service._changed:  # so that they are let in together
        for number, prompt in enumerate(prompts):
            service.submit([prompt], sampling, deltas[number].append)
    service.start()
    wait_until(lambda: not service._jobs)
    assert service.drain(60.0)
    for own in deltas.values():
        told = [token for delta in own if isinstance(delta, Delta) for token in delta.tokens]
        last = own[-1]
        assert isinstance(last, Exception) or told == last.completion.tokens
        yield last if isinstance(last, Exception) else told


def test_nan_logits_end_only_their_request():
    """After a token that occurs in one prompt, and later in one answer."""
    sampling = Sampling(temperature=1.0, seed=BREAKS, max_new_tokens=12)
    prompts = [[1, number] for number in range(10, 200)]
    wants = {tuple(prompt): answer(prompt, sampling) for prompt in prompts}
    fine = [each for each in prompts if wants[tuple(each)].broken is None][:2]
    late = next(each for each in prompts if (wants[tuple(each)].broken or 0) > len(each) + 3)
    asked = [*fine, late, [1, 40, BROKEN_TOKEN]]
    *found, first, second = together(stories(), asked, sampling)
    assert found == [wants[tuple(each)].tokens for each in fine]
    for error, place in ((first, wants[tuple(late)].broken), (second, 3)):
        assert isinstance(error, CheckpointError)
        assert f"not numbers (NaN) at token {place} of prompt" in str(error)


def test_request_that_cannot_fit_is_refused():
    service = make_service(memory=40_000, max_tokens=400)
    sampling = service_module.Sampling(max_new_tokens=10)
    with pytest.raises(CapacityError, match=r"room for at least \d+ .* has room for \d+"):
        service.submit([[1] * 380], sampling, print)
    with pytest.raises(service_module.DataError, match="a sequence may have 400"):
        service.submit([[1] * 395], sampling, print)
    with pytest.raises(ConfigError, match=r"There is no adapter \['a'\]"):
        service.submit([[1] * 395], sampling, print, adapter=["a"])
    assert service.drain(1.0)


def test_prompt_must_fit_before_cut():
    options, asked = dict(memory=200_000, max_tokens=460), ([[1] * 200], Sampling(), print)
    assert make_service(**options).submit(*asked) == [0]
    cut = make_service(dms_jax.TOVA(budget=24), **options)
    with pytest.raises(CapacityError, match=r"at least 200 .* has room for 144"):
        cut.submit(*asked)  # the 25 slots that remain after the cut would fit


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_drain_waits_with_timeout(monkeypatch, seconds):
    drained = []
    with serving() as client:
        go_on, begun = hold_steps(client, monkeypatch)
        kept = client.connect()
        kept.connect()
        responses, texts = [], []

        def stream():
            response = client.send(LONG | {"stream": True})
            responses.append(response)
            texts.append(response.read().decode())

        thread = threading.Thread(target=stream)
        thread.start()
        assert begun.wait(60)
        client.engine.stop()
        assert client.service.draining
        drain = threading.Thread(target=lambda: drained.append(client.service.drain(seconds)))
        drain.start()
        with pytest.raises(OSError, match=r"refused|reset|closed|Remote"):  # nobody listens
            wait_until(lambda: client.get("/health")[0] == 0, 10)
        if not seconds:
            wait_until(lambda: client.service._to_cancel)
        go_on.set()
        thread.join(60)
        drain.join(60)
        last = texts[0].split("data: ")[-1].strip()
        if seconds:
            assert last == "[DONE]"
        else:
            assert json.loads(last)["error"]["code"] == "server_draining"
    assert drained == [bool(seconds)]
    assert not client.service.snapshot().alive
    assert client.service.engine.runner.reservation.allocator.pages_in_use == 0


def test_draining_service_refuses_requests():
    service = make_service()
    service.start()
    assert service.drain(5.0)
    with pytest.raises(service_module.DrainingError, match="about to end"):
        service.submit([[1, 2]], service_module.Sampling(max_new_tokens=3), print)
    assert not service.snapshot().alive
