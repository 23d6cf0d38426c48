"""Likelihoods from the cache against plain passes, and perplexity."""

import dataclasses
import math

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import DataError
from dms_jax.evaluation import (
    Serving,
    encode_pair,
    likelihoods,
    perplexity,
    serving,
)
from dms_jax.evaluation.perplexity import cut_into_windows
from dms_jax.generation import memory
from dms_jax.generation.runner import Runner
from tests.evaluation.tasks.published import text
from tests.generation.support import log_softmax, model_for, prompts, stories
from tests.support.instances import further

# One pool size and one page per sequence, so that calls share programs.
SERVING = Serving(lanes=4, memory=400_000, page_size=64, chunk=8, prefill_chunk=8)
SMALL_PAGES = dataclasses.replace(SERVING, page_size=16)  # the budget of Quest is a page
TOVA = dms_jax.TOVA(budget=8, prefill="evict_past_budget")
# Contexts of 5 to 30 tokens, continuations of 1 to 6; the first context is asked about twice more.
PAIRS = [
    (tokens[:-size], tokens[-size:])
    for tokens, size in zip(prompts((9, 30, 13, 20)), (1, 3, 6, 2), strict=True)
]
PAIRS += [(PAIRS[0][0], [7]), (PAIRS[0][0], [7, 9]), (PAIRS[2][0], PAIRS[2][1][:2])]
# A pair that is asked twice, and one that differs in the last token.
PAIRS += [PAIRS[2], (PAIRS[2][0], [*PAIRS[2][1][:-1], 9])]


def serving_of(name: str) -> Serving:
    return SMALL_PAGES if name == "quest" else SERVING


def by_plain_passes(name: str, pairs=PAIRS) -> list[tuple[float, bool]]:
    """Log-probabilities from one pass over whole sequences, and whether argmax agrees."""
    longest = max(len(context) + len(continuation) for context, continuation in PAIRS)
    tokens = np.zeros((len(PAIRS), longest), np.int32)  # padded after their ends
    prompt_lengths = np.zeros(len(PAIRS), int)
    for row, (context, continuation) in enumerate(pairs):
        tokens[row, : len(context) + len(continuation)] = [*context, *continuation]
        prompt_lengths[row] = len(context)
    logits = np.asarray(model_for(name).logits(tokens, prompt_lengths=prompt_lengths))
    found = []
    for row, (context, continuation) in enumerate(pairs):
        places = np.arange(len(continuation))
        own = log_softmax(logits[row, len(context) - 1 + places])
        found.append(
            (own[places, continuation].sum(), bool((own.argmax(-1) == continuation).all()))
        )
    return found


@pytest.mark.parametrize(("name", "large"), [("vanilla", 1 << 16), ("tova", 1 << 21)])
def test_prefill_size_fits_the_free_memory(name, large, monkeypatch):
    """8e9 bytes are always enough; on a small device the pool leaves a tenth."""
    model = model_for(name)
    token = 3 * model.config.intermediate_size * model.dtype.itemsize
    for free, tokens in ((1e14, large), (10 * 1000 * token, 512), (10, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_device_memory", lambda model, free=free: (0.9 * free, free))
            spare = memory.spare_bytes(model)
        monkeypatch.setattr(serving, "spare_bytes", lambda model, spare=spare: spare)
        engine = SERVING.engine(model, model.policy, sequences=1, max_tokens=64)
        assert engine.options.prefill_tokens == tokens


@pytest.mark.parametrize("name", ["vanilla", *further("dms", "tova", "quest")])
def test_likelihoods_equal_a_plain_pass(name):
    found = likelihoods(model_for(name), PAIRS, serving=serving_of(name))
    assert_as_plain_passes(found, by_plain_passes(name))


def assert_as_plain_passes(found, want):
    chex.assert_trees_all_close(
        [each.logprob for each in found], [float(logprob) for logprob, _ in want], atol=1e-4
    )
    assert [each.greedy for each in found] == [greedy for _, greedy in want]


def assert_same(found, want):
    """Up to the rounding of sums, which depends on the batch."""
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert (one.greedy, one.peak_tokens) == (other.greedy, other.peak_tokens)


def test_continuations_of_many_lengths_share_programs(monkeypatch):
    """20, 9, 3 and 1 tokens; the last of each is not read, so 19 steps are 8, 8 and 3."""
    ran, follow = [], Runner.decode

    def count(runner, tokens, remaining, *arguments, num_steps, **options):
        ran.append((num_steps, np.minimum(remaining, num_steps).tolist()))
        return follow(runner, tokens, remaining, *arguments, num_steps=num_steps, **options)

    pairs, done = [([1, 2, 5], list(range(3, 3 + size))) for size in (20, 9, 3, 1)], []
    want = by_plain_passes("vanilla", pairs)
    peaks = [len(context) + len(continuation) - 1 for context, continuation in pairs]
    monkeypatch.setattr(Runner, "decode", count)
    found = likelihoods(stories(), pairs, serving=SERVING, on_done=lambda: done.append(1))
    assert_as_plain_passes(found, want)
    assert len(done) == len(pairs)
    assert [each.peak_tokens for each in found] == peaks
    assert ran == [(8, [8, 8, 2, 0]), (8, [8, 0, 0, 0]), (8, [3, 0, 0, 0])]
    ran.clear()
    likelihoods(stories(), pairs[-1:], serving=SERVING)
    assert ran == []


@pytest.mark.nightly
def test_compression_ratio_applies_to_each_sequence():
    """Half of 30 and of 9 tokens, in one batch, also with a common context."""
    policy = dms_jax.TOVA(compression_ratio=2, prefill="evict_past_budget")
    found = likelihoods(stories(), PAIRS[:2], policy=policy, serving=SERVING)
    assert [each.peak_tokens for each in found] == [5, 16]
    pairs = [(PAIRS[1][0], [3, 4, 5]), (PAIRS[1][0], [3] * 13), (PAIRS[1][0], [9, 4, 5])]
    found = likelihoods(stories(), pairs, policy=policy, serving=SERVING)
    alone = [likelihoods(stories(), [pair], policy=policy, serving=SERVING)[0] for pair in pairs]
    assert_same(found, alone)
    assert found[0].peak_tokens < found[1].peak_tokens


def test_context_is_the_prompt():
    """SnapKV cuts at the end of the context, as in generation."""
    policy = dms_jax.SnapKV(budget=8, window=4)
    (found,) = likelihoods(stories(), PAIRS[1:2], policy=policy, serving=SERVING)
    context, continuation = PAIRS[1]
    tokens = np.asarray([[*context, *continuation]], np.int32)
    logits = stories().logits(tokens, policy=policy, prompt_lengths=np.asarray([len(context)]))
    own = log_softmax(np.asarray(logits)[0, len(context) - 1 : -1])
    want = own[np.arange(len(continuation)), continuation].sum()
    assert found.logprob == pytest.approx(want, abs=1e-4)
    (plain,) = likelihoods(stories(), PAIRS[1:2], serving=SERVING)
    assert abs(found.logprob - plain.logprob) > 0.01


@pytest.mark.nightly
def test_interrupt_keeps_finished_likelihoods(monkeypatch):
    from dms_jax.generation.runner import Runner

    want, clear, cleared = likelihoods(stories(), PAIRS, serving=SERVING), Runner.clear, []

    def second(self, lanes):
        cleared.append(lanes)
        if len(cleared) == 2:
            raise KeyboardInterrupt
        return clear(self, lanes)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "clear", second)
        with pytest.raises(KeyboardInterrupt) as caught:
            likelihoods(stories(), PAIRS, serving=dataclasses.replace(SERVING, lanes=2))
    done = caught.value.finished
    assert 2 <= len(done) < len(PAIRS)
    assert_same(list(done.values()), [want[index] for index in done])


def test_invalid_pairs_are_refused():
    for pairs, message in (
        ([([1], [2]), ([], [1])], "Pair 1 has an empty"),
        ([([1], [])], "Pair 0 has an empty"),
        ([([1], [512])], "Pair 0: Token ids must lie"),
        ([([1] * 500, [1] * 20)], "Pair 0: 520 tokens do not fit"),
    ):
        with pytest.raises(DataError, match=message):
            likelihoods(stories(), pairs, serving=SERVING)
    assert likelihoods(stories(), [], serving=SERVING) == []


def test_context_and_continuation_are_encoded_together():
    tokenizer = stories().tokenizer
    context, continuation = encode_pair(stories(), "Once upon ", "a time")
    assert [*context, *continuation] == tokenizer.encode("Once upon a time")
    assert context == tuple(tokenizer.encode("Once upon"))
    begin, after = encode_pair(stories(), "", "Once")
    assert begin == (tokenizer.bos_token_id,)
    assert after == tuple(tokenizer.encode("Once", add_special_tokens=False))


# -- perplexity -----------------------------------------------------------------------------------


def test_perplexity_predicts_every_token_once():
    assert cut_into_windows([5, 6, 7], 2, 1) == [[1, 5, 6], [6, 7]]
    assert cut_into_windows([5, 6], 2, 1) == [[1, 5, 6]]


@pytest.mark.nightly
def test_perplexity_equals_plain_passes(tmp_path):
    story = "Once upon a time, there was a big dog. The dog liked to run and jump all day."
    path = text(tmp_path / "a.txt", story)
    tokens = stories().tokenizer.encode(story, add_special_tokens=False)
    found = perplexity(stories(), path, window=16, serving=SERVING)
    nats = 0.0
    for window in cut_into_windows(tokens, 16, stories().tokenizer.bos_token_id):
        own = log_softmax(np.asarray(stories().logits(np.asarray([window], np.int32)))[0, :-1])
        nats -= own[np.arange(len(window) - 1), window[1:]].sum()
    assert found.tokens == len(tokens)
    assert found.nats == pytest.approx(nats, abs=1e-3)
    assert found.perplexity == pytest.approx(math.exp(nats / len(tokens)), rel=1e-4)
    assert found.loss.value == pytest.approx(nats / len(tokens), rel=1e-4)
    first = perplexity(stories(), path, window=16, max_tokens=16, serving=SERVING)
    assert (first.tokens, len(first.window_nats)) == (16, 1)
    small = perplexity(stories(), path, window=16, policy=TOVA, serving=SERVING)
    assert small.peak <= 9 < found.peak
    assert small.reads < found.reads
    assert small.nats > found.nats


@pytest.mark.nightly
def test_documents_are_scored_separately(tmp_path):
    first, second = "Once upon a time, there was a dog.", "One day, Lily saw a bird."
    both = text(tmp_path / "both.txt", f"{first}\n<|endoftext|>\n{second}\n")
    found = perplexity(stories(), both, window=64, serving=SERVING)
    alone = [
        perplexity(stories(), text(tmp_path / "one.txt", each), window=64, serving=SERVING)
        for each in (first, second)
    ]
    assert found.nats == pytest.approx(sum(each.nats for each in alone), abs=1e-3)
    assert found.tokens == sum(each.tokens for each in alone)
    cut = perplexity(stories(), both, window=64, max_tokens=alone[0].tokens + 3, serving=SERVING)
    assert (cut.tokens, len(cut.window_nats)) == (alone[0].tokens + 3, 2)


def test_invalid_texts_are_refused(tmp_path):
    for path, options, message in (
        (tmp_path / "none.txt", {}, r"none\.txt cannot be read"),
        (text(tmp_path / "blank.txt", " \n"), {}, r"blank\.txt contains no documents"),
        (text(tmp_path / "a.txt", "words"), {"window": 512}, "beyond the model's 512 positions"),
    ):
        with pytest.raises(DataError, match=message):
            perplexity(stories(), path, **options)


SHARED = [(PAIRS[1][0], each) for each in ([3, 4, 5], [7], [3, 4, 9, 2], [8, 1])]


@pytest.mark.nightly
@pytest.mark.parametrize(("lanes", "name"), [(4, "vanilla"), (4, "quest"), (2, "tova")])
def test_shared_context_is_prefilled_once(name, lanes, monkeypatch):
    """Four continuations of a context of 27 tokens, two of which differ in their last token."""
    from dms_jax.generation.runner import Runner

    serving, read, extend = dataclasses.replace(serving_of(name), lanes=lanes), [], Runner.extend

    def counted(self, batch):
        read.append(sum(map(len, batch.tokens.values())) if batch.prompt else 0)
        return extend(self, batch)

    alone = [likelihoods(model_for(name), [pair], serving=serving)[0] for pair in SHARED]
    monkeypatch.setattr(Runner, "extend", counted)
    found = likelihoods(model_for(name), [*SHARED, PAIRS[0]], serving=serving)
    assert_same(found[:-1], alone)
    assert_same(found[-1:], likelihoods(model_for(name), PAIRS[:1], serving=serving))
    contexts = -(-4 // lanes) * 27 + 2 * 8  # once for each set of lanes; then the other, twice
    assert sum(read) == contexts


def test_one_token_options_need_no_fork(monkeypatch):
    """Letters of a multiple-choice question, and one longer option."""
    copied, fork = [], Runner.fork
    monkeypatch.setattr(
        Runner, "fork", lambda self, lanes: copied.append(len(lanes)) or fork(self, lanes)
    )
    pairs = [(PAIRS[1][0], each) for each in ([3], [7], [9], [3, 4])]
    found = likelihoods(stories(), pairs, serving=SERVING)
    assert_as_plain_passes(found, by_plain_passes("vanilla", pairs))
    assert [each.peak_tokens for each in found] == [27, 27, 27, 28]
    assert sum(copied) <= 1
