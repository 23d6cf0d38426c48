"""Memory estimates: by hand for a large model, and against the real bytes of a small one."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dms_jax
from dms_jax import analysis
from dms_jax.command_line.shapes import SHAPES
from dms_jax.devices import out_of_memory
from dms_jax.errors import CapacityError, ConfigError, OutOfMemoryError
from dms_jax.evaluation.likelihood import likelihoods
from dms_jax.generation import Device, Engine, memory, precompile, programs
from dms_jax.generation.memory import pool_pages
from dms_jax.model import language_model
from tests.generation.support import GREEDY, POLICIES, model_for, prompts
from tests.support.instances import nightly_but

LLAMA_8B = SHAPES["llama-3.1-8b"]
# Embedding and output matrix; per layer q and o, k and v, three of the feed-forward, two norms.
PARAMETERS = (
    2 * 128_256 * 4096
    + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096)
    + 4096
)
TOKEN = 2 * 2 * 8 * 128 * 32  # bytes of a token: key and value in bfloat16, 8 heads, 32 layers


def test_llama_8b_by_hand():
    assert PARAMETERS == 8_030_261_248
    plain = dms_jax.estimate(LLAMA_8B, tokens=8192, device="h100")
    assert plain.weight_bytes == 2 * PARAMETERS
    assert plain.live_tokens == 8192
    assert plain.sequence_bytes == 8192 * TOKEN == 2**30
    assert plain.batch == int((80e9 - 2 * PARAMETERS) // 2**30) == 59
    # Memory bound: reads all weights except the embedding once, and the cache of 59 sequences once.
    read = 2 * (PARAMETERS - 128_256 * 4096) + 59 * 2**30
    assert plain.step_seconds == pytest.approx(read / 3.35e12)


def test_llama_8b_under_dms_by_hand():
    dms = dms_jax.estimate(
        LLAMA_8B, dms_jax.DMS(window=256), tokens=8192, compression_ratio=8, device="h100", batch=64
    )
    live = 257 + (8192 - 257) / 8
    assert dms.live_tokens == live == 1248.875
    state = 32 * 8 * 257 * 4  # the ring: a slot number with its mark
    assert dms.sequence_bytes == 20 * 64 * TOKEN + state  # 19.5 pages of 64
    assert dms.batch == 64
    read = 2 * (PARAMETERS - 128_256 * 4096) + 64 * live * TOKEN
    assert dms.step_seconds == pytest.approx(read / 3.35e12)
    # With enough sequences computing takes longer than reading.
    slow = Device(memory=1e13, bandwidth=1e13, peak=1e12)
    busy = dms_jax.estimate(LLAMA_8B, tokens=1024, device=slow, batch=512)
    operations = 2 * (PARAMETERS - 128_256 * 4096) + 4 * 32 * 32 * 128 * 1024
    assert busy.step_seconds == pytest.approx(512 * operations / 1e12)


def test_estimates_of_other_policies():
    def live(policy, **options):
        return dms_jax.estimate(LLAMA_8B, policy, tokens=8192, **options).live_tokens

    assert live(dms_jax.StreamingLLM(budget=1024)) == 1024
    assert live(dms_jax.TOVA(budget=1024)) == 1025
    assert live(dms_jax.H2O(compression_ratio=4)) == 2049
    cut = dms_jax.SnapKV(budget=1024, interval=512)
    for policy in (cut, dms_jax.AdaKV(cut), dms_jax.PyramidKV(cut)):
        assert live(policy) == 1024 + 512
    assert live(dms_jax.Quest(budget=1024)) == 8192
    assert live(dms_jax.RandomEviction(window=255, rate=0.75)) == 256 + 7936 / 4
    assert live(dms_jax.DMC(), compression_ratio=4) == 1 + 8191 / 4
    assert live(dms_jax.FixedPooling(every=3)) == 2731
    assert live(dms_jax.Quest(over=dms_jax.FixedPooling(every=3))) == 2731
    random = dms_jax.RandomEviction(window=255, rate=0.75)
    assert live(dms_jax.KCache(over=random)) == live(random)
    assert live(dms_jax.DMS(window=9000), compression_ratio=8) == 8192
    # Quest: two dense layers; in thirty each of four query heads reads 1024, and a bound a page.
    quest = dms_jax.estimate(LLAMA_8B, dms_jax.Quest(budget=1024), tokens=8192, batch=16)
    entries = 2 * 8192 + 30 * (4 * 1024 + 8192 / 64)
    read = 2 * (PARAMETERS - 128_256 * 4096) + 16 * entries * TOKEN / 32
    assert quest.step_seconds == pytest.approx(read / 4.8e12)
    together = dms_jax.Quest(budget=1024, per="kv_head")
    less = dms_jax.estimate(LLAMA_8B, together, tokens=8192, batch=16).step_seconds
    saved = 16 * 30 * 3 * 1024 * TOKEN / 32
    assert less == pytest.approx((read - saved) / 4.8e12)


def test_eight_bits_and_values_on_the_host():
    eight = dms_jax.estimate(LLAMA_8B, tokens=8192, batch=16, kv_dtype="float8_e4m3")
    entry = 2 * (128 + 4)  # one byte per number, and a float32 scale
    assert eight.sequence_bytes == 8192 * 8 * 32 * entry
    read = 2 * (PARAMETERS - 128_256 * 4096) + 16 * eight.sequence_bytes
    assert eight.step_seconds == pytest.approx(read / 4.8e12)
    kcache = dms_jax.KCache(top=128, first_layers=2)
    away = dms_jax.estimate(LLAMA_8B, kcache, tokens=8192, batch=16)
    # Keys of all layers, values of two.
    assert away.sequence_bytes == 8192 * 8 * 128 * 2 * (32 + 2)
    # Of thirty layers every key, and the values fetched by four query heads: half an entry each.
    entries = 2 * 8192 + 30 * (8192 + 4 * 128) / 2
    read = 2 * (PARAMETERS - 128_256 * 4096) + 16 * entries * TOKEN / 32
    assert away.step_seconds == pytest.approx(read / 4.8e12)
    with pytest.raises(ConfigError, match="float8_e4m3"):
        dms_jax.estimate(LLAMA_8B, tokens=8192, kv_dtype="int8")


def test_tied_embeddings_are_read_in_full():
    tied = dataclasses.replace(LLAMA_8B, tie_embeddings=True)
    guess = dms_jax.estimate(tied, tokens=64, batch=1)
    assert guess.weight_bytes == 2 * (PARAMETERS - 128_256 * 4096)
    assert guess.step_seconds == pytest.approx((guess.weight_bytes + 64 * TOKEN) / 4.8e12)


@pytest.mark.parametrize("name", nightly_but({"vanilla"}, POLICIES))
def test_estimates_equal_bytes_of_a_real_cache(name):
    """With pages of one token the mean over heads needs no rounding."""
    model, policy, tokens = model_for(name), POLICIES[name], prompts([42])[0]
    (score,) = dms_jax.score(model, [tokens], chunk=41, page_size=1)
    # The measured compression ratio past the window on these tokens.
    ratio, window = 1.0, policy.visible_window + 1
    if policy.retrofit.needed:
        ratio = (41 - window) / (score.usage.live_tokens - window)
    guess = dms_jax.estimate(
        model.config,
        policy,
        tokens=41,
        compression_ratio=ratio,
        page_size=1,
        dtype=jnp.float32,
        device=Device(1e9, 1e9, 1e9),
    )
    assert guess.weight_bytes == sum(leaf.nbytes for leaf in _leaves(model))
    assert guess.live_tokens == pytest.approx(score.usage.live_tokens)
    rows = model.config.num_layers * model.config.num_kv_heads
    page = 2 * model.config.head_dim * 4 * (2 if name == "quest" else 1)  # bounds a page
    assert abs(guess.sequence_bytes - score.usage.cache_bytes) <= rows * page


def _leaves(model):
    return jax.tree.leaves(nnx.state(model.transformer))


def test_estimate_errors():
    with pytest.raises(CapacityError, match=r"16\.06 GB of weights do not fit 16 GB"):
        dms_jax.estimate(LLAMA_8B, tokens=64, device="t4")
    with pytest.raises(CapacityError, match=r"100 sequences of 1\.074 GB do not fit .*; 59 would"):
        dms_jax.estimate(LLAMA_8B, tokens=8192, device="h100", batch=100)
    with pytest.raises(ConfigError, match=r"Unknown device 'b300'; known are b200, h200, h100"):
        dms_jax.estimate(LLAMA_8B, tokens=64, device="b300")
    with pytest.raises(ConfigError, match="Vanilla compresses by its own options"):
        dms_jax.estimate(LLAMA_8B, tokens=64, compression_ratio=8)
    for options in ({"tokens": 0}, {"tokens": 64, "batch": 0}, {"tokens": 64, "page_size": -1}):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            dms_jax.estimate(LLAMA_8B, **options)
    for ratio in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="compression_ratio must be a finite number"):
            dms_jax.estimate(LLAMA_8B, dms_jax.DMS(), tokens=64, compression_ratio=ratio)


def test_out_of_memory_is_distinguished_from_other_errors():
    assert out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 bytes"))
    assert not out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: 5 bytes"))
    assert not out_of_memory(MemoryError())


class Strange(Exception):
    """An error that the library does not know."""


SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
GIVEN = np.asarray(prompts([8, 8]))
RUNNING = {  # all functions that run sequences through the cache
    "generate": lambda model: dms_jax.generate(model, prompts([5])),
    "warm": lambda model: Engine(model, num_lanes=1, max_tokens=64).warm(),
    "score": lambda model: dms_jax.score(model, prompts([5])),
    "logits": lambda model: model.logits(GIVEN),
    "likelihoods": lambda model: likelihoods(model, [([1, 2], [3, 4])]),
    "retention": lambda model: analysis.retention(model, GIVEN),
}


@pytest.mark.parametrize("call", RUNNING)
def test_out_of_memory_while_running(call, monkeypatch):
    """For every program that the device refuses to run or to compile."""
    model = model_for("vanilla")

    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(precompile, "_compile", refuse if call == "warm" else lambda *_: 0)
    monkeypatch.setattr(language_model, "_logits", refuse)
    for program in ("extend", "decode"):
        monkeypatch.setattr(programs, program, refuse)
    with pytest.raises(OutOfMemoryError, match=r"out of memory .*(memory=|fewer at a)") as caught:
        RUNNING[call](model)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), Strange()])
def test_failure_frees_memory(error, monkeypatch):
    """Also while a notebook keeps the error, and before garbage collection."""
    model, others = model_for("vanilla"), jax.live_arrays()  # of engines shared with other tests
    others = {id(each): each for each in others}
    engine = Engine(model, num_lanes=3, max_tokens=64, page_size=16)
    expected = engine.generate(prompts([5, 7]), sampling=SHORT)
    pool, kept = engine.runner.cache.k_pages.shape, weakref.ref(engine)

    def pools():
        live = [each for each in jax.live_arrays() if id(each) not in others]
        return [each for each in live if each.shape == pool]

    def fail(*arguments, **options):
        raise error

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(programs, "decode", fail)
            with pytest.raises((OutOfMemoryError, Strange)) as caught:
                engine.generate(prompts([5, 7]), sampling=SHORT)
        assert pools() == []
        assert engine.runner.reservation.allocator.pages_in_use == 0
        assert engine.generate(prompts([5, 7]), sampling=SHORT) == expected
        assert len(pools()) == 2  # of keys, and of values
        del engine, caught
        error.with_traceback(None)
        assert kept() is None
        assert pools() == []
    finally:
        gc.enable()


def test_lanes_are_counted_beside_their_pages(monkeypatch):
    """Free memory holds the lanes first, then pages; nothing is allocated that does not fit."""
    model, free = model_for("vanilla"), 20_000_000
    monkeypatch.setattr(memory, "_device_memory", lambda model: (free, 10 * free))
    beside = memory.lane_bytes(model.config, 64, 16)
    logits, rows = 3 * 4 * model.config.vocab_size, 20
    assert beside == logits + rows * (8 + 4 + 4 * 4)
    sized = functools.partial(pool_pages, model, POLICIES["vanilla"], max_tokens=64, page_size=16)
    page = 2 * 16 * model.config.head_dim * 4
    most = free // beside
    assert sized(num_lanes=2, memory=None) == 2 * rows * 4
    lanes = most // 2
    fit = (free - lanes * beside) // page
    assert fit * 63 // 64 < sized(num_lanes=lanes, memory=None) <= fit
    for given in (None, 5_000_000):
        with pytest.raises(CapacityError, match=f"{most + 1:,} sequences at a time .* fewer lanes"):
            sized(num_lanes=most + 1, memory=given)


@pytest.mark.parametrize(
    ("stats", "most"),
    [
        # One free block; weights after a freed cache; an allocator that may grow.
        ({"largest_free_block_bytes": 80_000, "pool_bytes": 100_000}, 72_000),
        ({"largest_free_block_bytes": 50_000, "pool_bytes": 100_000}, 50_000),
        ({"largest_free_block_bytes": 10_000, "pool_bytes": 40_000}, 60_000),
        ({}, 72_000),
        ({"largest_free_block_bytes": 0, "pool_bytes": 0}, 72_000),
    ],
)
def test_cache_fits_largest_free_block(stats, most):
    """A pool of two arrays, keys and values, did not fit around an allocation in the middle."""

    free = memory.free_memory({"bytes_limit": 100_000, "bytes_in_use": 20_000, **stats})
    assert free == (most, 80_000)


@pytest.mark.usefixtures("fakes")
def test_too_large_cache_is_refused_on_creation(monkeypatch):
    """A device allocates asynchronously."""
    engine = Engine(model_for("vanilla"), num_lanes=1, max_tokens=64, page_size=16)

    class Never:
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(programs, "make_cache", lambda *arguments: Never)
    with pytest.raises(OutOfMemoryError, match=r"no room for a cache of 80 pages .*`memory`"):
        engine.runner.restart()
    assert engine.runner.cache is None
    monkeypatch.undo()
    assert engine.generate(prompts([5]), sampling=SHORT)


def test_pool_leaves_room_for_two_policy_states(monkeypatch):
    """The default cache leaves room for them: SmolLM2's ExpectedAttention has 4.4 MB each."""
    model, free, lanes = model_for("vanilla"), 20_000_000, 100
    policy = dms_jax.ExpectedAttention(budget=30, interval=8)
    monkeypatch.setattr(memory, "_device_memory", lambda model: (free, 10 * free))
    state = lanes * memory.state_bytes(model.config, policy, model.dtype)
    beside = lanes * memory.lane_bytes(model.config, 512, 16)
    assert 2 * state < free - beside
    sized = functools.partial(
        pool_pages, model, policy, num_lanes=lanes, max_tokens=512, page_size=16
    )
    page = 2 * 16 * model.config.head_dim * 4
    fit = (free - beside - 2 * state) // page
    assert fit * 63 // 64 < sized(memory=None) <= fit
    assert sized(memory=free) == (free - state) // page
