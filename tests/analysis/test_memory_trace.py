"""The memory of the pool as sequences grow."""

import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.analysis import memory_trace


def test_the_pool_follows_the_live_tokens():
    model = dms_jax.load(str(assets.path("stories260k")))
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
