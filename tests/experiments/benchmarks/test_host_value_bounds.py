"""When values in host memory pay: the figures of the paper, and grouped queries by hand."""

import dataclasses

import pytest

from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.policies import KCache
from experiments.benchmarks.host_value_bounds import (
    break_even,
    prompt_hides_copies,
    step_traffic,
)

LLAMA_2_7B = ModelConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
)
LLAMA_3_8B = dataclasses.replace(LLAMA_2_7B, num_kv_heads=8, intermediate_size=14_336)


def test_the_paper_says_64_for_an_a100():
    ratio = break_even(LLAMA_2_7B, device_bandwidth=2039e9, link_bandwidth=32e9)
    assert ratio == pytest.approx(2039 / 32 + 1)  # 64.7; the paper leaves the one out
    grouped = break_even(LLAMA_3_8B, device_bandwidth=2039e9, link_bandwidth=32e9)
    assert grouped == 4 * ratio


def test_table_1_by_hand():
    """d = n h: the paper's rows 2bnh + 2bnhs + 2bns, and 2bns + 2bsd + 2bd or 2bnN + 2bNd + 2bd."""
    b, s, n, h, d, top = 3, 4096, 32, 128, 4096, 128
    traffic = step_traffic(LLAMA_2_7B, KCache(top=top, first_layers=0), tokens=s, batch=b)
    scores = 2 * b * n * h + 2 * b * n * h * s + 2 * b * n * s
    assert traffic.plain == 32 * (scores + 2 * b * n * s + 2 * b * s * d + 2 * b * d)
    assert traffic.read == 32 * (scores + 2 * b * n * top + 2 * b * top * d + 2 * b * d)
    assert traffic.fetched == 32 * 2 * b * top * d
    assert traffic.host == 32 * 2 * b * s * d
    # At the break-even the link takes as long as the reading that is saved, but for 1 / D.
    device, link = 2039e9, traffic.fetched / (traffic.plain - traffic.read) * 2039e9
    assert break_even(LLAMA_2_7B, device_bandwidth=device, link_bandwidth=link) == pytest.approx(
        s / top, rel=0.02
    )


def test_first_layers_keep_their_values():
    all_out = step_traffic(LLAMA_3_8B, KCache(first_layers=0), tokens=8192)
    half = step_traffic(LLAMA_3_8B, KCache(first_layers=16), tokens=8192)
    assert (half.fetched, half.host) == (all_out.fetched // 2, all_out.host // 2)
    assert half.plain == all_out.plain
    assert half.read == (all_out.read + all_out.plain) // 2
    assert all_out.host == 32 * 8 * 8192 * 128 * 2


def test_a_prompt_of_the_paper_hides_its_copies():
    """Equation 2 for an A100: 11 d + 2 s > FLOPS / bandwidth; here with the layer's own weights."""
    ratio = prompt_hides_copies(LLAMA_2_7B, tokens=4096, peak=312e12, link_bandwidth=32e9)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11_008
    operations = 2 * 4096 * layer + 4 * 4096**2 * 4096
    assert ratio == pytest.approx(operations / 312e12 / (2 * 4096 * 4096 / 32e9))
    assert ratio > 1


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="nothing"):
        step_traffic(LLAMA_3_8B, KCache(top=128), tokens=128)
    with pytest.raises(ConfigError, match="at least 1"):
        step_traffic(LLAMA_3_8B, KCache(), tokens=0)
    with pytest.raises(ConfigError, match="above 0"):
        break_even(LLAMA_3_8B, device_bandwidth=0.0, link_bandwidth=1.0)
