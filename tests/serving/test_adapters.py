"""Adapters over HTTP: the `model` of a request selects one, on every endpoint."""

import concurrent.futures
import dataclasses
import json
import threading

import pytest

import dms_jax
from dms_jax.serving.service import DrainingError
from tests.generation.support import adapted
from tests.serving.support import BODIES, BOUNDED, make_service, serving, stories, wait_until
from tests.support.fake_programs import answer_of

pytestmark = pytest.mark.usefixtures("fakes")
MODELS = ["stories", "a", "b"]  # in slots 0, 1 and 2
PROMPT = "Once upon a time there was a girl who had a dog and a red ball, and then"


@pytest.fixture
def client():
    with serving(adapters={name: adapted(name) for name in "ab"}, prefix_cache=1e6) as made:
        yield made


def expected(slot: int, new_tokens: int) -> str:
    """Returns the fakes' answer to the prompt under the adapter of a slot."""
    tokenizer = stories().tokenizer
    prompt = tokenizer.encode(PROMPT)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=new_tokens)
    tokens = answer_of(prompt, sampling, BOUNDED, slot=slot).tokens
    return tokenizer.decode([*prompt, *tokens]).removeprefix(tokenizer.decode(prompt))


def test_requests_select_adapter_by_model(client):
    """All together in four lanes, twice: the second time from the prefixes of each adapter."""
    body = dict(prompt=PROMPT, temperature=0, max_tokens=24)
    asked = [*MODELS, None] * 3
    for cached in (False, True):
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            ask = lambda name: client.ask(**body | ({"model": name} if name else {}))  # noqa: E731
            answers = list(pool.map(ask, asked))
        for name, answer in zip(asked, answers, strict=True):
            slot = MODELS.index(name or "stories")
            assert answer["choices"][0]["text"] == expected(slot, 24)
            assert answer["model"] == MODELS[slot]
        hits = sum(
            answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in answers
        )
        assert hits >= 3 * cached  # others copy one that runs
    assert len({expected(slot, 24) for slot in range(3)}) == 3


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_model_names(client, path):
    for name in MODELS:
        response = client.send(BODIES[path] | {"model": name}, path=path)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        assert answer["model"] == name
    response = client.send(BODIES[path] | {"model": "c"}, path=path)
    message = json.loads(response.read())["error"]["message"]
    assert response.status == 404
    assert message == "There is no model 'c' here, only 'stories', 'a', 'b'."


def test_streams_and_tokenize_take_model_names(client):
    chunks = client.stream(prompt=PROMPT, temperature=0, max_tokens=8, model="b")
    assert {chunk["model"] for chunk in chunks} == {"b"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected(2, 8)
    response = client.send({"model": "a", "prompt": "Hi"}, path="/tokenize")
    assert response.status == 200
    assert client.send({"model": "c", "prompt": "Hi"}, path="/tokenize").status == 404


def test_models_lists_base_and_adapters(client):
    status, text = client.get("/v1/models")
    cards = json.loads(text)["data"]
    assert (status, [card["id"] for card in cards]) == (200, MODELS)
    for card in cards:
        assert json.loads(client.get(f"/v1/models/{card['id']}")[1]) == card
    assert client.get("/v1/models/c")[0] == 404


# -- changes -------------------------------------------------------------------------------------


def tokens() -> list[int]:
    return stories().tokenizer.encode(PROMPT)


def test_adapter_is_replaced_between_requests():
    """Running requests finish with the old adapter, new ones wait, other adapters go on."""
    service, new = make_service(adapters={each: adapted(each) for each in "ab"}), adapted("c")
    old = service.engine.runner.slots
    threads, log, ends = [], [], {name: threading.Event() for name in ("first", "later", "b")}
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=60)

    def submit(name: str, adapter: str, begun=lambda: None) -> None:
        def listen(delta):
            assert not isinstance(delta, Exception)
            log.append((name, service.engine.runner.slots is old))
            if len(log) == 1:
                begun()
            if delta.completion is not None:
                ends[name].set()

        service.submit([tokens()], sampling, listen, adapter=adapter)

    def replace():
        threads.append(threading.Thread(target=service.replace_adapter, args=("a", new)))
        threads[0].start()
        wait_until(lambda: "a" in service._changes)
        with pytest.raises(dms_jax.BusyError, match="'a' is being replaced already"):
            service.replace_adapter("a", new)
        submit("later", "a")
        submit("b", "b")

    service.start()
    submit("first", "a", begun=replace)
    try:
        for each in ends.values():
            assert each.wait(60)
        threads[0].join(60)
    finally:
        service.drain(0.0)
    assert {before for name, before in log if name == "first"} == {True}
    assert {before for name, before in log if name == "later"} == {False}
    assert ("b", True) in log  # beside the first request, not after the change
    assert service.engine.runner.slots.adapters[1] is not old.adapters[1]
    with pytest.raises(DrainingError, match="about to end"):
        service.replace_adapter("a", new)


def test_pending_replacement_ends_with_service(monkeypatch):
    service, refused = make_service(adapters={"a": adapted("a")}), []

    def fail(source):
        raise dms_jax.CapacityError("The pool is full.")

    def replace():
        with pytest.raises(DrainingError, match="about to end") as error:
            service.replace_adapter("a", adapted("a"))
        refused.append(error)

    monkeypatch.setattr(service.engine, "serve", fail)
    service.submit([tokens()], dms_jax.Sampling(max_new_tokens=4), print, adapter="a")
    thread = threading.Thread(target=replace, daemon=True)
    thread.start()
    wait_until(lambda: "a" in service._changes)
    service.close()
    service.start()
    thread.join(60)
    assert refused


def test_client_replaces_adapter_if_allowed(tmp_path, monkeypatch):
    base = dms_jax.load(dms_jax.assets.path("stories260k"))
    base = dataclasses.replace(base, generation=stories().generation)
    dms_jax.save(
        dataclasses.replace(adapted("c"), source=base.source),
        base.policy,
        tmp_path / "c",
        adapter_only=True,
    )
    adapters = {name: adapted(name) for name in "ab"}
    with serving(model=base, adapters=adapters, changes_adapters=True) as client:

        def load(status: int, **fields):
            response = client.send(fields, path="/v1/load_lora_adapter")
            answer = json.loads(response.read())
            assert response.status == status, answer
            return answer

        before = client.service.engine.runner.slots.adapters
        shipped = str(dms_jax.assets.path("smollm2-135m-instruct-dms"))
        for status, name, path, said in (
            (404, "d", "x", "no adapter 'd' here to be replaced, only 'a', 'b'. Others are named"),
            (404, "stories", "x", "no adapter 'stories' here to be replaced, only 'a', 'b'."),
            (400, "a", str(tmp_path / "no"), "adapter 'a': there is no directory"),
            (400, "a", str(tmp_path / ("no" * 500)), "cannot be read: [Errno"),
            (400, "a", shipped, "trained on another base"),
            (400, "a", None, "lora_path must be a text, got None"),
        ):
            assert said in load(status, lora_name=name, lora_path=path)["error"]["message"]
        assert client.service.engine.runner.slots.adapters[1] is before[1]
        with monkeypatch.context() as patch:  # another client's is on its way
            patch.setitem(client.service._changes, "a", None)
            patch.setattr(client.service, "_replace_adapters", lambda queued: None)
            fields = dict(lora_name="a", lora_path=str(tmp_path / "c"))
            response = client.send(fields, path="/v1/load_lora_adapter")
            assert (response.status, response.getheader("Retry-After")) == (409, "1")
            assert b"is being replaced already" in response.read()
        assert load(200, lora_name="a", lora_path=str(tmp_path / "c"))["id"] == "a"
        after = client.service.engine.runner.slots.adapters
        assert [x is y for x, y in zip(before, after, strict=True)][1:] == [False, True]
        assert client.ask(prompt=PROMPT, model="a", max_tokens=4)["model"] == "a"


def test_client_cannot_replace_adapter_by_default(client):
    response = client.send({"lora_name": "a", "lora_path": "x"}, path="/v1/load_lora_adapter")
    assert response.status == 404
    response.read()
