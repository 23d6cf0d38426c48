"""The real engine: usage, end tokens, eight bits, and values on the host; refused requests."""

import dataclasses
import functools

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import CapacityError
from dms_jax.generation import Completion, Engine
from dms_jax.generation.scheduler import Scheduler
from dms_jax.model.language_model import GenerationDefaults
from tests.generation.support import (
    GREEDY,
    LENGTHS,
    NEW_TOKENS,
    SHAPE,
    answer,
    engine_for,
    host_engine,
    model_for,
    prompts,
    results_of,
    stories,
    text_behind,
)
from tests.generation.test_overlap import in_order, spelled

# These depend on chunks, pages and preemption.
COSTS = ("cache_bytes", "peak_cache_bytes", "host_bytes", "peak_held_tokens", "prefilled_tokens")


def same_usage(left, right) -> None:
    left, right = dataclasses.asdict(left), dataclasses.asdict(right)
    for field in left:
        if field not in COSTS:
            assert left[field] == pytest.approx(right[field]), field


@functools.cache
def undisturbed() -> list[Completion]:
    """Returns the answers to four prompts of different lengths over two lanes."""
    return engine_for("vanilla").generate(prompts(), sampling=GREEDY)


def test_eight_bits_are_preempted_without_a_change(monkeypatch):
    """The pool is full once both lanes have a chunk of answer; the younger one is preempted.

    `tests/laws/test_memory.py` compares answers of every mechanism, with and without preemptions.
    """
    model = model_for("vanilla", ends=False)
    engine = Engine(model, kv_dtype="float8_e4m3", max_tokens=64, **SHAPE)
    expected = engine.generate(prompts(), sampling=GREEDY)
    fits, left = engine.runner.reservation.fits, results_of(monkeypatch, Scheduler, "preempt")

    def full_once(extra, **options):
        both = [len(each.generated) for each in engine.running]
        return not (len(both) == 2 and min(both) > SHAPE["chunk"] and not left) and fits(
            extra, **options
        )

    monkeypatch.setattr(engine.runner.reservation, "fits", full_once)
    found = engine.generate(prompts(), sampling=GREEDY)
    assert len(left) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        chex.assert_trees_all_close(one.logprobs, other.logprobs, rtol=1e-7, atol=1e-4)
        same_usage(one.usage, other.usage)
    again = sum(one.usage.prefilled_tokens for one in found)
    assert again > sum(LENGTHS) + SHAPE["chunk"]
    assert engine.runner.reservation.allocator.pages_in_use == 0


def test_host_values_are_written_between_chunks(monkeypatch):
    """The next steps must not read values before they are written."""
    engine = engine_for("kcache")
    _, order = in_order(monkeypatch, engine, prompts((5, 13)))
    assert order == spelled("LC LC LC")
    _, order = in_order(monkeypatch, engine, prompts((5, 9, 13, 7)))  # of which two wait
    assert order == spelled("LC LC LC" * 2)


def test_usage_of_plain_cache():
    completions = undisturbed()
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


def test_first_token_ends_request():
    """The token is collected after the next steps were launched, which must have no effect."""
    free = undisturbed()
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


# -- host decisions ----------------------------------------------------------------------------


@pytest.mark.usefixtures("fakes")
def test_ends_at_the_last_position():
    """512 positions: a prompt of 505 tokens leaves seven, for any requested length."""
    (prompt,) = prompts([505])
    engine = host_engine(lanes=1, max_tokens=512, prefill_chunk=512)
    for most in (100, 2**62):
        long = dataclasses.replace(GREEDY, max_new_tokens=most)
        (completion,) = engine.generate([prompt], sampling=long)
        answer(prompt, GREEDY, new_tokens=7).check(completion)


@pytest.mark.usefixtures("fakes")
def test_sequence_that_cannot_fit_is_refused():
    page = 2 * 16 * 8 * 4
    engine = Engine(host_engine().model, memory=2 * 20 * page, max_tokens=64, **SHAPE)
    with pytest.raises(CapacityError, match=r"prompt 0 .* even alone: it has 40 pages of 16"):
        engine.generate(prompts([30]), sampling=GREEDY)
    # Nothing is left in the cache, and requests that fit run.
    short = dataclasses.replace(GREEDY, max_new_tokens=4)
    (completion,) = engine.generate(prompts([5]), sampling=short)
    answer(*prompts([5]), short).check(completion)
    with pytest.raises(CapacityError, match=r"at least .* 20 rows \(layers x KV heads\)"):
        Engine(host_engine().model, memory=20 * page - 1, **SHAPE)
    with pytest.raises(CapacityError, match=r"Give it more memory \(`memory`\)"):
        engine.generate(prompts([42]), sampling=GREEDY)
    # More memory would add no page to a pool of fixed size, so the error names the right option.
    small = Engine(host_engine().model, max_tokens=16, **SHAPE)
    with pytest.raises(CapacityError, match=r"Give it a larger `max_tokens` \(it is 16\), more"):
        small.generate(prompts([50]), sampling=GREEDY)


@pytest.mark.usefixtures("fakes")
def test_strings_and_token_lists_are_equivalent():
    texts = ["Once upon a time", "Lily and Tom went"]
    tokens = [stories().tokenizer.encode(text) for text in texts]
    out = host_engine().generate([texts[0], np.array(tokens[1])], sampling=GREEDY)
    assert out == host_engine().generate(tokens, sampling=GREEDY)
    for prompt, each in zip(tokens, out, strict=True):
        assert each.text == text_behind(prompt, each.tokens)
