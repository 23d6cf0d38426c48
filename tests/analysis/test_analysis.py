"""What the pictures are made of: live keys, decisions by key, texts of tokens, the page."""

import json
import re

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.analysis import eviction_page, evictions, live_after, memory_trace, token_texts


@pytest.fixture(scope="module")
def model():
    return dms_jax.load(str(assets.path("stories260k")))


def test_live_after_counts_the_window_and_what_was_kept():
    evicted = np.array([[True, False, True, True], [True, True, True, True]])
    # Window 1: keys 2 and 3 are in it. Key 1 of the first row was kept before it.
    chex.assert_trees_all_equal(live_after(evicted, 1), np.array([3, 2]))
    chex.assert_trees_all_equal(live_after(evicted, 10), np.array([4, 4]))


def test_evictions_are_by_key_and_agree_with_the_cache(model):
    tokens = np.asarray(model.tokenizer.encode(assets.stories("valid")[0]))[None, :60]
    policy = dms_jax.RandomEviction(window=4, rate=0.7, seed=2)
    evicted = evictions(model, tokens, policy=policy)
    config = model.config
    chex.assert_shape(evicted, (config.num_layers, 1, config.num_kv_heads, 60))
    live = live_after(evicted[..., :59], 4)  # the last token is never fed
    (score,) = dms_jax.score(model, tokens.tolist(), policy=policy)
    assert score.usage.live_tokens == pytest.approx(live.mean())
    with pytest.raises(dms_jax.ConfigError, match="does not decide token by token"):
        evictions(model, tokens, policy=dms_jax.TOVA(budget=8))


def test_the_pool_follows_the_live_tokens(model):
    story = model.tokenizer.encode(assets.stories("valid")[0])[:65]
    tokens = np.asarray([story, story])
    slot = 2 * model.config.head_dim * 4
    rows = model.config.num_layers * model.config.num_kv_heads * 2
    seen, held, live = memory_trace(model, tokens, chunk=16, page_size=8)
    assert seen == [0, 16, 32, 48, 64]
    assert live == [count * rows * slot for count in seen]
    assert held == live  # multiples of the page
    policy = dms_jax.StreamingLLM(budget=12)
    _, held, live = memory_trace(model, tokens, policy=policy, chunk=16, page_size=8)
    assert live == [0] + 4 * [12 * rows * slot]
    assert held == [0] + 4 * [16 * rows * slot]


def test_texts_of_tokens_join_to_the_text(model):
    text = 'Lily said, "Café!"\nThe end.'
    tokens = model.tokenizer.encode(text)
    pieces = token_texts(model.tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == model.tokenizer.decode(tokens) == text


def test_the_page_holds_every_token_and_bit():
    tokens = ["a", " </script>", '"b"']
    evicted = np.array([[[True, False, True]], [[False, False, True]]])
    page = eviction_page(tokens, evicted, window=1, title="<T>", note="n & m")
    assert "<h1>&lt;T&gt;</h1>" in page
    assert "n &amp; m" in page
    assert page.count("</script>") == 1  # the text cannot end the script
    (data,) = re.findall(r"const tokens = (.*), evicted = (.*), window_ = 1;", page)
    assert json.loads(data[0].replace("<\\/", "</")) == tokens
    assert json.loads(data[1]) == [["101"], ["001"]]
