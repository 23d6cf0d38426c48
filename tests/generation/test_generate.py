"""Greedy answers are the argmax of the logits, whatever the lanes, pages, chunks and pressure."""

import dataclasses

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation import Engine
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from tests.generation.support import (
    GREEDY,
    LENGTHS,
    NEW_TOKENS,
    POLICIES,
    SHAPE,
    engine_for,
    log_softmax,
    model_for,
    prompts,
    text_behind,
)
from tests.support.instances import nightly_but
from tests.support.models import random_model, tiny_config

pytestmark = pytest.mark.usefixtures("two_programs")
EVERY_POLICY = pytest.mark.parametrize(
    "name", nightly_but({"vanilla", "dms", "streaming"}, POLICIES)
)


# These depend on chunks, pages and preemption.
COSTS = ("cache_bytes", "peak_cache_bytes", "host_bytes", "peak_held_tokens", "prefilled_tokens")


def same_usage(left, right) -> None:
    left, right = dataclasses.asdict(left), dataclasses.asdict(right)
    for field in left:
        if field not in COSTS:
            assert left[field] == pytest.approx(right[field]), field


@EVERY_POLICY
def test_answers_are_the_argmax_of_the_logits(name):
    """Four prompts of different lengths over two lanes."""
    model, given = model_for(name, ends=False), prompts()
    completions = engine_for(name).generate(given, sampling=GREEDY)
    assert [completion.finish_reason for completion in completions] == ["length"] * len(given)
    sequences = np.zeros((len(given), max(LENGTHS) + NEW_TOKENS), np.int32)
    for row, (prompt, completion) in enumerate(zip(given, completions, strict=True)):
        assert len(completion.tokens) == NEW_TOKENS
        sequences[row, : len(prompt) + NEW_TOKENS] = prompt + completion.tokens
    expected = log_softmax(model.logits(sequences, prompt_lengths=np.array(LENGTHS)))
    for row, completion in enumerate(completions):
        steps = expected[row, LENGTHS[row] - 1 :][:NEW_TOKENS]
        assert completion.tokens == steps.argmax(-1).tolist()
        chex.assert_trees_all_close(
            np.array(completion.logprobs), steps.max(-1), rtol=1e-7, atol=1e-4
        )


@EVERY_POLICY
def test_under_pressure_nothing_changes(name):
    """A pool for little more than one sequence: requests wait, are preempted and recomputed."""
    engine, given = engine_for(name), prompts()
    expected = engine.generate(given, sampling=GREEDY)
    runner, whole = engine.runner, engine.runner.allocator._free[0]
    rows = runner.lengths[:, 0].size
    # The longest sequence alone, under this policy, and half a page per row.
    longest = max(
        completion.usage.peak_cache_bytes - runner._state_bytes for completion in expected
    )
    pages = longest // runner.page_bytes + rows // 2
    fed = []
    extend = Runner.extend

    def counted(self, tokens, **options):
        fed.append(sum(map(len, tokens.values())))
        return extend(self, tokens, **options)

    runner.allocator._free[0] = whole[len(whole) - pages :]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "extend", counted)
            squeezed = engine.generate(given, sampling=GREEDY)
        assert runner.allocator.pages_in_use == 0
        assert len(runner.allocator._free[0]) == pages
    finally:
        runner.allocator._free[0] = whole
    for left, right in zip(expected, squeezed, strict=True):
        assert left.tokens == right.tokens
        chex.assert_trees_all_close(
            np.array(left.logprobs), np.array(right.logprobs), rtol=1e-7, atol=1e-4
        )
        same_usage(left.usage, right.usage)
    assert sum(fed) >= sum(LENGTHS)
    if name in ("vanilla", "quest"):
        assert sum(fed) > sum(LENGTHS)  # a request was preempted and recomputed


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dms", "vanilla", "quest"])
def test_chunks_pages_and_lanes_change_nothing(name):
    """Quest selects pages, so the page size is part of the method."""
    given = prompts()
    expected = engine_for(name).generate(given, sampling=GREEDY)
    page_size = 16 if name == "quest" else 8
    other = dms_jax.generate(
        model_for(name, ends=False),
        given,
        sampling=GREEDY,
        chunk=5,
        page_size=page_size,
        prefill_chunk=64,
    )
    for left, right in zip(expected, other.completions, strict=True):
        assert left.tokens == right.tokens
        same_usage(left.usage, right.usage)


@pytest.mark.nightly
def test_memory_that_holds_less_than_the_batch():
    """The same through the public arguments: bytes for about one and a half sequences."""
    given = prompts()
    expected = engine_for("vanilla").generate(given, sampling=GREEDY)
    model = model_for("vanilla", ends=False)
    longest = expected[int(np.argmax(LENGTHS))].usage.peak_cache_bytes
    out = dms_jax.generate(
        model, given, sampling=GREEDY, memory=int(1.5 * longest), page_size=16, chunk=8
    )
    assert out.tokens == [completion.tokens for completion in expected]
    for left, right in zip(expected, out.completions, strict=True):
        same_usage(left.usage, right.usage)


def test_usage_of_a_plain_cache_is_counted_by_hand():
    completions = engine_for("vanilla").generate(prompts(), sampling=GREEDY)
    config = model_for("vanilla").config
    row_bytes = 2 * 16 * config.head_dim * 4  # one page of keys and values in float32
    rows = config.num_layers * config.num_kv_heads
    for length, completion in zip(LENGTHS, completions, strict=True):
        usage = completion.usage
        fed = length + NEW_TOKENS - 1  # the last token is never run
        assert (usage.prompt_tokens, usage.new_tokens) == (length, NEW_TOKENS)
        assert usage.kv_reads == sum(range(length + 1, fed + 1))
        assert usage.peak_tokens == usage.live_tokens == fed
        assert usage.compression_ratio == 1
        assert usage.cache_bytes == rows * -(-fed // 16) * row_bytes
        assert usage.peak_cache_bytes == usage.cache_bytes
    out = dms_jax.generation.Generation(completions)
    assert out.usage.kv_reads == sum(c.usage.kv_reads for c in completions)
    assert out.usage.cache_bytes == sum(c.usage.cache_bytes for c in completions)
    assert out.usage.new_tokens == 4 * NEW_TOKENS
    assert out.usage.compression_ratio == 1


@pytest.mark.nightly
def test_ends_at_an_end_token_and_at_the_last_position():
    model = model_for("vanilla", ends=False)
    (free,) = engine_for("vanilla").generate(prompts([13]), sampling=GREEDY)
    end = free.tokens[11]
    ended = dataclasses.replace(
        model, generation=dataclasses.replace(model.generation, eos_token_ids=(end, 511))
    )
    (completion,) = dms_jax.generate(ended, prompts([13]), sampling=GREEDY).completions
    stop = free.tokens.index(end) + 1
    assert completion.finish_reason == "end"
    assert completion.tokens == free.tokens[:stop]
    assert completion.usage.kv_reads == sum(range(14, 13 + stop))
    assert completion.text == text_behind(*prompts([13]), free.tokens[: stop - 1])
    # 512 positions: a prompt of 505 tokens leaves seven.
    long = dataclasses.replace(GREEDY, max_new_tokens=100)
    (completion,) = dms_jax.generate(model, prompts([505]), sampling=long).completions
    assert (len(completion.tokens), completion.finish_reason) == (7, "length")


@pytest.mark.nightly
def test_a_first_token_can_end_a_request():
    """It is read when the steps after it have been launched, and they must not run."""
    free = engine_for("vanilla").generate(prompts(), sampling=GREEDY)
    end = free[1].tokens[0]
    model = dataclasses.replace(
        model_for("vanilla"), generation=GenerationDefaults(eos_token_ids=(end,))
    )
    found = Engine(model, max_tokens=64, **SHAPE).generate(prompts(), sampling=GREEDY)
    for one, whole in zip(found, free, strict=True):
        stop = whole.tokens.index(end) + 1 if end in whole.tokens else NEW_TOKENS
        assert one.tokens == whole.tokens[:stop]
        assert one.finish_reason == ("end" if end in whole.tokens else "length")
    assert (found[1].tokens, found[1].text) == ([end], "")
    assert found[1].usage.kv_reads == 0
    assert found[1].usage.live_tokens == LENGTHS[1]


@pytest.mark.nightly
def test_a_single_sequence_that_cannot_fit():
    model = model_for("vanilla", ends=False)
    rows = model.config.num_layers * model.config.num_kv_heads
    page = 2 * 16 * model.config.head_dim * 4
    engine = Engine(model, memory=2 * rows * page, max_tokens=64, **SHAPE)
    with pytest.raises(CapacityError, match=r"prompt 0 .* even alone: it has 40 pages of 16"):
        engine.generate(prompts([30]), sampling=GREEDY)
    # Nothing is left in the cache, and requests that fit run.
    short = dataclasses.replace(GREEDY, max_new_tokens=4)
    (completion,) = engine.generate(prompts([5]), sampling=short)
    (expected,) = engine_for("vanilla").generate(prompts([5]), sampling=short)
    assert completion.tokens == expected.tokens
    with pytest.raises(CapacityError, match=r"at least .* 20 rows \(layers x KV heads\)"):
        Engine(model, memory=rows * page - 1, **SHAPE)


def test_a_sequence_beyond_those_that_the_pool_is_made_for():
    """More memory would add no page to such a pool, so the error names what would."""
    model = model_for("vanilla", ends=False)
    small = Engine(model, max_tokens=16, **SHAPE)
    with pytest.raises(CapacityError, match=r"Give it a larger max_tokens \(it is 16\), more mem"):
        small.generate(prompts([50]), sampling=GREEDY)
    rows = model.config.num_layers * model.config.num_kv_heads
    poor = Engine(model, memory=2 * rows * small.runner.page_bytes, max_tokens=64, **SHAPE)
    with pytest.raises(CapacityError, match=r"Give it more memory \(memory=\)"):
        poor.generate(prompts([42]), sampling=GREEDY)


@pytest.mark.nightly
def test_strings_and_token_lists_are_the_same_prompts():
    model = model_for("vanilla")
    texts = ["Once upon a time", "Lily and Tom went"]
    tokens = [model.tokenizer.encode(text) for text in texts]
    mixed = [texts[0], np.array(tokens[1])]
    out = dms_jax.generate(model, mixed, sampling=GREEDY)
    assert out.tokens == dms_jax.generate(model, tokens, sampling=GREEDY).tokens
    for prompt, text, new in zip(tokens, out.texts, out.tokens, strict=True):
        assert text == text_behind(prompt, new)


@pytest.mark.nightly
def test_an_adapter_model_without_a_tokenizer():
    """Decisions from an adapter, q and k norms, biases, an untied output matrix."""
    policy = dms_jax.DMS(window=6, source="adapter", shift=0, alpha_offset=0.0)
    config = tiny_config(tied=False, biases=True, num_kv_heads=1)
    transformer = random_model(config, adapter=True, dtype=np.float32)
    model = LanguageModel(transformer, policy=policy)
    given = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2]]
    out = dms_jax.generate(model, given, sampling=GREEDY, page_size=16, chunk=8, prefill_chunk=8)
    assert out.texts == ["", "", ""]
    sequences = np.zeros((3, 12 + NEW_TOKENS), np.int32)
    for row, (prompt, tokens) in enumerate(zip(given, out.tokens, strict=True)):
        sequences[row, : len(prompt) + NEW_TOKENS] = prompt + tokens
    expected = log_softmax(model.logits(sequences))
    for row, (prompt, tokens) in enumerate(zip(given, out.tokens, strict=True)):
        steps = expected[row, len(prompt) - 1 :][:NEW_TOKENS]
        chex.assert_trees_all_close(
            np.array(out.logprobs[row]), steps.max(-1), rtol=1e-7, atol=1e-4
        )
        assert tokens == steps.argmax(-1).tolist()
    assert out.usage.compression_ratio > 1.05


@pytest.mark.nightly
def test_numbers_that_only_bound_something_may_be_as_large_as_they_like():
    """The largest accepted options: a chunk is no longer than an answer can be."""
    given, most = prompts([5]), 2**31 - 1
    model = model_for("vanilla", ends=False)
    expected = engine_for("vanilla").generate(given, sampling=GREEDY)
    out = dms_jax.generate(
        model, given, sampling=GREEDY, chunk=most, prefill_chunk=most, page_size=16
    )
    assert out.tokens == [expected[0].tokens]
    engine = Engine(model, num_lanes=1, max_tokens=2**62, chunk=most, prefill_tokens=most)
    assert engine.chunk == model.config.max_position_embeddings
    (scored,) = dms_jax.score(model, prompts([13]), chunk=most, max_length=most, num_lanes=2**62)
    assert len(scored.logprobs) == 12
    unbounded = dataclasses.replace(GREEDY, max_new_tokens=2**62, top_k=2**62)
    (completion,) = dms_jax.generate(model, prompts([505]), sampling=unbounded).completions
    assert len(completion.tokens) == 7
