"""Interrupted calls keep what is finished, and overlapping calls are refused without harm."""

import dataclasses
import itertools
import sys
import threading
import types

import chex
import pytest

import dms_jax
from dms_jax.cache.accounting import Meter
from dms_jax.errors import BusyError, CapacityError
from dms_jax.evaluation import Serving, evaluate
from dms_jax.generation import Engine, Generation
from dms_jax.generation.calls import keep_finished
from dms_jax.generation.runner import Runner
from dms_jax.generation.text import TextTracker
from dms_jax.model.language_model import GenerationDefaults
from tests.evaluation.test_evaluating import Continue
from tests.generation.support import GREEDY, POLICIES, SHAPE, engine_for, model_for, prompts
from tests.support.instances import further, nightly_but

SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
TALK = dict(max_tokens=64, page_size=16, chunk=8, prefill_chunk=8)
PAGES = 3  # pages of sixteen tokens per row in the small engines below


def small_engine(policy=None, *, ends: bool = False, lanes: int = 1, end_tokens=None) -> Engine:
    model = model_for("vanilla", ends=ends)
    if end_tokens is not None:
        generation = GenerationDefaults(eos_token_ids=tuple(end_tokens))
        model = dataclasses.replace(model, generation=generation)
    rows = model.config.num_layers * model.config.num_kv_heads
    memory = PAGES * rows * 2 * 16 * model.config.head_dim * 4
    return Engine(model, policy, memory=memory, max_tokens=64, **(SHAPE | {"num_lanes": lanes}))


class Enough(Exception):
    pass


# -- what is finished is kept ------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, *further(Enough, SystemExit)])
def test_an_interrupt_carries_the_completions_that_had_ended(error):
    given = prompts()
    expected = engine_for("vanilla").generate(given, sampling=GREEDY)

    def interrupt(update):
        if update.finished and update.index == 1:  # next to the first, while two wait
            raise error("enough")

    with pytest.raises(error, match="enough") as caught:
        engine_for("vanilla").generate(given, sampling=GREEDY, on_tokens=interrupt)
    done = caught.value.finished
    assert done == dict(enumerate(expected[:2]))
    with pytest.raises(error) as caught:
        dms_jax.generate(
            model_for("vanilla", ends=False), given, sampling=GREEDY, on_tokens=interrupt
        )
    assert {0, 1} <= set(caught.value.finished)


@pytest.mark.nightly
def test_a_callback_that_raises_loses_nothing_of_its_chunk():
    """Two answers end in the same chunk, and the first of their updates is interrupted."""
    given, engine = prompts((5, 5)), engine_for("vanilla")
    expected = engine.generate(given, sampling=SHORT)

    def interrupt(update):
        if update.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(given, sampling=SHORT, on_tokens=interrupt)
    assert caught.value.finished == dict(enumerate(expected))


@pytest.mark.parametrize("nth", [0, 1])
def test_an_interrupt_while_texts_are_made_leaves_none_of_them_cut(nth, monkeypatch):
    """Two answers end in one chunk; it comes before the text of the first or of the second."""
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    engine = Engine(model, max_tokens=64, **(SHAPE | {"num_lanes": 2}))
    given = ["Once upon a time", "Lily"]
    expected = engine.generate(given, sampling=SHORT)
    update, ends = TextTracker.update, itertools.count()

    def interrupted(self, request):
        if not request.remaining and next(ends) == nth:
            raise KeyboardInterrupt
        return update(self, request)

    monkeypatch.setattr(TextTracker, "update", interrupted)
    told = ["", ""]

    def tell(news):
        told[news.index] += news.text

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(given, sampling=SHORT, on_tokens=tell)
    assert caught.value.finished == dict(enumerate(expected))
    assert told == [each.text for each in expected]


def test_a_second_interrupt_carries_them_too(monkeypatch):
    given = prompts((5, 13, 9))
    expected = engine_for("vanilla").generate(given, sampling=SHORT)
    engine = Engine(model_for("vanilla", ends=False), max_tokens=64, **SHAPE)

    def interrupt(update):
        if update.index == 2:
            raise KeyboardInterrupt("the first")

    def again(self):
        raise KeyboardInterrupt("the second")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "release", again)
        with pytest.raises(KeyboardInterrupt, match="the second") as caught:
            engine.generate(given, sampling=SHORT, on_tokens=interrupt)
    assert caught.value.finished == dict(enumerate(expected[:2]))


@pytest.mark.parametrize("place", ["add", "finish", "usage"])
def test_an_interrupt_while_a_use_is_accounted_for_loses_nothing(place, monkeypatch):
    """It comes before, in the middle of and behind what changes the figures; they are the same."""
    given = prompts((5, 13))
    engine = engine_for("vanilla")
    expected, real = engine.generate(given, sampling=SHORT), getattr(Meter, place)
    left = ["the first"]

    def interrupted(meter, *arguments, **options):
        result = real(meter, *arguments, **options)
        if left and sys._getframe(1).f_code.co_name == "record_usage":
            raise KeyboardInterrupt(left.pop())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Meter, place, interrupted)
        with pytest.raises(KeyboardInterrupt, match="the first") as caught:
            engine.generate(given, sampling=SHORT)
    assert caught.value.finished == dict(enumerate(expected))
    assert engine.generate(given, sampling=SHORT) == expected


@pytest.mark.nightly
def test_running_out_of_memory_carries_them():
    """DMS decides during generation, so it is not known in advance that the last does not fit."""
    given = [*prompts((5, 9, 13)), prompts((200,))[0]]
    engine = small_engine(POLICIES["dms"])
    expected = engine.generate(given[:3], sampling=SHORT)
    with pytest.raises(CapacityError, match=r"cannot hold .* of prompt 3") as caught:
        engine.generate(given, sampling=SHORT)
    assert caught.value.finished == dict(enumerate(expected))
    assert Generation(list(caught.value.finished.values())).usage.new_tokens == 27
    assert engine.generate(given[:3], sampling=SHORT) == expected


def test_an_error_that_takes_no_attributes_passes_as_it_is():
    class Closed(Exception):
        def __setattr__(self, name, value):
            if name == "finished":
                raise AttributeError(name)
            super().__setattr__(name, value)

    with pytest.raises(Closed), keep_finished(lambda: {0: "done"}):
        raise Closed
    assert CapacityError("nothing ran").finished == {}


@pytest.mark.nightly
def test_scores_of_earlier_sequences_are_carried(monkeypatch):
    given, follow, calls = prompts((13, 13, 13)), Runner.teacher_forced_decode, []
    model = model_for("vanilla", ends=False)
    expected = dms_jax.score(model, given, chunk=8, page_size=16, num_lanes=1)

    def third(self, *arguments):
        calls.append(1)
        if len(calls) > 4:  # two chunks each
            raise KeyboardInterrupt
        return follow(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "teacher_forced_decode", third)
        with pytest.raises(KeyboardInterrupt) as caught:
            dms_jax.score(model, given, chunk=8, page_size=16, num_lanes=1)
    done = caught.value.finished
    assert sorted(done) == [0, 1]
    chex.assert_trees_all_equal(
        [done[i].logprobs for i in done], [e.logprobs for e in expected[:2]]
    )


def evaluated(task=None):
    return evaluate(
        model_for("vanilla"),
        task or Continue(),
        problems=3,
        chains=2,
        sampling=dms_jax.Sampling(temperature=0.7, max_new_tokens=9),
        serving=Serving(lanes=2, page_size=16, chunk=8),
    )


@pytest.mark.nightly
def test_an_evaluation_carries_the_answers_that_had_ended(monkeypatch):
    """Six answers of 9 tokens in two lanes, by a program of steps: the first four have ended."""
    whole, decode, chunks = evaluated(), Runner.decode, []

    def third(self, *arguments, **options):
        chunks.append(1)
        if len(chunks) == 3:
            raise KeyboardInterrupt
        return decode(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", third)
        with pytest.raises(KeyboardInterrupt) as caught:
            evaluated()
    texts = {index: done.text for index, done in caught.value.finished.items()}
    assert texts == {index: whole.completions[index // 2][index % 2] for index in range(4)}


@dataclasses.dataclass(frozen=True)
class Unjust(Continue):
    name = "unjust"

    def score(self, problem, completion):
        raise Enough


@pytest.mark.nightly
def test_an_evaluation_carries_the_answers_that_could_not_be_judged():
    with pytest.raises(Enough) as caught:
        evaluated(Unjust())
    assert sorted(caught.value.finished) == list(range(6))


# -- what is known not to fit is refused -------------------------------------------------------


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """Counts the compiled programs that ran over prompts."""
    calls, extend = [], Runner.extend

    def counted(self, tokens, **options):
        calls.append(len(tokens))
        return extend(self, tokens, **options)

    monkeypatch.setattr(Runner, "extend", counted)
    return calls


READ_WHOLE = {
    "vanilla": dms_jax.Vanilla(),
    "kcache": dms_jax.KCache(top=4, values="device"),
    "cut afterwards": dms_jax.SnapKV(budget=16, window=4, interval=8),
}


@pytest.mark.parametrize(
    "policy",
    nightly_but([READ_WHOLE["vanilla"]], READ_WHOLE.values()),
    ids=READ_WHOLE,
)
def test_a_prompt_that_cannot_fit_is_refused_before_anything_runs(policy, ran):
    engine = small_engine(policy, ends=True)
    given = [*prompts((5, 9)), prompts((60,))[0]]
    with pytest.raises(CapacityError, match=r"cannot hold the prompt of prompt 2 \(60 tokens"):
        engine.generate(given, sampling=SHORT)
    assert ran == []
    assert len(engine.generate(given[:2], sampling=SHORT)) == 2


def test_a_first_chunk_that_cannot_fit_is_refused_before_anything_runs(ran):
    """This holds under any policy, here one that does not declare how much it keeps."""
    model = model_for("dms", ends=True)
    engine = small_engine(POLICIES["dms"], ends=True)
    engine = Engine(
        model,
        memory=PAGES * engine.runner.lengths[:, 0].size * engine.runner.page_bytes,
        max_tokens=64,
        **(SHAPE | {"num_lanes": 1, "prefill_chunk": 64}),
    )
    with pytest.raises(CapacityError, match="cannot hold the first chunk of prompt 1"):
        engine.generate([*prompts((5,)), prompts((60,))[0]], sampling=SHORT)
    assert ran == []


@pytest.mark.nightly
def test_an_answer_that_cannot_fit_is_refused_where_nothing_ends_it_early(ran):
    given, long = prompts((5, 30)), dataclasses.replace(GREEDY, max_new_tokens=20)
    exact = dataclasses.replace(GREEDY, max_new_tokens=PAGES * 16 - 30 + 1)
    with pytest.raises(CapacityError, match="the sequence to its end of prompt 1"):
        small_engine().generate(given, sampling=long)
    assert ran == []
    (completion,) = small_engine().generate(given[1:], sampling=exact)  # to the last slot
    assert len(completion.tokens) == 19
    # An end token or a stop string may come first, so it is tried.
    stop = dataclasses.replace(long, stop=completion.text[:4])
    assert small_engine().generate(given[1:], sampling=stop)[0].finish_reason == "stop"
    ran.clear()
    with pytest.raises(CapacityError):
        small_engine(ends=True).generate(given, sampling=dataclasses.replace(long, seed=1))
    assert ran


def test_an_evaluation_refuses_before_anything_runs(ran):
    """Of three problems, one lane at a time, the first prompt is not the longest."""
    task, model = Continue(), model_for("vanilla")
    lengths = [len(model.tokenizer.encode(each.prompt)) for each in task.problems("test", 3)]
    assert lengths[0] < max(lengths)
    rows = model.config.num_layers * model.config.num_kv_heads
    slots = max(lengths) - 1
    options = dict(sampling=dataclasses.replace(SHORT, max_new_tokens=1))
    memory = slots * rows * 2 * model.config.head_dim * 4
    serving = Serving(lanes=1, page_size=1, memory=memory)
    with pytest.raises(CapacityError, match="cannot hold the prompt"):
        evaluate(model, task, problems=3, serving=serving, **options)
    assert ran == []


# -- calls that overlap ------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_call_from_inside_a_callback_is_refused_and_harms_nothing():
    given, engine = prompts(), engine_for("quest")
    expected, refused = engine.generate(given, sampling=GREEDY), []

    def call_again(update):
        with pytest.raises(BusyError, match="The engine is busy"):
            engine.generate(given[:1], sampling=GREEDY)
        refused.append(update)

    assert engine.generate(given, sampling=GREEDY, on_tokens=call_again) == expected
    assert len(refused) > len(given)

    def let_through(update):
        engine.generate(given[:1], sampling=GREEDY)

    with pytest.raises(BusyError):
        engine.generate(given, sampling=GREEDY, on_tokens=let_through)
    assert engine.generate(given, sampling=GREEDY) == expected


@pytest.mark.nightly
def test_a_turn_from_inside_a_turn_is_refused_and_harms_nothing():
    turns = prompts((9, 4))
    undisturbed = dms_jax.Conversation(model_for("dms", ends=False), **TALK)
    expected = [undisturbed.say(turn, sampling=SHORT) for turn in turns]
    conversation = dms_jax.Conversation(model_for("dms", ends=False), **TALK)

    def say_again(update):
        with pytest.raises(BusyError, match="The conversation is busy"):
            conversation.say([5, 6], sampling=SHORT)

    for turn in turns:
        conversation.say(turn, sampling=SHORT, on_tokens=say_again)
    assert conversation.turns == expected


def test_threads_are_refused_or_answered_rightly():
    """Eight threads share one engine; then each has its own."""
    given = [prompts((5, 13)), prompts((9, 30)), prompts((1, 4)), prompts((13, 2))]
    engine = Engine(model_for("vanilla", ends=False), max_tokens=64, **SHAPE)
    expected = [engine.generate(each, sampling=SHORT) for each in given]
    results = types.SimpleNamespace(right=0, busy=0, wrong=[])
    together = threading.Barrier(8)

    def call(index):
        together.wait()
        for turn in range(index, index + 4):
            which = turn % len(given)
            try:
                answer = engine.generate(given[which], sampling=SHORT)
            except BusyError:
                results.busy += 1
            except BaseException as error:
                results.wrong.append(error)
            else:
                results.right += answer == expected[which]

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not results.wrong
    assert results.right + results.busy == 32
    assert results.right >= 1
    assert results.busy >= 1
    assert engine.generate(given[0], sampling=SHORT) == expected[0]


@pytest.mark.nightly
def test_an_answer_that_its_first_token_ends_needs_no_room():
    """The pool holds the prompt and not a chunk of steps, of which none is taken."""
    policy = dms_jax.RandomEviction(window=10, rate=0.0)
    given = prompts((16 * (PAGES - 1),))
    once = dataclasses.replace(SHORT, max_new_tokens=1)
    (first,) = small_engine(policy).generate(given, sampling=once)
    with pytest.raises(CapacityError, match="the sequence to its end"):
        small_engine(policy).generate(given, sampling=SHORT)
    engine = small_engine(policy, end_tokens=first.tokens)
    (ended,) = engine.generate(given, sampling=SHORT)
    assert (ended.tokens, ended.finish_reason) == (first.tokens, "end")
