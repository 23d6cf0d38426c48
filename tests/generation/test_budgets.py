"""Budgets relative to the request: each sequence of a batch has a separate budget."""

import dataclasses
import functools

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, Sampling
from dms_jax.generation.memory import pool_pages
from tests.generation.support import GREEDY, answer, host_engine, prompts, stories
from tests.support.instances import nightly_but

SAMPLING = Sampling(temperature=0, max_new_tokens=16, logprobs=True)
PROMPTS = [list(range(3, 3 + length)) for length in (24, 7, 40)]
SHARED = dict(page_size=8, chunk=8, prefill_chunk=16)
KINDS = {
    "tova": functools.partial(dms_jax.TOVA, prefill="evict_past_budget"),
    "h2o": dms_jax.H2O,
    "snapkv": functools.partial(dms_jax.SnapKV, window=4, interval=5),
    "streaming": functools.partial(dms_jax.StreamingLLM, sinks=2),
    "streaming by token": functools.partial(
        dms_jax.StreamingLLM, sinks=2, prefill="evict_past_budget"
    ),
}
READS = {
    "quest": functools.partial(dms_jax.Quest, dense_layers=1),
    "kcache": lambda budget=None, compression_ratio=None: dms_jax.KCache(
        values="device",
        **(dict(top=budget) if budget else dict(compression_ratio=compression_ratio)),
    ),
}
BOTH = SHARED | dict(num_lanes=2, max_tokens=128)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def answers(policy, prompts):
    return Engine(stories(), policy, **BOTH).generate(prompts, sampling=SAMPLING)


@pytest.mark.parametrize(
    "kind",
    nightly_but([KINDS["streaming"]], (KINDS | READS).values()),
    ids=KINDS | READS,
)
def test_budget_is_share_of_request(kind):
    """The same in a batch and alone; for one of them it equals a budget in tokens."""
    policy, (one, other) = kind(compression_ratio=2), PROMPTS[1:]
    together = answers(policy, [one, other])
    fixed = kind(budget=(len(other) + SAMPLING.max_new_tokens) // 2)
    if fixed.parallel == "always" and policy.shrinks:  # a window in tokens applies to prompts, too
        fixed = policy
    separate = [*answers(policy, [one]), *answers(fixed, [other])]
    for completion, alone in zip(together, separate, strict=True):
        assert completion.tokens == alone.tokens
        chex.assert_trees_all_close(
            np.array(completion.logprobs), np.array(alone.logprobs), rtol=1e-7, atol=1e-4
        )
        assert completion.usage.kv_reads == alone.usage.kv_reads
        assert completion.usage.peak_tokens == alone.usage.peak_tokens
    assert len({completion.usage.live_tokens for completion in together}) == 2


def test_share_over_windowed_policy_is_refused():
    over = dms_jax.StreamingLLM(compression_ratio=2)
    with pytest.raises(dms_jax.ConfigError, match="StreamingLLM with a budget in tokens"):
        dms_jax.Quest(over=over)
    rows = dms_jax.Quest(compression_ratio=4, over=dms_jax.StreamingLLM(budget=16))
    assert rows.for_length(100) == dms_jax.Quest(budget=25, over=dms_jax.StreamingLLM(budget=16))


def test_kcache_fetches_fixed_number():
    with pytest.raises(dms_jax.ConfigError, match="give top, or values='device'"):
        dms_jax.KCache(compression_ratio=4)
    share = dms_jax.KCache(compression_ratio=4, values="device", over=dms_jax.DMS(window=3))
    assert share.for_length(64) == dms_jax.KCache(
        top=16, values="device", over=dms_jax.DMS(window=3)
    )
    assert dms_jax.KCache().for_length(64) == dms_jax.KCache()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("name", "left"), [("cuts", 8), ("bounded", 20)])
def test_usage_counts_tokens_after_a_cut(name, left):
    """An answer of one token: no token was run after the eviction."""
    one, (prompt,) = dataclasses.replace(GREEDY, max_new_tokens=1), prompts([40])
    (made,) = host_engine(name, 1).generate([prompt], sampling=one)
    answer(prompt, one, name).check(made)
    assert (made.usage.live_tokens, made.usage.compression_ratio) == (left, 40 / left)


@pytest.mark.usefixtures("fakes")
def test_cut_prompt_frees_pages():
    """In a pool sized for the whole prompt."""
    engine, held = host_engine("cuts often", 1), []
    engine.generate(
        prompts([50]),
        sampling=dataclasses.replace(GREEDY, max_new_tokens=9),
        on_tokens=lambda update: held.append(engine.runner.reservation.allocator.pages_in_use),
    )
    assert set(held) == {20, 0}  # 8 of 50 tokens, and 4 more, until the end


def test_pool_size_follows_shared_budget():
    sized = functools.partial(
        pool_pages, stories(), num_lanes=2, max_tokens=128, page_size=8, memory=None
    )
    tova = functools.partial(dms_jax.TOVA, prefill="evict_past_budget")
    assert sized(tova(compression_ratio=4)) == sized(tova(budget=32))
    assert sized(tova(compression_ratio=4)) < sized(dms_jax.Vanilla())
    for whole in (dms_jax.TOVA(compression_ratio=4), dms_jax.StreamingLLM(compression_ratio=4)):
        assert sized(whole) == sized(dms_jax.Vanilla())  # the whole prompt is in it
