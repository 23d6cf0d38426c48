"""Requests that come while a call runs, each with its own sampling."""

import dataclasses

import dms_jax
from dms_jax.generation.requests import make_request
from tests.generation.support import GREEDY, engine_for, prompts

SETTINGS = [
    GREEDY,
    dms_jax.Sampling(temperature=0.9, top_k=4, max_new_tokens=15, seed=3, logprobs=True),
    dms_jax.Sampling(temperature=1.1, top_p=0.8, min_p=0.01, max_new_tokens=9, seed=4),
]


def test_requests_join_those_that_run_and_draw_as_they_do_alone(monkeypatch):
    engine = engine_for("vanilla")
    config, tokens = engine.model.config, prompts()[: len(SETTINGS)]
    coming = [
        make_request(config, prompt, sampling, index=index, seed=sampling.seed)
        for index, (prompt, sampling) in enumerate(zip(tokens, SETTINGS, strict=True))
    ]
    alone = [
        engine.generate([prompt], sampling=sampling)[0]
        for prompt, sampling in zip(tokens, SETTINGS, strict=True)
    ]
    requests, waited, together, ended = list(coming), [], [], []

    def incoming(wait):
        waited.append(wait)
        together.append(len(engine.running))
        return [coming.pop(0)] if coming else None

    def on_tokens(update):
        if update.finished:
            ended.append(update.index)

    assert engine.serve([], GREEDY, on_tokens, incoming=incoming) == []
    assert sorted(ended) == [0, 1, 2]
    assert [each.generated for each in requests] == [each.tokens for each in alone]
    assert [each.finish_reason for each in requests] == [each.finish_reason for each in alone]
    assert requests[1].logprobs == alone[1].logprobs
    assert waited[:2] == [True, False]  # nothing else was to be done before the first one
    assert max(together) == 2  # and the third one came while these ran
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.running


def test_what_is_cancelled_while_it_waits_is_never_read():
    """A lane is free for it at the moment when it is cancelled."""
    engine, told = engine_for("vanilla"), []
    short = dataclasses.replace(GREEDY, max_new_tokens=5)
    coming = [
        make_request(engine.model.config, prompt, sampling, index=index)
        for index, (prompt, sampling) in enumerate(
            zip(prompts()[:3], (short, GREEDY, GREEDY), strict=True)
        )
    ]
    requests = list(coming)

    def incoming(wait):
        if coming:
            came = coming.copy()
            coming.clear()
            return came
        if requests[0].finish_reason is not None:
            engine.cancel([2])
        return None

    engine.serve([], GREEDY, told.append, incoming=incoming)
    assert [each.finish_reason for each in requests] == ["length", "length", "cancelled"]
    assert requests[2].generated == []
    assert requests[2].usage.prefilled_tokens == 0
    assert [each.finished for each in told if each.index == 2] == [True]
