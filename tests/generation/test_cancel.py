"""Requests that are cancelled end before the next chunk, and the others are as without them."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Update
from dms_jax.generation.requests import make_request, make_requests
from dms_jax.generation.runner import Runner
from tests.generation.support import GREEDY, POLICIES, SHAPE, engine_for, model_for, prompts
from tests.generation.test_streaming import Listener

CHUNK = SHAPE["chunk"]


class Cancel(Listener):
    """Cancels some requests at the update of another, and keeps all updates."""

    def __init__(self, engine: Engine, count: int, at: int, indices, *, nth: int = 1):
        super().__init__(count)
        self.engine, self.at, self.indices, self.nth = engine, at, indices, nth

    def __call__(self, update: Update) -> None:
        super().__call__(update)
        if update.index == self.at and len(self.updates[self.at]) == self.nth:
            self.engine.cancel(self.indices)


@pytest.mark.parametrize("name", ["vanilla", "dms"])
def test_running_and_waiting_requests_end(name):
    """Four prompts over two lanes: the second runs and the third waits when the first reports."""
    engine, given = engine_for(name), prompts()
    expected = engine.generate(given, sampling=GREEDY)
    listener = Cancel(engine, 4, at=0, indices=[1, 2], nth=2)
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    reasons = [completion.finish_reason for completion in completions]
    assert reasons == ["length", "cancelled", "cancelled", "length"]
    assert completions[0] == expected[0]
    assert completions[3].tokens == expected[3].tokens
    one, never = completions[1:3]
    assert one.tokens == expected[1].tokens[: 1 + CHUNK]  # the prompt's token and one chunk
    assert one.logprobs == expected[1].logprobs[: 1 + CHUNK]
    assert one.usage.new_tokens == 1 + CHUNK
    assert 0 < one.usage.kv_reads < expected[1].usage.kv_reads
    assert (never.tokens, never.text, never.logprobs) == ([], "", [])
    assert (never.usage.kv_reads, never.usage.peak_tokens, never.usage.cache_bytes) == (0, 0, 0)
    assert engine.runner.allocator.pages_in_use == 0


def test_a_request_that_came_ends_though_steps_run_on():
    """While others may come the last program of a chunk is not waited for; for these ends it is."""
    engine, given = engine_for("vanilla"), prompts((5, 9))
    sampling = dataclasses.replace(GREEDY, max_new_tokens=50)
    requests = make_requests(engine.model.config, given, sampling)
    for index, request in enumerate(requests):
        request.index = index
    coming = [list(requests)]
    listener = Cancel(engine, 2, at=1, indices=[0])
    engine.serve([], GREEDY, listener, incoming=lambda wait: coming.pop() if coming else None)
    assert [each.finish_reason for each in requests] == ["cancelled", "length"]
    assert len(requests[0].generated) <= 1 + 2 * CHUNK
    assert len(requests[1].generated) == 50
    assert engine.runner.allocator.pages_in_use == 0


def test_a_request_whose_first_token_was_not_read_is_not_ended_without_it(monkeypatch):
    """Another thread cancels it as steps that ran on have been read, behind which it was drawn."""
    engine, given = engine_for("vanilla"), prompts((5, 9))
    sampling = dataclasses.replace(GREEDY, max_new_tokens=30)
    requests = [
        make_request(engine.model.config, prompt, sampling, index=index)
        for index, prompt in enumerate(given)
    ]
    (whole,) = engine.generate(given[1:], sampling=sampling)
    listener, trim, looks = Listener(2), Runner.trim, iter([requests[:1], [], requests[1:]])

    def cancelled(runner):
        if engine._launched.drawn and requests[0].generated:
            engine.cancel([1])
        trim(runner)

    monkeypatch.setattr(Runner, "trim", cancelled)
    monkeypatch.setattr(Runner, "fits_table", lambda *_: False)  # which has the steps read
    engine.serve([], sampling, listener, incoming=lambda wait: next(looks, None))
    one = requests[1]
    assert [each.finish_reason for each in requests] == ["length", "cancelled"]
    assert one.generated == whole.tokens[: len(one.generated)]
    assert one.generated == [token for each in listener.updates[1] for token in each.tokens]
    assert one.usage is not None
    assert one.usage.new_tokens == len(one.generated)
    assert one.usage.prefilled_tokens == len(given[1])
    assert one.usage.peak_tokens == len(given[1]) + len(one.generated) - 1


def test_it_takes_effect_before_the_next_chunk():
    """After the tokens that the prompts gave, no chunk runs for what is cancelled."""
    engine, given = engine_for("vanilla"), prompts()
    listener = Cancel(engine, 4, at=0, indices=range(4))
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    assert [len(completion.tokens) for completion in completions] == [1, 1, 0, 0]
    assert {completion.finish_reason for completion in completions} == {"cancelled"}
    # The next call is not touched.
    assert engine.generate(given, sampling=GREEDY)[0].finish_reason == "length"


def test_a_request_that_ends_by_itself_ends_so():
    engine, given = engine_for("vanilla"), prompts((5, 13))
    short = dataclasses.replace(GREEDY, max_new_tokens=1 + CHUNK)
    expected = engine.generate(given, sampling=short)
    listener = Cancel(engine, 2, at=1, indices=[0, 1, 7], nth=2)
    assert engine.generate(given, sampling=short, on_tokens=listener) == expected


def test_a_preempted_request_keeps_what_it_generated(monkeypatch):
    """It was put back in the queue with a chunk of its answer, and is cancelled there."""
    model, given = model_for("vanilla", ends=False), prompts((13, 13))
    engine = Engine(model, POLICIES["vanilla"], max_tokens=64, **SHAPE)
    expected = engine.generate(given, sampling=GREEDY)
    put_back, fits = [], engine.runner.fits

    def full(extra, **options):
        if len(engine._running) == 2 and (engine.runner.seen > 20).all():
            put_back.append(extra)
            return False
        return fits(extra, **options)

    monkeypatch.setattr(engine.runner, "fits", full)
    listener = Cancel(engine, 2, at=0, indices=[1], nth=3)
    completions = engine.generate(given, sampling=GREEDY, on_tokens=listener)
    listener.check(completions)
    assert completions[0] == expected[0]
    assert completions[1].finish_reason == "cancelled"
    assert put_back
    kept = completions[1].tokens
    assert kept == expected[1].tokens[: len(kept)]
    assert 1 + CHUNK <= len(kept) < len(expected[1].tokens)
    assert completions[1].usage.peak_tokens == 13 + len(kept) - 1


def test_what_is_no_index_is_refused():
    with pytest.raises(ConfigError, match="cancel: index"):
        engine_for("vanilla").cancel([-1])
