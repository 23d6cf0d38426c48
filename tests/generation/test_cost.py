"""The overhead of a call: compilations and host work."""

import collections
import dataclasses
import time

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.cache import PageAllocator
from dms_jax.generation import requests as given_requests
from dms_jax.generation.engine import Source
from dms_jax.generation.prefill import PrefillQueue
from dms_jax.generation.programs import request_keys
from dms_jax.generation.requests import make_requests
from dms_jax.generation.scheduler import Admission, Notifier, Scheduler
from dms_jax.generation.text import TextTracker
from tests.generation.support import (
    GREEDY,
    host_engine,
    model_for,
    prompts,
    requests_of,
    serve_arrivals,
)
from tests.support.compilations import Compilations

fakes = pytest.mark.usefixtures("fakes")


@fakes
def test_a_repeated_call_compiles_nothing():
    compilations = Compilations()
    model = model_for("vanilla", ends=False)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=40)

    def call(lengths, **options):
        return lambda: dms_jax.generate(
            model, prompts(lengths), sampling=sampling, chunk=16, page_size=32, **options
        )

    first = compilations.of(call([11, 14]))
    # The empty cache, clearing; a chunk of prompts, its hidden states, the first tokens, a chunk of
    # steps.
    assert 0 < first <= 6
    assert compilations.of(call([11, 14])) == 0
    # Shorter and longer prompts compile nothing either, up to the next power of two.
    assert compilations.of(call([9, 16])) == 0
    assert compilations.of(call([10, 13], on_tokens=lambda update: None)) == 0


@fakes
def test_another_temperature_compiles_nothing():
    compilations = Compilations()
    model = model_for("vanilla", ends=False)

    def call(**sampling):
        return lambda: dms_jax.generate(
            model,
            prompts([11, 14]),
            sampling=dms_jax.Sampling(max_new_tokens=20, **sampling),
            chunk=16,
            page_size=32,
        )

    assert compilations.of(call(temperature=0.6, top_p=0.9)) > 0
    assert compilations.of(call(temperature=1.1, top_p=0.8, seed=3)) == 0
    assert compilations.of(call(temperature=1, top_p=0.5)) > 0  # needs a search
    assert compilations.of(call(temperature=0.6, top_p=0.3, seed=3)) == 0
    assert compilations.of(call(temperature=1, top_p=0.8)) == 0
    assert compilations.of(call(temperature=1, top_p=0.8, min_p=0.1)) > 0


@fakes
def test_growing_sequences_compile_few_programs():
    """From 1 to 16 pages per row: one program for each power of two from four on."""
    compilations = Compilations()
    model = model_for("vanilla", ends=False)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=500)
    call = lambda: dms_jax.generate(  # noqa: E731
        model, prompts([5]), sampling=sampling, chunk=50, page_size=32
    )
    assert compilations.of(call) <= 5 + 3


@fakes
def test_steps_after_cut_have_narrow_page_tables(monkeypatch):
    """A step scores, and before a cut gathers, as many slots as its table has."""
    compilations = Compilations()
    policy = dms_jax.SnapKV(budget=8, window=4, interval=4, kernel=3)
    engine = dms_jax.Engine(
        model_for("vanilla", ends=False),
        policy,
        num_lanes=2,
        max_tokens=160,
        page_size=4,
        chunk=4,
        prefill_chunk=64,
    )
    widths, table_of_steps = [], engine.runner._table_of_steps

    def watched(stepping):
        table, own = table_of_steps(stepping)
        widths.append(table.shape[-1])
        return table, own

    monkeypatch.setattr(engine.runner, "_table_of_steps", watched)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=12)
    engine.generate(prompts([140]), sampling=sampling)
    assert engine.runner.reservation.table_width(1) >= 140 // 4  # of prompts
    assert set(widths) == {16}  # the narrowest table
    assert compilations.of(lambda: engine.generate(prompts([139]), sampling=sampling)) == 0


@fakes
def test_mixed_traffic_compiles_few_programs():
    """Prompts and answers of all lengths, together and alone, with refilled lanes."""
    compilations = Compilations()
    sampling = dms_jax.Sampling(top_p=0.9, max_new_tokens=12)
    engine = dms_jax.Engine(
        model_for("vanilla", ends=False),
        num_lanes=16,
        max_tokens=160,
        page_size=4,
        chunk=4,
        prefill_chunk=64,
        prefill_tokens=256,
    )
    random = np.random.default_rng(0)

    def traffic(count: int, longest: int) -> None:
        tokens = [
            random.integers(0, 512, size).tolist() for size in random.integers(1, longest, count)
        ]
        requests = make_requests(engine.model.config, tokens, sampling)
        for request, new in zip(requests, random.integers(1, 12, count), strict=True):
            request.max_new_tokens = int(new)
        engine.serve(Source(requests, sampling))

    # Prefill has two widths, each for many and for few entries, with two widths of the page table;
    # steps have one chunk for each of these; then first tokens, clearing, and hidden states.
    assert compilations.of(lambda: [traffic(*each) for each in ((40, 140), (1, 9), (3, 60))]) <= 17
    assert compilations.of(lambda: [traffic(*each) for each in ((23, 120), (2, 30), (9, 5))]) <= 1


@fakes
def test_sampling_filter_is_built_once(monkeypatch):
    """With 256 lanes it took half a millisecond per program, during which the device waited."""
    made, own = collections.Counter(), dms_jax.Sampling.filter.func

    def counted(self):
        made[self.seed] += 1
        return own(self)

    monkeypatch.setattr(dms_jax.Sampling, "filter", property(counted))
    samplings = [dataclasses.replace(GREEDY, seed=100 + each) for each in range(3)]
    requests = requests_of(prompts((5, 30, 1)), samplings)
    serve_arrivals(host_engine(), [requests[:1], [], requests[1:]])
    assert [made[each.seed] for each in samplings] == [1, 1, 1]


def test_chains_are_encoded_once(monkeypatch):
    """Sixteen chains wait only for lanes."""
    encoded = []
    monkeypatch.setattr(
        given_requests, "check_tokens", lambda tokens, config: encoded.append(len(tokens))
    )
    model = model_for("vanilla", ends=False)
    one, two = prompts([11, 14])
    tokens = given_requests.encode_prompts(model, [one, one, two, one, list(one)])
    assert encoded == [11, 14, 11]
    assert tokens == [one, one, two, one, one]
    requests = make_requests(model.config, tokens, dms_jax.Sampling())
    assert [request.copy for request in requests] == [0, 1, 0, 2, 3]


def test_chunk_does_not_scan_queue():
    """Thousands may wait, and the device is idle while a chunk is finished."""
    looked: list[object] = []

    class Queue(collections.deque):
        def __iter__(self):
            for each in super().__iter__():
                looked.append(each)
                yield each

        def popleft(self):
            looked.append(super().popleft())
            return looked[-1]

    runner, tracker = host_engine().runner, TextTracker(None, ())
    requests = make_requests(model_for("vanilla").config, [[1, 2]] * 1000, dms_jax.Sampling())
    queue = PrefillQueue(runner.prompt_shapes(8, 64), takes_turns=False)
    scheduler = Scheduler(Admission(runner, 8, 8, ()), queue, Notifier(tracker), [], keep=False)
    scheduler.waiting, scheduler.cancelled = Queue(requests), {7}
    scheduler.finish()  # the cancellation itself scans
    assert requests[7].finish_reason == "cancelled"
    assert list(scheduler.waiting) == requests[:7] + requests[8:]
    looked.clear()
    scheduler.finish()
    assert len(looked) < 20  # type checks of the tests look at some


def test_array_rows_are_distinct_prompts():
    """Each access makes a new object, perhaps at the same address."""
    rows = np.arange(1, 41).reshape(10, 4)
    found = given_requests.encode_prompts(model_for("vanilla", ends=False), rows)
    assert found == rows.tolist()


def test_keys_depend_on_seed_and_copy_alone():
    seeds = np.array([[2**32 - 1, 0], [2**32 - 1, 2], [0, 0], [7, 1], [7, 1]], np.uint32)
    keys = jax.random.key_data(jax.jit(request_keys)(seeds))
    for key, (seed, copy) in zip(keys, seeds, strict=True):
        alone = jax.random.fold_in(jax.random.key(seed), copy)
        chex.assert_trees_all_equal(key, jax.random.key_data(alone))
    assert len({tuple(key) for key in keys.tolist()}) == 4


@pytest.fixture(scope="module")
def large() -> PageAllocator:
    """256 lanes, 32 layers, 8 heads, about 64 pages per row."""
    allocator = PageAllocator(
        num_layers=32,
        num_sequences=256,
        num_kv_heads=8,
        pages_per_shard=32 * 256 * 8 * 70,
        page_size=64,
    )
    allocator.reserve(lengths())
    return allocator


def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(3000, 4096, (32, 256, 8))


def best_of(call, count: int = 5) -> float:
    seconds = []
    for _ in range(count):
        before = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - before)
    return min(seconds)


def test_page_allocation_is_fast(large):
    """The bookkeeping of a chunk, with generous bounds because the machine may be busy."""
    slots = lengths()

    def chunk():
        large.fits(slots + 32)
        large.reserve(slots + 32)
        large.trim(slots)

    assert best_of(chunk) < 0.1
    assert best_of(lambda: large.trim(slots)) < 0.02


def test_token_ids_are_checked_fast():
    """For 16 chains of 2,048 tokens, a fraction of the prefill of one."""
    prompt = list(range(2048))

    def seconds() -> float:
        start = time.process_time()
        for _ in range(16):
            assert given_requests._ids(prompt, "Prompt 0") == prompt
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.01
