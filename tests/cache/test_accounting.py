"""Usage figures from totals per step, by hand."""

import dataclasses

import numpy as np

from dms_jax.cache.accounting import Meter


def test_figures_are_averages_over_rows():
    meter = Meter(rows=4)
    meter.add([4, 8, 12])  # a prompt of three tokens, everything kept
    meter.add(np.array([16, 16, 12]), [16, 16, 12])  # three steps, one row shrinks
    meter.peak_bytes = 900
    usage = meter.usage(prompt_tokens=3, new_tokens=4, seen=6, cache_bytes=700)
    assert usage.kv_reads == 11.0
    assert usage.peak_tokens == 4.0
    assert usage.live_tokens == 3.0
    assert usage.compression_ratio == 2.0
    assert (usage.cache_bytes, usage.peak_cache_bytes) == (700, 900)
    assert (usage.prompt_tokens, usage.new_tokens) == (3, 4)


def test_held_tokens_are_reported_beside_live_ones():
    """Two rows; two chunks of three tokens in one pass; of each chunk one token stays live."""
    meter = Meter(rows=2)
    meter.add([2, 2, 2], held=6)
    meter.add([4, 4, 4], held=8)
    meter.add([6, 6], [6, 6])
    usage = meter.usage(prompt_tokens=6, new_tokens=3, seen=8, cache_bytes=0)
    assert (usage.peak_tokens, usage.peak_held_tokens) == (3.0, 4.0)
    meter.add([10], [10])  # live entries are held entries
    usage = meter.usage(prompt_tokens=6, new_tokens=4, seen=9, cache_bytes=0)
    assert usage.peak_tokens == usage.peak_held_tokens == 5.0


def test_no_tokens_have_ratio_one():
    usage = Meter(rows=2).usage(prompt_tokens=0, new_tokens=0, seen=0, cache_bytes=0)
    assert usage.compression_ratio == 1.0
    assert usage.peak_tokens == 0.0


def test_peak_is_at_least_the_final_bytes():
    """A turn of a conversation may begin with more bytes than any of its chunks reserves."""
    meter = Meter(rows=2, peak_bytes=300)
    usage = meter.usage(prompt_tokens=1, new_tokens=1, seen=1, cache_bytes=700)
    assert (usage.cache_bytes, usage.peak_cache_bytes) == (700, 700)


def test_a_cached_prefix_counts_as_if_prefilled():
    cached, read = Meter(rows=2), Meter(rows=2)
    cached.read_before(8)
    read.add([2, 4, 8])
    assert (cached.live, cached.peak, cached.held) == (read.live, read.peak, read.held)
    for meter in (cached, read):
        meter.add([10], held=20)
        meter.add([12], [11])
    cached.cached = 3
    usage = dict(prompt_tokens=4, new_tokens=2, seen=5, cache_bytes=100)
    assert cached.usage(**usage) == dataclasses.replace(read.usage(**usage), cached_tokens=3)
