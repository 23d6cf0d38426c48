"""Steps run ahead of stop strings, and of listeners who may be told late, and change nothing."""

import collections
import dataclasses

import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, compiling
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from tests.generation.support import (
    GREEDY,
    SHAPE,
    engine_for,
    model_for,
    text_behind,
)
from tests.generation.test_ahead import SIX, TWO, noted
from tests.generation.test_generate import same_usage
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("two_programs")


@pytest.mark.parametrize("name", ["dms", *further("quest", "vanilla")])
def test_stop_strings_hold_up_no_chunk_of_a_call_that_nobody_listens_to(name, monkeypatch):
    """Answers, log-probabilities and what they used are those of chunks in turn."""
    engine = engine_for(name)
    text, sampling = engine.model.tokenizer.decode, dataclasses.replace(GREEDY, logprobs=True)
    whole = engine.generate(SIX, sampling=sampling)
    # Two of the answers end at their third to fifth token, or where another has that text.
    stops = tuple(text(whole[place].tokens[2:5]).strip() for place in (1, 4))
    sampling = dataclasses.replace(sampling, stop=stops)
    with monkeypatch.context() as patch:
        order = noted(patch)
        found = engine.generate(SIX, sampling=sampling)
        ahead = list(order)
        order.clear()
        expected = engine.generate(SIX, sampling=sampling, on_tokens=lambda update: None)
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for one, other in zip(found, expected, strict=True):
        if one.finish_reason == "stop":  # with other steps behind it in the cache
            same_usage(one.usage, other.usage)
            one = dataclasses.replace(one, usage=other.usage)
        assert one == other
    unread = np.cumsum([1 if each == "launch" else -1 for each in ahead])
    assert unread.max() > 2  # programs of a chunk
    assert unread[-1] == 0
    assert np.cumsum([1 if each == "launch" else -1 for each in order]).max() == 2
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.runner.unread.any()


def test_the_cut_behind_a_prompt_counts_where_the_first_token_completes_a_stop_string():
    """Nobody listens, so that steps ran behind it, whose rows are not those of the answer."""
    model, policy = model_for("vanilla", ends=False), dms_jax.SnapKV(budget=4, window=2)
    engine = Engine(model, policy, max_tokens=64, **SHAPE)
    prompt = SIX[2]
    (whole,) = engine.generate([prompt], sampling=GREEDY)
    stop = text_behind(prompt, whole.tokens[:1])
    sampling = dataclasses.replace(GREEDY, stop=stop)
    found = engine.generate([prompt] * 2, sampling=sampling)  # a prompt, and a copy of it
    told = engine.generate([prompt] * 2, sampling=sampling, on_tokens=lambda update: None)
    assert stop.strip()
    for one, other in zip(found, told, strict=True):
        assert (one.finish_reason, one.tokens) == ("stop", whole.tokens[:1])
        assert one.usage.live_tokens == 4
        assert one.usage.compression_ratio == len(prompt) / 4
        same_usage(one.usage, other.usage)


@pytest.mark.parametrize("name", ["dms", *further("quest", "vanilla")])
def test_who_may_be_late_is_told_while_the_next_steps_run(name, monkeypatch):
    """The same is told of the same answers: of six over two lanes, and of two."""
    engine, launched, launch, read = engine_for(name), [], compiling.Program.__call__, Runner.read

    def launching(program, *arguments):
        launched.append(program)
        return launch(program, *arguments)

    def reading(runner, chunk):
        steps = read(runner, chunk)
        if not runner.unread.any():  # the device has nothing to do
            launched.clear()
        return steps

    def served(given, listener, **options):
        requests = make_requests(engine.model.config, given, GREEDY)
        return engine.serve(requests, GREEDY, listener, streaming=False, **options)

    for given in (SIX, TWO):
        tokens, busy = collections.defaultdict(list), []

        def listen(update, tokens=tokens, busy=busy):
            tokens[update.index] += update.tokens
            busy.append(bool(launched))

        expected = served(given, lambda update: None)
        with monkeypatch.context() as patch:
            patch.setattr(compiling.Program, "__call__", launching)
            patch.setattr(Runner, "read", reading)
            found = served(given, listen, late=True)
        assert found == expected
        assert [tokens[index] for index in range(len(given))] == [each.tokens for each in found]
        assert busy.index(False) == len(busy) - 2  # behind the last steps of all
        assert len(busy) >= 2 * len(given)
        assert not engine.runner.unread.any()


def test_what_a_listener_cancels_who_is_late_ends_behind_the_steps_that_run():
    engine = engine_for("dms")
    requests = make_requests(engine.model.config, SIX, GREEDY)

    def cancel(update):
        if update.index == 0:
            engine.cancel([0, 1, 5])  # two in lanes, and one that waits

    whole = engine.generate(SIX, sampling=GREEDY)
    found = engine.serve(requests, GREEDY, cancel, streaming=False, late=True)
    cancelled = [each.finish_reason == "cancelled" for each in found]
    assert cancelled == [True, True, False, False, False, True]
    for one, other in zip(found, whole, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]
    assert [len(each.tokens) for each in found][2:] == [20, 20, 20, 0]
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.runner.unread.any()
