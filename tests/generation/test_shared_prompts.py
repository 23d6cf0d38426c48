"""Equal prompts of a call are read once; answers are those of prompts that are read one by one.

`tests/laws/test_shared_prompts.py` compares every policy to the bit; `test_generate` runs chains of
each mechanism on the real engine.
"""

import dataclasses

import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation import Engine, Generation, programs
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import (
    GREEDY,
    SHAPE,
    answer,
    host_engine,
    model_for,
    prompts,
    squeezed,
)
from tests.support.fake_programs import ENDS

SAMPLED = dms_jax.Sampling(temperature=1.0, max_new_tokens=9, seed=5, logprobs=True)
fakes = pytest.mark.usefixtures("fakes")


def prefilled(completions) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


def check(completions, given, name, sampling=SAMPLED, **more) -> None:
    """Compares completions with what the prompts are answered, each copy with draws of its own."""
    for index, (one, prompt) in enumerate(zip(completions, given, strict=True)):
        answer(prompt, sampling, name, copy=given[:index].count(prompt), **more).check(one)


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """Records the number of tokens of each call of Runner.extend."""
    counts, extend = [], Runner.extend

    def counted(self, batch):
        counts.append(sum(map(len, batch.tokens.values())))
        return extend(self, batch)

    monkeypatch.setattr(Runner, "extend", counted)
    return counts


@fakes
def test_fifty_tokens_and_four_chains_are_fifty(ran):
    """And each chain still counts its own prompt, reads and peak, as the papers do."""
    (prompt,) = prompts([50])
    out = Generation(host_engine(lanes=4).generate([prompt] * 4, sampling=SAMPLED))
    assert sum(ran) == 50
    assert out.usage.prefilled_tokens == 50
    assert prefilled(out.completions) == [50] + [0] * 3
    assert out.usage.prompt_tokens == 200
    check(out.completions, [prompt] * 4, "keeps")
    assert len({tokens[0] for tokens in out.tokens}) == 4  # each draws with its own key


@fakes
@pytest.mark.parametrize("name", ["keeps", "evicts", "bounded", "cuts"])
def test_other_prompts_between_equal_ones(name, ran):
    engine, (one, two, three) = host_engine(name, 4), prompts([13, 5, 30])
    given = [one, three, one, three, two, one]
    found = engine.generate(given, sampling=SAMPLED)
    check(found, given, name)
    assert prefilled(found) == [13, 30, 0, 0, 5, 13]  # the last one had to wait for a lane
    assert sum(ran) == sum(prefilled(found))


@fakes
def test_an_answer_of_one_token_takes_no_step(ran):
    one, given = dataclasses.replace(SAMPLED, max_new_tokens=1), prompts([13]) * 4
    check(host_engine("evicts", 4).generate(given, sampling=one), given, "evicts", one)
    assert sum(ran) == 13


@fakes
def test_a_share_of_the_longest_length_is_part_of_a_prompt(monkeypatch):
    """Two requests with one prompt, and budgets of half of other lengths, share nothing."""
    engine, (prompt,) = host_engine(lanes=4), prompts([20])
    monkeypatch.setattr(type(engine.policy), "for_length", lambda self, tokens: dms_jax.Quest())
    requests = make_requests(engine.model.config, [prompt] * 3, SAMPLED)
    requests[1].max_length = 50
    found = engine.serve(Source(requests, SAMPLED))
    assert prefilled(found) == [20, 20, 0]
    check(found, [prompt] * 3, "keeps")


@fakes
@pytest.mark.parametrize("name", ["keeps", "might evict", "evicts", "cuts"])
def test_too_little_memory_for_all_chains(name):
    """A pool for about two of five chains, whose prompt of 30 tokens is four chunks."""
    engine, (prompt, other) = host_engine(name, 4), prompts([30, 5])
    given = [prompt] * 4 + [other, prompt]
    # Six of the sixteen pages a row of four lanes, or all that a prompt of 30 tokens takes of two.
    with squeezed(engine, 6 * 20 if name != "evicts" else 4 * 20):
        found = engine.generate(given, sampling=SAMPLED)
    check(found, given, name)
    assert sum(prefilled(found)) > 35


@fakes
def test_chains_wait_for_the_memory_that_they_need(ran, monkeypatch):
    """Four chains of three pages a row, in a pool of seven: two at a time, and none is preempted.

    Admission sees what the policy keeps in any case, so all four are let in; when the prompt is
    read, those that do not fit wait, and then for the whole of it. The page that is left while the
    first two decode, between their two chunks, holds no more than its first tokens.
    """
    engine, given = host_engine("might evict", 4), prompts([30]) * 4
    preempted, preempt = [], Scheduler.preempt

    def watched(scheduler):
        preempted.append(preempt(scheduler))
        return preempted[-1]

    monkeypatch.setattr(Scheduler, "preempt", watched)
    two_chunks = dataclasses.replace(SAMPLED, max_new_tokens=1 + 2 * SHAPE["chunk"])
    with squeezed(engine, 7 * 20):
        found = engine.generate(given, sampling=two_chunks)
    check(found, given, "might evict", two_chunks)
    assert prefilled(found) == [30, 0, 30, 0]
    assert sum(ran) == 60
    assert preempted == []


@fakes
def test_a_chain_that_is_cancelled_while_it_waits_has_read_its_prompt():
    """It has drawn its first token, though there was no memory for its copy of the prompt."""
    engine, given = host_engine("might evict", 4), prompts([30]) * 4
    with squeezed(engine, 6 * 20):
        found = engine.generate(
            given, sampling=SAMPLED, on_tokens=lambda update: engine.cancel([2])
        )
    assert [len(completion.tokens) for completion in found] == [9, 9, 1, 9]
    one = dataclasses.replace(SAMPLED, max_new_tokens=1)
    want = answer(given[0], one, "might evict", copy=2)
    dataclasses.replace(want, finish_reason="cancelled").check(found[2])
    usage = found[2].usage
    assert (usage.peak_tokens, usage.live_tokens, usage.compression_ratio) == (30, 30, 1)
    assert (usage.prefilled_tokens, usage.kv_reads) == (0, 0)
    assert (
        usage.cache_bytes == 2 * 20 * 2 * 16 * 8 * 4 + engine.runner.reservation._state_bytes
    )  # of 30 slots
    assert prefilled(found) == [30, 0, 0, 30]


@fakes
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("name", "pages"), [("might evict", 140), ("evicts", 116)])
def test_a_chain_that_its_first_token_ends_waits_for_no_memory(name, pages, streamed):
    """There is no memory for its copy of the prompt, and it needs none."""
    (prompt,), engine, ended = prompts([30]), host_engine(name, 4, ends=ENDS), []
    for seed in range(2000):  # the last one begins with an end token, and no other one has any
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
    assert prefilled(found) == [30, 0, 30, 0]
    assert not streamed or ended[0] == 3
    # As if it had read its prompt itself, but that nothing was reserved for steps of it.
    peak = dict(peak_cache_bytes=whole[3].usage.cache_bytes)
    assert found[3].usage == dataclasses.replace(whole[3].usage, **peak)


@fakes
def test_a_chain_that_waited_needs_no_more_than_its_policy_keeps():
    """A row that holds 28 slots, and never more than 29, has two pages, not three for a chunk."""
    engine, given = host_engine("large budget"), prompts([30]) * 2
    with squeezed(engine, 2 * 20):
        found = engine.generate(given, sampling=SAMPLED)
    check(found, given, "large budget")
    assert prefilled(found) == [30, 30]


@fakes
def test_a_chain_that_does_not_fit_even_alone_is_refused():
    engine, given = host_engine(lanes=4), prompts([30]) * 4
    with (
        squeezed(engine, 2 * 20),
        pytest.raises(CapacityError, match="to its end of prompt 0"),
    ):
        engine.generate(given, sampling=dataclasses.replace(SAMPLED, max_new_tokens=20))


@fakes
def test_recomputation_after_a_preemption_counts(monkeypatch):
    """The second chain was preempted after two chunks of its answer: prompt and answer again."""
    engine, given = host_engine(lanes=4), prompts([13]) * 2
    fits, alone = engine.runner.reservation.fits, []

    def full_once(extra, **options):
        both = len(engine.running) == 2
        if engine.runner.seen.max() > 13 and not both:
            alone.append(extra)
        if (engine.runner.seen[:2] > 13).all() and both and not alone:
            return False
        return fits(extra, **options)

    monkeypatch.setattr(engine.runner.reservation, "fits", full_once)
    longer = dataclasses.replace(SAMPLED, max_new_tokens=20)
    found = engine.generate(given, sampling=longer)
    check(found, given, "keeps", longer)
    assert prefilled(found) == [13, 13 + 16]  # the last token of the answer was not in the cache


@fakes
def test_few_programs_copy():
    """One shape for any number of lanes and pages, and one draw for any number of chains."""
    engine, given = host_engine("evicts", 4), prompts([13, 30, 5, 1])
    engine.generate([given[0]] * 4, sampling=SAMPLED)
    copy_lanes, first_tokens = programs.copy_lanes.jitted, programs.first_tokens.jitted
    copies, draws = copy_lanes._cache_size(), first_tokens._cache_size()
    for count, prompt in ((2, given[1]), (4, given[2]), (3, given[3]), (2, given[0])):
        found = engine.generate([prompt] * count, sampling=SAMPLED)
        assert prefilled(found) == [len(prompt)] + [0] * (count - 1)
    assert copy_lanes._cache_size() == copies
    assert first_tokens._cache_size() == draws


@pytest.mark.parametrize("name", ["vanilla", "quest", "dms"])
def test_the_pool_is_copied_nowhere(name, optimized):
    """The program takes the cache over, and needs a block of pages and the rows' state besides."""
    del optimized

    def memory(max_tokens):
        engine = Engine(model_for(name), max_tokens=max_tokens, **(SHAPE | {"num_lanes": 4}))
        cache = engine.runner.cache
        arguments = (cache, np.zeros((1, 2, 16), np.int32), np.arange(4, dtype=np.int32))
        compiled = programs.copy_lanes.lower(*arguments, engine.model.config.num_kv_heads).compile()
        assert " while(" not in compiled.as_text()  # it holds the host up until it has ended
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.pool, cache.page_state)))
        return compiled.memory_analysis(), pool

    (small, pool), (large, four_pools) = memory(64), memory(256)
    assert four_pools == 4 * pool
    assert large.alias_size_in_bytes >= four_pools
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < pool / 50


@fakes
@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts"])
def test_who_ends_with_its_first_token_used_what_a_copy_would_have(name):
    """It has none: nothing reads it."""
    engine, (prompt,) = host_engine(name, 4), prompts((30,))
    one = dataclasses.replace(GREEDY, max_new_tokens=1)
    first, *others = engine.generate([prompt] * 3, sampling=one)
    answer(prompt, one, name).check(first)
    for each in others:
        assert each.usage.cache_bytes == first.usage.cache_bytes > 0
        figures = dict(prefilled_tokens=30, peak_cache_bytes=first.usage.peak_cache_bytes)
        assert dataclasses.replace(each.usage, **figures) == first.usage
