"""An answer cut to its first tokens equals the shorter answer: text, tokens, reads and peak."""

import dataclasses

import pytest

import dms_jax
from dms_jax.evaluation import Serving
from dms_jax.evaluation.answering import Evaluation
from dms_jax.evaluation.questions import Judge, Questions
from dms_jax.evaluation.traces import cut, depends_on_length
from dms_jax.generation.scheduler import Scheduler
from dms_jax.model.language_model import GenerationDefaults
from tests.evaluation.test_evaluating import Continue
from tests.generation.support import POLICIES, model_for, stories
from tests.support.instances import further

SAMPLING = dms_jax.Sampling(temperature=0.7, max_new_tokens=20)
# Pool and page tables have one size for all lengths, so that answers share programs.
SERVING = Serving(lanes=4, memory=400_000, page_size=64, chunk=4)
SMALL_PAGES = dict(page_size=16)  # the budget of Quest is a page
SNAPKV = dms_jax.SnapKV(budget=12, window=4, interval=5)


def answers(name="vanilla", *, length=20, **changes):
    """Four answers of at most `length` tokens, whole and traced."""
    model = model_for(name) if name in POLICIES else dataclasses.replace(stories(), policy=SNAPKV)
    questions = Questions.given(
        "test", model, Continue(), count=2, split="test", start=0, chat=None
    )
    evaluation = Evaluation(
        model=changes.pop("model", model),
        policy=model.policy,
        questions=questions,
        sampling=dataclasses.replace(SAMPLING, max_new_tokens=length, **changes.pop("how", {})),
        serving=dataclasses.replace(SERVING, **changes),
        chains=2,
        seed=5,
        traced=True,
    )
    return list(evaluation.run(Judge(questions, None), None, bar=None).values())


def cuts(found, length):
    return [cut(each, length, stories().tokenizer) for each in found]


@pytest.mark.parametrize("name", ["vanilla", *further("dms", "dmc", "tova", "quest", "snapkv")])
def test_cut_answer_equals_a_shorter_run(name):
    # With small pages every number of pages has its own programs.
    options, lengths = (SMALL_PAGES, (6, 13)) if name == "quest" else ({}, (1, 6, 13))
    long = answers(name, **options)
    for length in lengths:
        short = answers(name, length=length, **options)
        assert cuts(long, length) == cuts(short, length)
        assert {each.new_tokens for each in cuts(long, length)} == {length}
        for each, done in zip(cuts(long, length), short, strict=True):
            assert each.reads == done.completion.usage.kv_reads
            assert each.peak == done.completion.usage.peak_tokens
    assert cuts(long, 99) == cuts(long, 20)


@pytest.mark.usefixtures("fakes")
def test_cut_answer_after_preemption(monkeypatch):
    """The answer was recomputed like a prompt, but is not part of the prompt."""
    short, calm = answers(length=6, **SMALL_PAGES), answers(**SMALL_PAGES)
    preempted, preempt = [], Scheduler.preempt

    def watched(self):
        preempted.append(preempt(self))
        return preempted[-1]

    monkeypatch.setattr(Scheduler, "preempt", watched)
    narrow = answers(memory=90_000, **SMALL_PAGES)
    assert preempted
    assert [each.trace for each in narrow] == [each.trace for each in calm]
    assert cuts(narrow, 6) == cuts(short, 6)


@pytest.mark.usefixtures("fakes")
def test_cut_around_the_end_of_an_answer():
    tokens = [each.completion.tokens for each in answers()]
    end = next(i for i in range(5, 18) if tokens[0][i] not in tokens[0][:i])
    model = dataclasses.replace(
        stories(), generation=GenerationDefaults(eos_token_ids=(tokens[0][end],))
    )
    long = answers(model=model)
    assert long[0].completion.finish_reason == "end"
    lengths = (end, end + 1, end + 2)
    for length in lengths:
        assert cuts(long, length) == cuts(answers(model=model, length=length), length)
    assert [cuts(long, length)[0].ended for length in lengths] == [False, True, True]
    stop = {"stop": (stories().tokenizer.decode(tokens[1][7:10]),)}
    long = answers(how=stop)
    assert long[1].completion.finish_reason == "stop"
    for length in (8, 10, 12):
        assert cuts(long, length) == cuts(answers(how=stop, length=length), length)


@pytest.mark.parametrize(
    ("policy", "depends"),
    [
        (dms_jax.Vanilla(), False),
        (dms_jax.DMS(window=8), False),
        (dms_jax.TOVA(budget=20), False),
        (dms_jax.TOVA(compression_ratio=4), True),
        (dms_jax.Quest(compression_ratio=4), True),
        (dms_jax.Quest(budget=64, over=dms_jax.DMS(window=8)), False),
        (dms_jax.KCache(compression_ratio=2, values="device"), True),
        (dms_jax.KCache(top=8), False),
        (dms_jax.AdaKV(scorer=dms_jax.SnapKV(compression_ratio=4)), True),
        (dms_jax.PyramidKV(scorer=dms_jax.SnapKV(budget=100)), False),
    ],
)
def test_depends_on_length_by_policy(policy, depends):
    assert depends_on_length(policy) == depends
