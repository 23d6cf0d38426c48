"""`echo` of text completions: scored prompts equal a plain pass of the model."""

import concurrent.futures

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from tests.generation.support import log_softmax
from tests.serving.support import serving

pytestmark = pytest.mark.nightly
PROMPT = "Once upon a time, there was a cat"


@pytest.fixture(scope="module")
def client():
    model = dms_jax.load(assets.path("stories260k"))
    with serving(model=model, policy=dms_jax.Vanilla()) as made:
        yield made


def test_echo_logprobs_equal_plain_pass(client):
    model = client.service.engine.model
    tokens = model.tokenizer.encode(PROMPT)
    own = log_softmax(np.asarray(model.logits(np.asarray([tokens])))[0, :-1])
    want = own[np.arange(len(tokens) - 1), tokens[1:]]
    asked = dict(echo=True, logprobs=1, temperature=0)
    for prompt in (PROMPT, tokens, [tokens]):
        answer = client.ask(prompt=prompt, max_tokens=1, **asked)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert "".join(found["tokens"]).endswith(choice["text"])
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        chex.assert_trees_all_close(np.array(found["token_logprobs"][1:-1]), want, atol=1e-4)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(tokens) + 1
        highest = [max(each.values()) for each in found["top_logprobs"][1:]]
        chex.assert_trees_all_close(np.array(highest[:-1]), own.max(-1), atol=1e-4)
        is_best = [a == b for a, b in zip(highest, found["token_logprobs"][1:], strict=True)]
        assert is_best == [*(own.argmax(-1) == tokens[1:]), True]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 1)
    alone = client.ask(prompt=PROMPT, max_tokens=0, **asked)
    assert alone["choices"][0]["text"] == PROMPT
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0
    free = client.ask(prompt=PROMPT, max_tokens=9, temperature=0)["choices"][0]["text"]
    assert client.ask(prompt=PROMPT, max_tokens=9, temperature=0, echo=True)["choices"] == [
        {"index": 0, "text": PROMPT + free, "logprobs": None, "finish_reason": "length"}
    ]


def test_echo_beside_other_requests(client):
    asks = [
        dict(prompt=PROMPT, max_tokens=30, temperature=0, logprobs=1),
        dict(prompt=PROMPT, max_tokens=3, temperature=0, logprobs=1, echo=True),
        dict(prompt="Tom had", max_tokens=1, temperature=0, logprobs=1, echo=True),
    ]
    alone = [client.ask(**each)["choices"] for each in asks]
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as threads:
        assert [each["choices"] for each in threads.map(lambda one: client.ask(**one), asks)] == (
            alone
        )


def test_echo_evicts_like_answer_and_keeps_prefixes():
    model = dms_jax.load(assets.path("stories260k"))
    policy = dms_jax.TOVA(budget=8, prefill="evict_past_budget")
    tokens = model.tokenizer.encode(PROMPT)
    (want,) = dms_jax.score(model, [tokens], policy=policy)
    with serving(model=model, policy=policy, prefix_cache=1e6) as client:
        free = dict(prompt=PROMPT, max_tokens=9, temperature=0, logprobs=1)
        before = client.ask(**free)["choices"]
        for _ in range(2):
            answer = client.ask(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
            found = np.array(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
            chex.assert_trees_all_close(found, np.asarray(want.logprobs, np.float64), atol=1e-4)
            assert answer["usage"]["kv_cache"]["peak_tokens"] <= 9
        assert client.ask(**free)["choices"] == before


def test_echo_refuses_end_token_in_prompt(client):
    error = client.ask(prompt=[1, 5, 2, 5], echo=True, status=400)["error"]
    assert "Token 2 is 2, an end token of this model" in error["message"]
