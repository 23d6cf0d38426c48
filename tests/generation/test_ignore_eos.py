"""Answers that go on behind end tokens, beside others that do not."""

import collections
import dataclasses

import pytest

import dms_jax
from dms_jax.errors import ConfigError
from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.grammar import Grammar
from dms_jax.generation.requests import completion_of, make_requests
from tests.generation.support import GREEDY, answer, host_engine, prompts, squeezed
from tests.support.fake_programs import ENDS

GIVEN = prompts((5, 13, 9, 30, 3, 7, 11, 2))
ENDLESS = dataclasses.replace(GREEDY, max_new_tokens=40, ignore_eos=True)
ENDING = dataclasses.replace(GREEDY, max_new_tokens=40)


def check(prompt, sampling, completion, name="keeps"):
    expected = answer(prompt, sampling, name, ends=ENDS)
    assert completion.tokens == expected.tokens
    assert completion.finish_reason == expected.finish_reason
    return expected


def test_some_answers_have_end_tokens_in_their_middle():
    """Else the tests below would ask for nothing."""
    endless = [answer(each, ENDLESS, ends=ENDS).tokens for each in GIVEN]
    ending = [answer(each, ENDING, ends=ENDS) for each in GIVEN]
    assert all(len(each) == 40 for each in endless)
    ended = [each for each in ending if each.finish_reason == "end"]
    assert len(ended) >= 4
    assert any(len(set(ENDS) & {*each[:-1]}) for each in endless)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_a_list_goes_on_behind_end_tokens(name):
    """In lanes that others take next, with chunks that run on, and when it was put back."""
    engine = host_engine(name, 4, ends=ENDS, page_size=8)
    for prompt, one in zip(GIVEN, engine.generate(GIVEN, sampling=ENDLESS), strict=True):
        check(prompt, ENDLESS, one, name)
    if name == "keeps":
        with squeezed(engine, 20 * 14):
            for prompt, one in zip(GIVEN, engine.generate(GIVEN, sampling=ENDLESS), strict=True):
                check(prompt, ENDLESS, one)


@pytest.mark.usefixtures("fakes")
def test_each_request_of_a_server_ends_as_it_asks():
    """A lane that an answer without end had is one that end tokens end for the next request."""
    engine = host_engine("keeps", 4, ends=ENDS)
    samplings = [(ENDLESS, ENDING)[number % 2] for number in range(len(GIVEN))]
    requests = []
    for number, (prompt, sampling) in enumerate(zip(GIVEN, samplings, strict=True)):
        (request,) = make_requests(engine.model.config, [prompt], sampling)
        request.index = number
        requests.append(request)
    coming = collections.deque([requests[:5], [], requests[5:]])
    engine.serve(
        Source(
            [],
            ENDING,
            on_tokens=lambda update: None,
            incoming=lambda wait: coming.popleft() if coming else None,
        )
    )
    reasons = collections.Counter()
    for prompt, sampling, request in zip(GIVEN, samplings, requests, strict=True):
        reasons[check(prompt, sampling, completion_of(request, logprobs=True)).finish_reason] += 1
    assert reasons["end"] >= 1
    assert reasons["length"] >= 4


def test_real_steps_go_on_behind_end_tokens():
    """Alone, and beside an answer with a grammar, where each step is drawn under masks."""
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=12)
    prompt = model.tokenizer.encode("Once upon a time")

    def engine_with(*ends):
        generation = dataclasses.replace(model.generation, eos_token_ids=ends)
        return Engine(
            dataclasses.replace(model, generation=generation),
            num_lanes=2,
            max_tokens=64,
            chunk=8,
            page_size=16,
        )

    (free,) = engine_with().generate([prompt], sampling=sampling)
    engine = engine_with(free.tokens[5])
    (ended,) = engine.generate([prompt], sampling=sampling)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    endless = dataclasses.replace(sampling, ignore_eos=True)
    masked = dataclasses.replace(sampling, grammar=Grammar.lark(r"start: /[a-z ]+/"))
    requests = [make_requests(model.config, [prompt], each)[0] for each in (endless, masked)]
    requests[1].index = 1
    coming = collections.deque([requests])
    engine.serve(
        Source(
            [],
            sampling,
            on_tokens=lambda update: None,
            incoming=lambda wait: coming.popleft() if coming else None,
        )
    )
    assert requests[0].generated == free.tokens
    assert requests[0].finish_reason == "length"
    assert requests[1].finish_reason in ("end", "length")
    (alone,) = engine.generate([prompt], sampling=endless)
    assert alone.tokens == free.tokens


def test_a_grammar_ends_with_an_end_token():
    with pytest.raises(ConfigError, match="ignore_eos"):
        dms_jax.Sampling(ignore_eos=True, grammar=Grammar.lark('start: "a"'))
