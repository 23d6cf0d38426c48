"""The latency model against the numbers of the DMS paper's appendix H."""

import dataclasses

import pytest

from dms_jax.analysis.latency import cache_bytes, operations, step, weight_bytes
from dms_jax.command_line.shapes import SHAPES
from dms_jax.devices import Device
from dms_jax.errors import ConfigError

LLAMA_3_8B = SHAPES["llama-3.1-8b"]
H100 = Device(80e9, 3.35e12, 989.5e12)  # as the appendix has it


def test_equation_5():
    """Reads = 1.50e10 + 1.31e5 B L, and half of Reads(1, 0) is 7.5e9 parameters."""
    assert weight_bytes(LLAMA_3_8B) == pytest.approx(1.50e10, rel=0.005)
    assert weight_bytes(LLAMA_3_8B) / 2 == pytest.approx(7.5e9, rel=0.005)
    assert cache_bytes(LLAMA_3_8B, batch=1, live_tokens=1) == 131_072
    assert cache_bytes(LLAMA_3_8B, batch=3, live_tokens=100) == 300 * 131_072


def test_equation_4():
    """5.24e5 B L as printed; the constant is that of equation 2, 1.50e10 and not 1.45e9."""
    one, many = (operations(LLAMA_3_8B, batch=1, live_tokens=tokens) for tokens in (0, 1000))
    assert (many - one) / 1000 == 524_288
    by_hand = 32 * (6 * 4096 * 14_336 + 4 * 4096**2 + 4 * 4096 * 1024) + 2 * 4096 * 128_256
    assert one == by_hand == pytest.approx(1.50e10, rel=0.005)
    assert operations(LLAMA_3_8B, batch=7, live_tokens=1000) == 7 * many


def test_memory_bound_step():
    found = step(LLAMA_3_8B, H100, tokens=8192, batch=32)
    cache = 131_072 * 8192 * 32
    assert (
        found.seconds == found.read_seconds == pytest.approx((15.01e9 + cache) / 3.35e12, rel=1e-3)
    )
    assert found.cache_share == pytest.approx(cache / (15.01e9 + cache), rel=1e-3)
    eighth = step(LLAMA_3_8B, H100, tokens=8192, batch=32, compression_ratio=8)
    assert eighth.cache_bytes == cache / 8
    assert eighth.cache_share < found.cache_share


def test_compute_bound_step():
    """Many short sequences: the weights are read once for all of them."""
    found = step(LLAMA_3_8B, H100, tokens=16, batch=1024)
    want = 1024 * (15.01e9 + 524_288 * 16) / 989.5e12
    assert found.seconds == found.compute_seconds == pytest.approx(want, rel=1e-3)
    assert found.cache_share == pytest.approx(1024 * 16 * 131_072 / 3.35e12 / want, rel=1e-3)


def test_heads_wider_than_the_hidden_size():
    """Qwen3's query heads together are wider than the residual stream."""
    wide = dataclasses.replace(LLAMA_3_8B, hidden_size=2048)
    per_layer = 2048 * (3 * 14_336 + 2 * 4096 + 2 * 1024)
    assert weight_bytes(wide) == 2 * (32 * per_layer + 2048 * 128_256)


def test_bad_numbers_are_refused():
    for changes, message in (
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"tokens": -1}, "tokens must be"),
        ({"compression_ratio": 0.5}, "ratio must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            step(LLAMA_3_8B, H100, **({"tokens": 8} | changes))
