"""Interrupted calls keep finished results, and overlapping calls are refused without harm."""

import dataclasses
import threading
import types

import pytest

import dms_jax
from dms_jax.errors import BusyError, CapacityError
from dms_jax.evaluation import Serving, evaluate
from dms_jax.generation import Generation
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from tests.evaluation.test_evaluating import Continue
from tests.generation.support import (
    GREEDY,
    answer,
    host_engine,
    prompts,
    squeezed,
)
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
PAGES = 3  # pages of sixteen tokens per row in small pools
SMALL = PAGES * 20


def check(completions, given, sampling=SHORT, name="keeps", **more) -> None:
    for one, prompt in zip(completions, given, strict=True):
        answer(prompt, sampling, name, **more).check(one)


class Enough(Exception):
    pass


# -- finished results are kept -----------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, Enough, SystemExit])
def test_interrupt_carries_finished_completions(error):
    given, engine = prompts(), host_engine()

    def interrupt(update):
        if update.finished and update.index == 1:  # next to the first, while two wait
            raise error("enough")

    with pytest.raises(error, match="enough") as caught:
        engine.generate(given, sampling=GREEDY, on_tokens=interrupt)
    done = caught.value.finished
    assert sorted(done) == [0, 1]
    check(done.values(), given[:2], GREEDY)
    if error is Enough:
        with pytest.raises(error) as caught:
            dms_jax.generate(engine.model, given, sampling=GREEDY, on_tokens=interrupt)
        assert {0, 1} <= set(caught.value.finished)
    check(engine.generate(given, sampling=GREEDY), given, GREEDY)


@pytest.mark.parametrize("place", ["decode", "extend", "reserve"])
def test_interrupt_inside_engine_leaves_it_usable(place, monkeypatch):
    engine, given = host_engine(), prompts()
    owner = engine.runner.reservation if place == "reserve" else engine.runner
    original, calls = getattr(owner, place), []

    def interrupted(*arguments, **options):
        calls.append(place)
        result = original(*arguments, **options)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(given, sampling=GREEDY)
    check(engine.generate(given, sampling=GREEDY), given, GREEDY)


def test_raising_callback_loses_nothing_of_its_chunk():
    """Two answers end in the same chunk, and the first of their updates is interrupted."""
    given = prompts((5, 5))

    def interrupt(update):
        if update.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        host_engine().generate(given, sampling=SHORT, on_tokens=interrupt)
    check([caught.value.finished[index] for index in range(2)], given)


def test_capacity_error_carries_finished_completions():
    """The policy might evict, so it is not known in advance that the last request does not fit."""
    given, engine = [*prompts((5, 9, 13)), prompts((55,))[0]], host_engine("might evict", 1)
    with squeezed(engine, SMALL):
        with pytest.raises(CapacityError, match=r"cannot hold .* of prompt 3") as caught:
            engine.generate(given, sampling=SHORT)
        done = [caught.value.finished[index] for index in range(3)]
        check(done, given[:3], name="might evict")
        assert Generation(done).usage.new_tokens == 27
        assert engine.generate(given[:3], sampling=SHORT) == done


def evaluated(task=None):
    return evaluate(
        host_engine().model,
        task or Continue(),
        problems=3,
        chains=2,
        sampling=dms_jax.Sampling(temperature=0.7, max_new_tokens=9),
        serving=Serving(lanes=2, page_size=16, chunk=8),
    )


def test_interrupted_evaluation_carries_finished_answers(monkeypatch):
    """Six answers of 9 tokens in two lanes, by two programs of steps: the first four have ended."""
    whole, decode, chunks = evaluated(), Runner.decode, []

    def fifth(self, *arguments, **options):
        chunks.append(1)
        if len(chunks) == 5:
            raise KeyboardInterrupt
        return decode(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", fifth)
        with pytest.raises(KeyboardInterrupt) as caught:
            evaluated()
    texts = {index: done.text for index, done in caught.value.finished.items()}
    assert texts == {index: whole.completions[index // 2][index % 2] for index in range(4)}


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_abandoned_call_leaves_nothing_behind(turns):
    """No steps in flight, lanes or pages remain: the next call runs as on a new engine."""
    engine, given = host_engine(), prompts((5, 9, 13))
    requests = make_requests(engine.model.config, given, GREEDY)
    with engine.open(Source(requests)) as call:
        for _ in range(turns):
            assert call.step()
    assert any(each.usage is None for each in requests)
    check(engine.generate(given, sampling=SHORT), given)
    with pytest.raises(Enough), engine.open(Source(requests[:1])):
        raise Enough
    check(engine.generate(given, sampling=SHORT), given)


# -- requests that cannot fit are refused ------------------------------------------------------


@pytest.mark.parametrize("name", ["keeps", "cuts"])
def test_prompt_that_cannot_fit_is_refused_up_front(name, prefilled):
    engine = host_engine(name, 1, ends=ENDS)
    given = [*prompts((5, 9)), prompts((60,))[0]]
    with squeezed(engine, SMALL):
        with pytest.raises(CapacityError, match=r"cannot hold the prompt of prompt 2 \(60 tokens"):
            engine.generate(given, sampling=SHORT)
        assert prefilled == []
        check(engine.generate(given[:2], sampling=SHORT), given[:2], name=name, ends=ENDS)


def test_too_long_answer_is_refused(prefilled):
    given, long = prompts((5, 30)), dataclasses.replace(GREEDY, max_new_tokens=20)
    exact = dataclasses.replace(GREEDY, max_new_tokens=PAGES * 16 - 30 + 1)
    engine, ending = host_engine(lanes=1), host_engine(lanes=1, ends=ENDS)
    with squeezed(engine, SMALL):
        with pytest.raises(CapacityError, match="the sequence to its end of prompt 1"):
            engine.generate(given, sampling=long)
        assert prefilled == []
        (completion,) = engine.generate(given[1:], sampling=exact)  # to the last slot
        answer(given[1], exact).check(completion)
        # An end token or a stop string may come first, so the request runs.
        stop = dataclasses.replace(long, stop=completion.text[:4])
        (completion,) = engine.generate(given[1:], sampling=stop)
        answer(given[1], stop).check(completion)
    prefilled.clear()
    drawn = next(
        sampling
        for sampling in (dataclasses.replace(long, temperature=1.0, seed=s) for s in range(99))
        if answer(given[1], sampling, ends=ENDS).finish_reason == "length"
    )
    with squeezed(ending, SMALL), pytest.raises(CapacityError):
        ending.generate(given[1:], sampling=drawn)
    assert prefilled


# -- calls that overlap ------------------------------------------------------------------------


def test_reentrant_call_is_refused():
    given, engine, refused = prompts(), host_engine(), []

    def call_again(update):
        with pytest.raises(BusyError, match="The engine is busy"):
            engine.generate(given[:1], sampling=GREEDY)
        refused.append(update)

    check(engine.generate(given, sampling=GREEDY, on_tokens=call_again), given, GREEDY)
    assert len(refused) > len(given)

    def let_through(update):
        engine.generate(given[:1], sampling=GREEDY)

    with pytest.raises(BusyError):
        engine.generate(given, sampling=GREEDY, on_tokens=let_through)
    check(engine.generate(given, sampling=GREEDY), given, GREEDY)


def test_concurrent_calls_are_refused_or_answered():
    """Eight threads share one engine, and each call is answered completely or refused."""
    given = [prompts((5, 13)), prompts((9, 30)), prompts((1, 4)), prompts((13, 2))]
    engine, want = host_engine(), [[answer(p, SHORT).tokens for p in each] for each in given]
    results = types.SimpleNamespace(right=0, busy=0, wrong=[])
    together = threading.Barrier(8)
    engine.generate(given[0], sampling=SHORT)

    def call(index):
        together.wait()
        for turn in range(index, index + 4):
            which = turn % len(given)
            try:
                found = engine.generate(given[which], sampling=SHORT)
            except BusyError:
                results.busy += 1
            except BaseException as error:
                results.wrong.append(error)
            else:
                results.right += [each.tokens for each in found] == want[which]

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not results.wrong
    assert results.right + results.busy == 32
    assert results.right >= 1
    assert results.busy >= 1
    check(engine.generate(given[0], sampling=SHORT), given[0])


@dataclasses.dataclass(frozen=True)
class Unjust(Continue):
    name = "unjust"

    def score(self, problem, completion):
        raise Enough


def test_failed_judgement_carries_answers():
    with pytest.raises(Enough) as caught:
        evaluated(Unjust())
    assert sorted(caught.value.finished) == list(range(6))
