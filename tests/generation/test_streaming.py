"""Streaming: updates add up, stop strings end a request, NaN logits are named."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import dms_jax
from dms_jax.errors import CheckpointError
from dms_jax.generation import Engine, Update
from dms_jax.generation.requests import check_finite, make_requests
from tests.generation.support import (
    GREEDY,
    NEW_TOKENS,
    SHAPE,
    answer,
    engine_for,
    host_engine,
    model_for,
    prompts,
    stories,
)
from tests.support.fake_programs import HOT


class Listener:
    """Keeps the updates of each request."""

    def __init__(self, count: int):
        self.updates: list[list[Update]] = [[] for _ in range(count)]

    def __call__(self, update: Update) -> None:
        self.updates[update.index].append(update)

    def check(self, completions) -> None:
        """Updates add up to the completions; exactly the last one of each is marked as finished."""
        for updates, completion in zip(self.updates, completions, strict=True):
            assert [t for update in updates for t in update.tokens] == completion.tokens
            assert "".join(update.text for update in updates) == completion.text
            finished = [update.finished for update in updates]
            assert finished == [False] * (len(finished) - 1) + [True]


@pytest.mark.usefixtures("fakes")
def test_updates_add_up_to_text():
    """At a high temperature most tokens are bytes, and many characters are broken."""
    sampling = dms_jax.Sampling(temperature=HOT, max_new_tokens=NEW_TOKENS, seed=1)
    listener = Listener(4)
    completions = host_engine().generate(prompts(), sampling=sampling, on_tokens=listener)
    listener.check(completions)
    for prompt, completion in zip(prompts(), completions, strict=True):
        answer(prompt, sampling).check(completion)
    assert any("\ufffd" in completion.text for completion in completions)


def test_stop_strings_end_a_request_and_its_usage():
    engine = engine_for("vanilla")
    (free,) = engine.generate(prompts([13]), sampling=GREEDY)
    stop = free.text[16:21]  # it starts and ends within tokens, in the second chunk or later
    cut = free.text.index(stop)
    decode = stories().tokenizer.decode
    fewest = next(n for n in range(1, 99) if stop in decode(free.tokens[:n]))
    sampling = dataclasses.replace(GREEDY, stop=["never there", stop])
    listener = Listener(1)
    (completion,) = engine.generate(prompts([13]), sampling=sampling, on_tokens=listener)
    listener.check([completion])
    assert (completion.finish_reason, completion.text) == ("stop", free.text[:cut])
    assert completion.tokens == free.tokens[:fewest]
    assert completion.logprobs == free.logprobs[:fewest]
    # The usage of a request of exactly that many tokens; later steps do not count.
    exact = dataclasses.replace(GREEDY, max_new_tokens=fewest)
    (short,) = engine.generate(prompts([13]), sampling=exact)
    for field in ("prompt_tokens", "new_tokens", "kv_reads", "peak_tokens", "live_tokens"):
        assert getattr(completion.usage, field) == getattr(short.usage, field), field
    assert completion.usage.compression_ratio == short.usage.compression_ratio


def broken_model():
    """The plain model with NaN weights."""
    model = model_for("vanilla", ends=False)
    graph, state = nnx.split(model.transformer)
    broken = jax.tree.map(lambda x: x * np.nan, state)
    return dataclasses.replace(model, transformer=nnx.merge(graph, broken))


def test_nan_weights_are_named():
    engine = Engine(broken_model(), max_tokens=64, **SHAPE)
    with pytest.raises(CheckpointError, match=r"logits are not numbers .* token 5 of prompt 0"):
        engine.generate(prompts(), sampling=GREEDY)


def test_first_token_with_nan_logits_is_named():
    """It is within a chunk, after a prompt of three tokens and two new ones."""
    config = model_for("vanilla").config
    fine, request, other = make_requests(config, [[1, 4], [1, 5, 7], [1, 6]], GREEDY)
    request.generated = [4, 9]
    numbers = np.array([True, True])
    check_finite([(fine, numbers), (request, numbers)])
    drawn = [(fine, numbers), (request, np.array([True, True, False, True])), (other, ~numbers)]
    with pytest.raises(CheckpointError, match="at token 7 of prompt 1") as caught:
        check_finite(drawn)
    assert caught.value.indices == {1, 2}
    with pytest.raises(CheckpointError, match="at token 5 of prompt 1"):
        check_finite([(request, np.bool_(False))])
