"""Equal prompts of a call are read once; answers are those of prompts that are read one by one.

`tests/laws/test_shared_prompts.py` compares every policy to the bit.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation import Engine, Generation, sharing
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import GenerationDefaults
from tests.generation.support import SHAPE, model_for, prompts, squeezed
from tests.generation.test_generate import same_usage

SAMPLED = dms_jax.Sampling(temperature=1.0, max_new_tokens=9, seed=5, logprobs=True)
FLAT = dataclasses.replace(SAMPLED, temperature=3.0)  # at 1 the model is all but certain


MORE = {
    "snapkv": dms_jax.SnapKV(budget=8, window=4, interval=8),
    "h2o": dms_jax.H2O(budget=8, prefill="dense_then_evict"),
    "kcache": dms_jax.KCache(top=4, first_layers=1),
    "dms": dms_jax.DMS(window=10, alpha_offset=0.0),
    "vanilla": dms_jax.Vanilla(),
}


# It might evict, as far as admission knows, and keeps every token.
KEEPS_ALL = dms_jax.RandomEviction(window=10, rate=0.0)


EVICTS = dataclasses.replace(KEEPS_ALL, rate=0.6)


def engine_with(policy, **options) -> Engine:
    shape = SHAPE | dict(num_lanes=4, max_tokens=64) | options
    return Engine(model_for("vanilla", ends=False), policy, **shape)


def prefilled(completions) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """Records the number of tokens of each call of Runner.extend."""
    counts, extend = [], Runner.extend

    def counted(self, tokens, **options):
        counts.append(sum(map(len, tokens.values())))
        return extend(self, tokens, **options)

    monkeypatch.setattr(Runner, "extend", counted)
    return counts


@pytest.fixture
def alone(monkeypatch):
    """Returns a function that serves prompts without sharing."""

    def serve(engine: Engine, given, sampling):
        with monkeypatch.context() as patch:
            patch.setattr(sharing, "prompt_of", lambda *arguments: None)
            return engine.generate(given, sampling=sampling)

    return serve


def assert_same(found, expected) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.tokens == right.tokens
        chex.assert_trees_all_close(
            np.array(left.logprobs), np.array(right.logprobs), rtol=1e-7, atol=1e-4
        )
        same_usage(left.usage, right.usage)


@pytest.mark.nightly
def test_fifty_tokens_and_four_chains_are_fifty(ran):
    """And each chain still counts its own prompt, reads and peak, as the papers do."""
    (prompt,) = prompts([50])
    out = Generation(engine_with(MORE["vanilla"]).generate([prompt] * 4, sampling=FLAT))
    assert sum(ran) == 50
    assert out.usage.prefilled_tokens == 50
    assert prefilled(out.completions) == [50] + [0] * 3
    assert out.usage.prompt_tokens == 200
    for completion in out.completions:
        assert completion.usage.prompt_tokens == 50
        assert completion.usage.kv_reads == sum(range(51, 59))
        assert completion.usage.peak_tokens == 58
    assert len({tuple(tokens) for tokens in out.tokens}) > 1  # each draws with its own key
    assert len({tokens[0] for tokens in out.tokens}) > 1  # from the first token on


@pytest.mark.nightly
def test_other_prompts_between_equal_ones(alone, ran):
    engine, (one, two, three) = engine_with(MORE["dms"]), prompts([13, 5, 30])
    given = [one, three, one, three, two, one]
    expected = alone(engine, given, SAMPLED)
    assert prefilled(expected) == [13, 30, 13, 30, 5, 13]
    ran.clear()
    found = engine.generate(given, sampling=SAMPLED)
    assert_same(found, expected)
    assert prefilled(found) == [13, 30, 0, 0, 5, 13]  # the last one had to wait for a lane
    assert sum(ran) == sum(prefilled(found))


@pytest.mark.nightly
def test_an_answer_of_one_token_takes_no_step(ran):
    one = dataclasses.replace(SAMPLED, max_new_tokens=1)
    (prompt,) = prompts([13])
    engine = engine_with(MORE["dms"])
    found = engine.generate([prompt] * 4, sampling=one)
    assert sum(ran) == 13
    assert [completion.usage.live_tokens for completion in found] == [
        found[0].usage.live_tokens
    ] * 4
    assert engine.runner.allocator.pages_in_use == 0


@pytest.mark.nightly
def test_a_share_of_the_longest_length_is_part_of_a_prompt(alone):
    """Two requests with one prompt, and budgets of half of other lengths."""
    engine, (prompt,) = engine_with(dms_jax.TOVA(compression_ratio=2)), prompts([20])
    requests = dms_jax.generation.requests.make_requests(engine.model.config, [prompt] * 3, SAMPLED)
    requests[1].max_length = 50
    found = engine.serve(requests, SAMPLED)
    assert prefilled(found) == [20, 20, 0]
    assert [completion.usage.peak_tokens for completion in found] == [15, 26, 15]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", MORE.values(), ids=MORE)
def test_too_little_memory_for_all_chains(policy, alone):
    """A pool for about two of five chains, whose prompt of 30 tokens is four chunks."""
    engine, (prompt, other) = engine_with(policy), prompts([30, 5])
    given = [prompt] * 4 + [other, prompt]
    expected = alone(engine, given, SAMPLED)
    runner = engine.runner
    free = runner.allocator._free
    whole = list(free)  # by group of layers: with values on the device, and in host memory
    for group, pages in enumerate(whole):
        free[group] = pages[len(pages) * 10 // 16 :]  # six of the sixteen pages a row of four lanes
    try:
        squeezed = engine.generate(given, sampling=SAMPLED)
        assert runner.allocator.pages_in_use == 0
    finally:
        free[:] = whole
    assert_same(squeezed, expected)
    assert sum(prefilled(squeezed)) > 35


@pytest.mark.nightly
def test_chains_wait_for_the_memory_that_they_need(ran):
    """Four chains of three pages a row, in a pool of seven: two at a time, and none is preempted.

    Admission sees what the policy keeps in any case, so all four are let in; when the prompt is
    read, those that do not fit wait, and then for the whole of it. The page that is left while the
    first two decode, between their two chunks, holds no more than its first tokens.
    """
    (prompt,) = prompts([30])
    engine = engine_with(KEEPS_ALL)
    preempted, fits = [], engine._reserve_or_preempt

    def watched(*arguments, **options):
        before = len(engine._running)
        done = fits(*arguments, **options)
        preempted.extend([None] * (before - len(engine._running)))
        return done

    engine._reserve_or_preempt = watched
    two_chunks = dataclasses.replace(SAMPLED, max_new_tokens=1 + 2 * SHAPE["chunk"])
    with squeezed(engine, 7 * 20):
        found = engine.generate([prompt] * 4, sampling=two_chunks)
    assert prefilled(found) == [30, 0, 30, 0]
    assert sum(ran) == 60
    assert preempted == []


@pytest.mark.nightly
def test_a_chain_that_is_cancelled_while_it_waits_has_read_its_prompt():
    """It has drawn its first token, though there was no memory for its copy of the prompt."""
    (prompt,) = prompts([30])
    engine = engine_with(KEEPS_ALL)
    with squeezed(engine, 6 * 20):
        found = engine.generate(
            [prompt] * 4, sampling=SAMPLED, on_tokens=lambda update: engine.cancel([2])
        )
    assert [len(completion.tokens) for completion in found] == [9, 9, 1, 9]
    assert found[2].finish_reason == "cancelled"
    usage = found[2].usage
    assert (usage.peak_tokens, usage.live_tokens, usage.compression_ratio) == (30, 30, 1)
    assert (usage.prefilled_tokens, usage.kv_reads) == (0, 0)
    assert usage.cache_bytes == 2 * 20 * 2 * 16 * 8 * 4 + engine.runner._state_bytes  # of 30 slots
    assert prefilled(found) == [30, 0, 0, 30]


@pytest.mark.nightly
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("policy", "pages"), [(KEEPS_ALL, 140), (EVICTS, 116)], ids=["keeps all", "evicts"]
)
def test_a_chain_that_its_first_token_ends_waits_for_no_memory(policy, pages, streamed):
    """There is no memory for its copy of the prompt, and it needs none."""
    (prompt,), roomy = prompts([30]), engine_with(policy)
    for seed in range(50):  # the last one begins with a token that no other one has
        sampling = dataclasses.replace(FLAT, max_new_tokens=16, seed=seed)
        *others, last = (each.tokens for each in roomy.generate([prompt] * 4, sampling=sampling))
        if all(last[0] not in other for other in others):
            break
    end = last[0]
    model = dataclasses.replace(roomy.model, generation=GenerationDefaults(eos_token_ids=(end,)))
    engine, ended = Engine(model, policy, **SHAPE | dict(num_lanes=4, max_tokens=64)), []
    expected = engine.generate([prompt] * 4, sampling=sampling)

    def on_tokens(update):
        if update.finished:
            ended.append(update.index)

    with squeezed(engine, pages):
        found = engine.generate(
            [prompt] * 4, sampling=sampling, on_tokens=on_tokens if streamed else None
        )
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert (found[3].tokens, found[3].finish_reason) == ([end], "end")
    assert prefilled(found) == [30, 0, 30, 0]
    assert not streamed or ended[0] == 3
    # As if it had read its prompt itself, but that nothing was reserved for steps of it.
    peak = dict(peak_cache_bytes=expected[3].usage.cache_bytes)
    assert found[3].usage == dataclasses.replace(expected[3].usage, **peak)


@pytest.mark.nightly
def test_a_chain_that_waited_needs_no_more_than_its_policy_keeps():
    """A row that was cut to 28 slots after its prompt has at most 29: two pages, not three."""
    policy = dms_jax.H2O(budget=28, prefill="dense_then_evict")
    engine, (prompt,) = engine_with(policy, num_lanes=2), prompts([30])
    free = engine.runner.allocator._free
    free[0] = free[0][: 2 * 20]
    found = engine.generate([prompt] * 2, sampling=SAMPLED)
    assert prefilled(found) == [30, 30]


def test_a_chain_that_does_not_fit_even_alone_is_refused():
    (prompt,) = prompts([30])
    engine = engine_with(dms_jax.Vanilla(), memory=2 * 20 * 2 * 16 * 8 * 4)
    with pytest.raises(CapacityError, match="to its end of prompt 0"):
        engine.generate([prompt] * 4, sampling=dataclasses.replace(SAMPLED, max_new_tokens=20))


@pytest.mark.nightly
def test_recomputation_after_a_preemption_counts():
    """The second chain was preempted after two chunks of its answer: prompt and answer again."""
    engine, (prompt,) = engine_with(dms_jax.Vanilla()), prompts([13])
    fits, alone = engine.runner.fits, []

    def full_once(extra, **options):
        both = len(engine._running) == 2
        if engine.runner.seen.max() > 13 and not both:
            alone.append(extra)
        if (engine.runner.seen[:2] > 13).all() and both and not alone:
            return False
        return fits(extra, **options)

    engine.runner.fits = full_once
    found = engine.generate([prompt] * 2, sampling=dataclasses.replace(SAMPLED, max_new_tokens=20))
    assert prefilled(found) == [13, 13 + 16]  # the last token of the answer was not in the cache


@pytest.mark.nightly
def test_few_programs_copy(ran):
    """One shape for any number of lanes and pages, and one draw for any number of chains."""
    engine = engine_with(MORE["dms"])
    given = prompts([13, 30, 5, 1])
    engine.generate([given[0]] * 4, sampling=SAMPLED)
    first_tokens = sharing.programs.first_tokens.jitted
    copies, draws = sharing.copy_lanes._cache_size(), first_tokens._cache_size()
    for count, prompt in ((2, given[1]), (4, given[2]), (3, given[3]), (2, given[0])):
        found = engine.generate([prompt] * count, sampling=SAMPLED)
        assert prefilled(found) == [len(prompt)] + [0] * (count - 1)
    assert sharing.copy_lanes._cache_size() == copies
    assert first_tokens._cache_size() == draws


@pytest.mark.parametrize("name", ["vanilla", "quest", "dms"])
def test_the_pool_is_copied_nowhere(name, optimized):
    """The program takes the cache over, and needs a block of pages and the rows' state besides."""
    del optimized

    def memory(max_tokens):
        engine = Engine(model_for(name), max_tokens=max_tokens, **(SHAPE | {"num_lanes": 4}))
        cache = engine.runner.cache
        arguments = (cache, np.zeros((1, 2, 16), np.int32), np.arange(4, dtype=np.int32))
        compiled = sharing.copy_lanes.lower(*arguments, engine.model.config.num_kv_heads).compile()
        assert " while(" not in compiled.as_text()  # it holds the host up until it has ended
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.pool, cache.page_state)))
        return compiled.memory_analysis(), pool

    (small, pool), (large, four_pools) = memory(64), memory(256)
    assert four_pools == 4 * pool
    assert large.alias_size_in_bytes >= four_pools
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < pool / 50
