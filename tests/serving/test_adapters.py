"""Adapters by name over HTTP: the `model` of a request says which, on every address."""

import concurrent.futures
import json

import pytest

import dms_jax
from tests.generation.support import adapted
from tests.serving.support import BOUNDED, serving, stories
from tests.support.fake_programs import answer_of

pytestmark = pytest.mark.usefixtures("fakes")
MODELS = ["stories", "a", "b"]  # in slots 0, 1 and 2
PROMPT = "Once upon a time there was a girl who had a dog and a red ball, and then"


@pytest.fixture
def client():
    with serving(adapters={name: adapted(name) for name in "ab"}, prefix_cache=1e6) as made:
        yield made


def expected(slot: int, new_tokens: int) -> str:
    """What the fakes answer to the prompt under the adapter of a slot."""
    tokenizer = stories().tokenizer
    prompt = tokenizer.encode(PROMPT)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=new_tokens)
    tokens = answer_of(prompt, sampling, BOUNDED, slot=slot).tokens
    return tokenizer.decode([*prompt, *tokens]).removeprefix(tokenizer.decode(prompt))


def test_each_request_is_answered_by_the_model_that_it_names(client):
    """All at once in four lanes, twice: the second time from prefixes, each of its own adapter."""
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


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "model"),
        ("/v1/responses", {"input": "Hi"}, "model"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            "model",
        ),
    ],
)
def test_every_address_takes_names_and_says_them(client, path, content, said):
    for name in MODELS:
        response = client.send(content | {"model": name}, path=path)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        assert answer[said] == name
    response = client.send(content | {"model": "c"}, path=path)
    message = json.loads(response.read())["error"]["message"]
    assert response.status == 404
    assert message == "There is no model 'c' here, only 'stories', 'a', 'b'."


def test_streams_and_token_ids_have_their_model(client):
    chunks = client.stream(prompt=PROMPT, temperature=0, max_tokens=8, model="b")
    assert {chunk["model"] for chunk in chunks} == {"b"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected(2, 8)
    response = client.send({"model": "a", "prompt": "Hi"}, path="/tokenize")
    assert response.status == 200
    assert client.send({"model": "c", "prompt": "Hi"}, path="/tokenize").status == 404


def test_the_list_of_models_has_the_base_and_its_adapters(client):
    status, text = client.get("/v1/models")
    cards = json.loads(text)["data"]
    assert (status, [card["id"] for card in cards]) == (200, MODELS)
    for card in cards:
        assert json.loads(client.get(f"/v1/models/{card['id']}")[1]) == card
    assert client.get("/v1/models/c")[0] == 404
