"""Scores from teacher-forced decoding equal those of one pass; usage is counted independently."""

import dataclasses

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import scored_request
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    answer,
    host_engine,
    model_for,
    prompts,
    results_of,
    squeezed,
)
from tests.generation.support import SHAPE as ENGINE
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("two_programs")


SHAPE = dict(chunk=8, page_size=16)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded"])
def test_one_pass_prompt_is_held_in_full(name):
    """Prompts run in chunks of 8, the first before any eviction; later tokens run one by one."""
    (prompt,), chunk = prompts([40]), ENGINE["prefill_chunk"]
    one = dataclasses.replace(GREEDY, max_new_tokens=1)
    (done,) = host_engine(name).generate([prompt], sampling=one)
    want = answer(prompt, one, name)
    want.check(done)
    held = max((want.live[at - 1] if at else 0) + chunk for at in range(0, len(prompt), chunk))
    one_pass = name != "bounded"
    assert done.usage.peak_held_tokens == (max(held, *want.live) if one_pass else max(want.live))


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("name", "pages"), [("keeps", 210), ("evicts", 110), ("bounded", 130)])
def test_given_answers_are_scored_like_drawn_ones(name, pages, monkeypatch):
    """In too small a pool; some requests share a prompt, some have none."""
    preempted = results_of(monkeypatch, Scheduler, "preempt")
    engine = host_engine(name, 4, ends=ENDS, page_size=8)
    config, wants = engine.model.config, []
    for index, prompt in enumerate([*prompts((5, 30, 40)), *2 * prompts((20,))]):
        one = dataclasses.replace(GREEDY, max_new_tokens=(1, 2, 20, 24, 17)[index])
        wants.append(answer(prompt, one, name))  # past tokens that would end a drawn answer
    requests = [
        scored_request(config, index, prompt, want.tokens, len(prompt) + len(want.tokens))
        for index, (prompt, want) in enumerate(
            zip([*prompts((5, 30, 40)), *2 * prompts((20,))], wants, strict=True)
        )
    ]
    others = []  # one token of each is not the likeliest: the first, or the fourth of a long one
    for right in (0, 3):
        begun = [*wants[3].tokens[:right], wants[3].tokens[right] + 1]
        rest = dataclasses.replace(GREEDY, max_new_tokens=23 - right)
        others.append(begun + answer([*prompts((20,))[0], *begun], rest, name).tokens)
    for other in others:
        requests.append(scored_request(config, len(requests), prompts((20,))[0], other, 44))
    alone = prompts((33,))[0]
    requests.append(scored_request(config, 7, [], alone, len(alone)))
    with squeezed(engine, pages):
        engine.serve(Source(requests))
    for request, want in zip(requests, wants, strict=False):
        dataclasses.replace(want, text=None).check(request)
    assert [each.greedy for each in requests] == [*[True] * 5, False, False, False]

    def logprobs(first, tokens):
        return [-(place % 64) - token / 512 for place, token in enumerate(tokens, first)]

    assert requests[5].logprobs == logprobs(20, others[0])
    assert requests[6].logprobs == logprobs(20, others[1])
    assert requests[7].logprobs == logprobs(1, alone[1:])
    assert preempted or name == "bounded"


def test_arrays_and_text_are_scored_as_lists_are():
    model = model_for("vanilla")
    rows = np.array(prompts([12, 12]))
    chex.assert_shape(rows, (2, 12))
    listed = dms_jax.score(model, rows.tolist(), **SHAPE)
    for left, right in zip(dms_jax.score(model, rows, **SHAPE), listed, strict=True):
        chex.assert_trees_all_equal(left.logprobs, right.logprobs)
    text = "Once upon a time"
    (spoken,) = dms_jax.score(model, [text], **SHAPE)
    assert len(spoken.logprobs) == len(model.tokenizer.encode(text)) - 1


@pytest.mark.nightly
def test_scoring_more_than_the_memory_holds():
    model = model_for("vanilla")
    page = 20 * 2 * 16 * model.config.head_dim * 4
    want = dms_jax.score(model, prompts([35, 35]), **SHAPE)
    found = dms_jax.score(model, prompts([35, 35]), memory=5 * page, **SHAPE)  # one at a time
    for left, right in zip(found, want, strict=True):
        chex.assert_trees_all_close(left.logprobs, right.logprobs, atol=1e-4)
    with pytest.raises(CapacityError, match=r"cannot hold .* of prompt 0"):
        dms_jax.score(model, prompts([35, 35]), memory=2 * page, **SHAPE)
