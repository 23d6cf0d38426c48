"""Equal prompts of a call are prefilled once; answers equal those of separate prefills.

`tests/laws/test_shared_prompts.py` compares every policy bit for bit; `test_generate` runs chains
of each mechanism on the real engine.
"""

import dataclasses

import pytest

import dms_jax
from dms_jax.generation import Generation, programs
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    prompts,
    results_of,
    squeezed,
)
from tests.support.fake_programs import ENDS

SAMPLED = dms_jax.Sampling(temperature=1.0, max_new_tokens=9, seed=5, logprobs=True)
pytestmark = pytest.mark.usefixtures("fakes")


def prefilled_of(completions) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


def check(completions, given, name, sampling=SAMPLED, **more) -> None:
    """Compares completions with the expected answers, each copy with its own draws."""
    for index, (one, prompt) in enumerate(zip(completions, given, strict=True)):
        answer(prompt, sampling, name, copy=given[:index].count(prompt), **more).check(one)


def test_chains_prefill_prompt_once(prefilled):
    """Each chain still counts its own prompt, reads and peak, as the papers do."""
    (prompt,) = prompts([50])
    out = Generation(host_engine(lanes=4).generate([prompt] * 4, sampling=SAMPLED))
    assert sum(prefilled) == 50
    assert out.usage.prefilled_tokens == 50
    assert prefilled_of(out.completions) == [50] + [0] * 3
    assert out.usage.prompt_tokens == 200
    check(out.completions, [prompt] * 4, "keeps")
    assert len({tokens[0] for tokens in out.tokens}) == 4  # each draws with a separate key


@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded", "cuts"])
def test_equal_prompts_among_others_are_prefilled_once(name, prefilled):
    engine, (one, two, three) = host_engine(name, 4), prompts([13, 5, 30])
    given = [one, three, one, three, two, one]
    found = engine.generate(given, sampling=SAMPLED)
    check(found, given, name)
    assert prefilled_of(found) == [13, 30, 0, 0, 5, 13]  # the last one had to wait for a lane
    assert sum(prefilled) == sum(prefilled_of(found))


def test_prompts_of_different_longest_lengths_share_nothing(monkeypatch):
    """Budgets of half of different lengths differ, so that equal prompts share nothing."""
    engine, (prompt,) = host_engine(lanes=4), prompts([20])
    monkeypatch.setattr(type(engine.policy), "for_length", lambda self, tokens: dms_jax.Quest())
    requests = make_requests(engine.model.config, [prompt] * 3, SAMPLED)
    requests[1].max_length = 50
    found = engine.serve(Source(requests, SAMPLED))
    assert prefilled_of(found) == [20, 20, 0]
    check(found, [prompt] * 3, "keeps")


def test_chains_wait_for_memory_without_preemption(prefilled, monkeypatch):
    """Four chains of three pages per row in a pool of seven: two run at a time, none is preempted.

    Admission counts the minimum that the policy keeps, so all four are admitted. After the prefill,
    chains that do not fit wait until the whole prompt fits: the free page during the first two
    answers would hold only its first tokens.
    """
    engine, given = host_engine("might evict", 4), prompts([30]) * 4
    preempted = results_of(monkeypatch, Scheduler, "preempt")
    two_chunks = dataclasses.replace(SAMPLED, max_new_tokens=1 + 2 * SHAPE["chunk"])
    with squeezed(engine, 7 * 20):
        found = engine.generate(given, sampling=two_chunks)
    check(found, given, "might evict", two_chunks)
    assert prefilled_of(found) == [30, 0, 30, 0]
    assert sum(prefilled) == 60
    assert preempted == []


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("name", "pages"), [("might evict", 140), ("evicts", 116)])
def test_chain_of_one_token_needs_no_copy(name, pages, streamed):
    """There is no memory for its copy of the prompt, but it needs none."""
    (prompt,), engine, ended = prompts([30]), host_engine(name, 4, ends=ENDS), []
    for seed in range(2000):  # the last one begins with an end token; the others have none
        sampling = dataclasses.replace(SAMPLED, seed=seed)
        lengths = (
            len(answer(prompt, sampling, name, copy=copy, ends=ENDS).tokens)
            == (1 if copy == 3 else 9)
            for copy in (3, 0, 1, 2)
        )
        if all(lengths):
            break

    def on_tokens(update):
        if update.finished:
            ended.append(update.index)

    given = [prompt] * 4
    whole = engine.generate(given, sampling=sampling)
    with squeezed(engine, pages):
        found = engine.generate(given, sampling=sampling, on_tokens=on_tokens if streamed else None)
    check(found, given, name, sampling, ends=ENDS)
    assert found[3].finish_reason == "end"
    assert prefilled_of(found) == [30, 0, 30, 0]
    assert not streamed or ended[0] == 3
    # Usage as if it had prefilled the prompt itself, without pages for steps.
    peak = dict(peak_cache_bytes=whole[3].usage.cache_bytes)
    assert found[3].usage == dataclasses.replace(whole[3].usage, **peak)


def test_waiting_chain_needs_only_its_budget():
    """A row of 28 slots, and at most 29, gets two pages, not three for a chunk."""
    engine, given = host_engine("large budget"), prompts([30]) * 2
    with squeezed(engine, 2 * 20):
        found = engine.generate(given, sampling=SAMPLED)
    check(found, given, "large budget")
    assert prefilled_of(found) == [30, 30]


def test_copies_use_few_programs():
    """One shape for all numbers of lanes and pages, and one draw for all numbers of chains."""
    engine, given = host_engine("evicts", 4), prompts([13, 30, 5, 1])
    engine.generate([given[0]] * 4, sampling=SAMPLED)
    copy_lanes, first_tokens = programs.copy_lanes.jitted, programs.first_tokens.jitted
    copies, draws = copy_lanes._cache_size(), first_tokens._cache_size()
    for count, prompt in ((2, given[1]), (4, given[2]), (3, given[3]), (2, given[0])):
        found = engine.generate([prompt] * count, sampling=SAMPLED)
        assert prefilled_of(found) == [len(prompt)] + [0] * (count - 1)
    assert copy_lanes._cache_size() == copies
    assert first_tokens._cache_size() == draws


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_usage_of_chain_of_one_token_equals_that_of_a_copy(name):
    """It needs no copy, because nothing reads it."""
    engine, (prompt,) = host_engine(name, 4), prompts((30,))
    one = dataclasses.replace(GREEDY, max_new_tokens=1)
    first, *others = engine.generate([prompt] * 3, sampling=one)
    answer(prompt, one, name).check(first)
    for each in others:
        assert each.usage.cache_bytes == first.usage.cache_bytes > 0
        figures = dict(prefilled_tokens=30, peak_cache_bytes=first.usage.peak_cache_bytes)
        assert dataclasses.replace(each.usage, **figures) == first.usage
