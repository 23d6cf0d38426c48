"""Laws 3 and 4 for whole requests: answers, usage, and the memory that is reserved and released.

Before every compiled chunk a row holds exactly ceil((slots in use + tokens of the chunk) / P)
pages; afterwards only those that its slots need; at the end none. Tokens of launched steps count as
slots in use until the steps are collected.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from dms_jax.errors import CapacityError
from dms_jax.generation import Engine, Sampling, score
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import LanguageModel
from tests.laws.expected import LENGTHS, TOKENS, simulated, weights_of
from tests.laws.rows import MODEL_ROWS, OPTIONS, Row, model_for
from tests.laws.serving import (
    ALMOST_GREEDY,
    CHUNK,
    PREFILL_CHUNK,
    bytes_per_page,
    bytes_per_row,
    check_completion,
    check_score,
    engine_of,
)
from tests.support.instances import nightly_but
from tests.support.models import random_tokens

by_name = dict(ids=lambda row: row.name)
every_mechanism = pytest.mark.parametrize("row", MODEL_ROWS, **by_name)
# Few bits change only the bytes per page.
HELD = [
    Row(policy, 2, 4)
    for policies in OPTIONS.values()
    for policy in policies
    if not getattr(policy, "first_layers", 0)  # their pages would differ
]
HELD.append(dataclasses.replace(MODEL_ROWS[1], kv_dtype="float8_e4m3"))
GREEDY = Sampling(temperature=0, max_new_tokens=8, logprobs=True)
PROMPTS = [random_tokens(40 + index, length).tolist() for index, length in enumerate((11, 8, 6))]


def bound(policy, page_size: int) -> int | None:
    """Returns the most slots of a row at any sequence length, or None."""
    return policy.footprint(10**6, page_size=page_size).at_most


def grown(runner: Runner | Reservation, held: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the most slots in use after that many steps."""
    limit, slots = bound(runner.policy, runner.page_size), held + tokens[:, None]
    most = slots if limit is None else np.minimum(slots, np.maximum(limit, held))
    return in_windows(runner, slots, most)


def in_windows(runner: Runner | Reservation, slots: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns `slots` limited to the windows of layers that have one, and `others`."""
    reservation = runner.reservation if isinstance(runner, Runner) else runner
    if reservation._windows is None:
        return others
    windows = reservation._windows[:, None, None]
    return np.where(windows > 0, np.minimum(slots, windows), others)


class Watch:
    """Checks the reserved pages of every row around every compiled chunk, and counts events."""

    def __init__(self, monkeypatch):
        self.chunks = self.cleared = self.ahead = 0
        self.refusals: set[int] = set()  # chunks before which the pool reports being full once
        for name in ("extend", "decode"):
            monkeypatch.setattr(Runner, name, self._around(getattr(Runner, name), name))
        monkeypatch.setattr(Runner, "collect", self._read(Runner.collect))
        monkeypatch.setattr(Reservation, "fits", self._refusing(Reservation.fits))
        monkeypatch.setattr(Reservation, "trim", self._trimmed(Reservation.trim))
        monkeypatch.setattr(Runner, "clear", self._cleared(Runner.clear))

    def _around(self, call, name):
        def watched(runner, *arguments, **options):
            coming, whole = np.zeros(len(runner.seen), int), False
            if name == "extend":
                (batch,) = arguments
                for lane, tokens in batch.tokens.items():
                    coming[lane] = len(tokens)
                whole = runner.policy.shrinks and batch.prompt  # cut afterwards
            else:
                coming = np.minimum(arguments[1], options["num_steps"])
            held = grown(runner, runner.reservation.lengths, runner.reservation.steps_in_flight)
            slots = held + coming[:, None]
            slots = in_windows(runner, slots, slots) if whole else grown(runner, held, coming)
            needed = -(-slots // runner.page_size)
            chex.assert_trees_all_equal(runner.reservation.allocator.reserved, needed)
            self.chunks += 1
            self.ahead += bool(runner.reservation.steps_in_flight.any())
            result = call(runner, *arguments, **options)
            if name == "extend":
                assert (runner.reservation.lengths <= slots).all()
                self._check_lengths(runner)
            return result

        return watched

    def _read(self, call):
        def watched(runner, launched):
            most = grown(runner, runner.reservation.lengths, launched.most)
            result = call(runner, launched)
            assert (runner.reservation.lengths <= most).all()
            if not runner.reservation.steps_in_flight.any():
                self._check_lengths(runner)
            return result

        return watched

    def _check_lengths(self, runner):
        # If nothing is evicted, the host knows the lengths without the device.
        chex.assert_trees_all_equal(
            runner.reservation.lengths, np.asarray(runner.cache.lengths, np.int64)
        )
        chex.assert_trees_all_equal(runner.seen, np.asarray(runner.cache.seen, np.int64))

    def _refusing(self, call):
        def watched(reservation, extra, **options):
            taken = reservation.allocator.reserved.any((0, 2))
            several = taken.sum() > 1  # a single request could not be preempted
            if self.chunks in self.refusals and several:
                self.refusals.remove(self.chunks)
                return False
            return call(reservation, extra, **options)

        return watched

    def _trimmed(self, call):
        def watched(reservation):
            call(reservation)
            slots = grown(reservation, reservation.lengths, reservation.steps_in_flight)
            needed = -(-slots // reservation.page_size)
            chex.assert_trees_all_equal(reservation.allocator.reserved, needed)

        return watched

    def _cleared(self, call):
        def watched(runner, lanes):
            self.cleared += len(lanes)
            call(runner, lanes)
            assert not runner.reservation.allocator.reserved[:, lanes].any()
            assert not np.asarray(runner.cache.lengths)[:, lanes].any()

        return watched


def assert_empty(engine: Engine) -> None:
    allocator = engine.runner.reservation.allocator
    assert allocator.pages_in_use == 0
    assert allocator.free_pages == allocator.pages_per_shard
    cache = engine.runner.cache
    if cache is None:  # after an error: the next call makes one
        assert engine.runner.dirty
    else:
        assert not np.asarray(cache.lengths).any()
        assert not np.asarray(cache.seen).any()


@every_mechanism
def test_preemption_changes_no_answer(row, monkeypatch):
    """Checks answers, usage and memory when the pool is full between and within prompts."""
    watch = Watch(monkeypatch)
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = engine_of(model, row)
    sampling = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=8)
    # The same engine runs twice, the second time without overlap: the first call leaves nothing
    # behind.
    for refusals, listen in ((set(), None), ({1, 2}, lambda update: None)):
        watch.chunks, watch.cleared, watch.ahead, watch.refusals = 0, 0, 0, set(refusals)
        completions = engine.generate(PROMPTS, sampling=sampling, on_tokens=listen)
        assert (watch.ahead > 0) == (listen is None and engine.runner.host is None)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            check_completion(row, weights_of(row), model.config, prompt, completion, row.page_size)
        assert_empty(engine)
        assert (watch.cleared > len(PROMPTS)) == bool(refusals)


@pytest.mark.parametrize("row", HELD, **by_name)
def test_pool_size_equals_the_accounting(row):
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = Engine(
        model,
        num_lanes=3,
        memory=40_000,
        max_tokens=400 if row.kv_dtype is None else 3200,
        page_size=row.page_size,
        chunk=CHUNK,
        kv_dtype=row.kv_dtype,
    )
    cache = engine.runner.cache
    num_pages = engine.runner.reservation.allocator.pages_per_shard
    pool = jax.tree.leaves((cache.pool, cache.page_state))
    per_page = bytes_per_page(model.config, row)
    assert sum(leaf.nbytes for leaf in pool) == num_pages * per_page
    rows = model.config.num_layers * model.config.num_kv_heads
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.row_state))
    assert state == 3 * rows * bytes_per_row(model.config, row.policy)
    assert num_pages * per_page + state <= 40_000
    limit = bound(row.policy, row.page_size)
    by_length = getattr(row.policy, "compression_ratio", None) is not None
    if limit is None or by_length or row.policy.shrinks:  # it could need more, so nothing is unused
        assert num_pages * per_page + state > 40_000 - per_page
    else:
        assert num_pages >= 3 * rows * -(-limit // row.page_size)


@pytest.mark.parametrize(
    "row", nightly_but([MODEL_ROWS[1], MODEL_ROWS[3], MODEL_ROWS[4]], MODEL_ROWS), **by_name
)
def test_score_peak_bytes(row, monkeypatch):
    watch = Watch(monkeypatch)
    model = LanguageModel(model_for(row), policy=row.policy)
    results = score(model, TOKENS, chunk=8, page_size=row.page_size, kv_dtype=row.kv_dtype)
    assert watch.chunks == -(-(max(LENGTHS) - 1) // 8)
    for index, result in enumerate(results):
        check_score(row, weights_of(row), model.config, TOKENS[index], result, row.page_size)
        one = simulated(row, index, 0, row.page_size)
        assert result.usage.peak_cache_bytes == peak_bytes(row, model.config, one, 8)


def peak_bytes(row, config, one, chunk: int) -> int:
    """Returns the most bytes reserved by a chunk: the slots in use, and one per token."""
    fed = len(one.logits) - 1  # the last token is not fed
    limit = bound(row.policy, row.page_size) or fed
    peak = 0
    for start in range(0, fed, chunk):
        coming = min(chunk, fed - start)
        pages = 0
        for trace in one.traces:
            before = np.array([len(head) for head in row.held(trace, start, 0)])
            pages += int((-(-np.minimum(before + coming, limit) // row.page_size)).sum())
        peak = max(peak, pages)
    rows = config.num_layers * config.num_kv_heads
    return peak * bytes_per_page(config, row) + rows * bytes_per_row(config, row.policy)


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


def test_errors_leave_no_trace(monkeypatch):
    row = MODEL_ROWS[0]
    watch = Watch(monkeypatch)
    model = LanguageModel(model_for(row), policy=row.policy)
    rows = model.config.num_layers * model.config.num_kv_heads
    pages = sum(-(-(len(prompt) + 7) // row.page_size) for prompt in PROMPTS) * rows
    # Room for the first chunk of all three, but not for the second.
    engine = Engine(
        model,
        num_lanes=len(PROMPTS),
        memory=int(0.85 * pages) * bytes_per_page(model.config, row),
        max_tokens=24,
        page_size=row.page_size,
        chunk=CHUNK,
        prefill_chunk=PREFILL_CHUNK,
    )
    for updates_before in (0, 3, 6):
        seen = []

        def interrupt(update, seen=seen, updates_before=updates_before):
            seen.append(update)
            if len(seen) > updates_before:
                raise Interrupted

        with pytest.raises(Interrupted):
            engine.generate(PROMPTS, sampling=GREEDY, on_tokens=interrupt)
        assert_empty(engine)
    too_long = Sampling(temperature=0, max_new_tokens=300)
    with pytest.raises(CapacityError):
        engine.generate(PROMPTS, sampling=too_long)
    assert_empty(engine)
    watch.cleared = 0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, sampling=GREEDY), strict=True):
        check_completion(row, weights_of(row), model.config, prompt, completion, row.page_size)
    assert_empty(engine)
    assert watch.cleared > len(PROMPTS)  # one was preempted because the pool was full
