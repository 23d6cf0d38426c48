"""Chunks use the page tables of their launch, also while others are in flight.

On a GPU a page number outside the pool, or a row longer than its table, reads or writes foreign
memory; XLA on a CPU silently clamps. So the tables are checked at every launch and collection.
"""

import numpy as np
import pytest

from dms_jax.generation import Engine, Sampling
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import LanesFilter
from tests.generation.support import answer, host_engine, squeezed, story_tokens
from tests.support.fake_programs import ENDS
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
PAGE, CHUNK = 4, 8


class Watch:
    """Checks the page tables of chunks at launch and at collection."""

    def __init__(self, monkeypatch, pages: int):
        self.pages = pages  # of the pool
        self.ahead = self.chunks = 0
        self._inflight: list[np.ndarray] = []
        launch, read, table_of_steps = Runner.decode, Runner.collect, Runner.table_of_steps
        given: list[np.ndarray] = []  # the page table of the program that is being launched

        def with_table(runner, stepping):
            on_device, own = table_of_steps(runner, stepping)
            given.append(np.array(on_device))
            return on_device, own

        def launched(runner, tokens, remaining, *args, **options):
            lengths = np.asarray(runner.cache.lengths, np.int64)  # after all launches
            result = launch(runner, tokens, remaining, *args, **options)
            table = given.pop()
            assert not given
            self._look(runner, lengths, result.most, table)
            self._inflight.append(table)
            self.ahead += len(self._inflight) > 1
            self.chunks += 1
            return result

        def was_read(runner, chunk):
            steps = read(runner, chunk)
            table = self._inflight.pop(0)
            ran = np.flatnonzero(steps.ran.any(0))
            covered = -(-np.asarray(steps.lengths)[:, ran] // PAGE)
            live = np.arange(table.shape[-1]) < covered[..., None]
            # No page that the chunk wrote to was reassigned meanwhile.
            width = min(table.shape[-1], runner.reservation.allocator.table.shape[-1])
            assert not live[..., width:].any()
            own = runner.reservation.allocator.table[:, ran, :, :width]
            assert (table[:, ran, :, :width] == own)[live[..., :width]].all()
            return steps

        monkeypatch.setattr(Runner, "table_of_steps", with_table)
        monkeypatch.setattr(Runner, "decode", launched)
        monkeypatch.setattr(Runner, "collect", was_read)

    def _look(self, runner, lengths, most, table):
        assert (most <= CHUNK).all()
        held = int(runner.reservation.allocator.reserved.max()) * PAGE
        assert table.shape[-1] == runner.reservation.table_width(held, steps=True)
        # The longest that rows can become in the chunk. An idle lane writes nothing and is not
        # read.
        slots = np.where((most > 0)[:, None], lengths + most[:, None], 0)
        slots = np.minimum(slots, np.maximum(runner.reservation._slot_limit or slots, lengths))
        assert (slots <= table.shape[-1] * PAGE).all()
        named = table[np.arange(table.shape[-1]) < -(-slots // PAGE)[..., None]]
        assert ((named >= 0) & (named < runner.reservation.allocator.pages_per_shard)).all()
        assert len(set(named.tolist())) == len(named)  # of one row each
        allocator = runner.reservation.allocator
        free = np.concatenate(allocator._free)
        assert not np.isin(named, free).any()
        of_prefixes = allocator._reclaimable(0)  # only pages of prefixes
        assert len(free) + allocator.pages_in_use + of_prefixes == self.pages


def engine_with_ends(name: str) -> Engine:
    """Returns an engine some of whose answers end at a token."""
    return host_engine(name, 12, ends=ENDS, page_size=PAGE, prefill_chunk=16, max_tokens=128)


@pytest.mark.parametrize("name", ["evicts", "cuts", *further("keeps", "bounded")])
def test_chunk_touches_only_its_own_pages(name, monkeypatch):
    """More requests than lanes, of very different lengths; then with too small a pool."""
    rng, text, engine = np.random.default_rng(0), story_tokens(), engine_with_ends(name)
    prompts = [text[at : at + int(rng.choice([1, 2, 8, 17]))] for at in range(0, 380, 20)]
    lengths = rng.choice([1, 7, 8, 9, 16, 17, 40, 100], len(prompts))
    whole = len(engine.runner.reservation.allocator._free[0])
    for pages in (whole, 600):
        with monkeypatch.context() as patch:
            watch = Watch(patch, pages)
            check_answers(engine, name, pages, prompts, lengths)
        assert watch.chunks > 2
        assert watch.ahead or pages < whole


def check_answers(engine, name, pages, prompts, lengths) -> None:
    """Serves answers of at most these lengths from a pool of a given size."""
    sampling = Sampling(temperature=1.0, seed=3, max_new_tokens=100)
    requests = make_requests(engine.model.config, prompts, sampling)
    for request, most in zip(requests, lengths, strict=True):
        request.max_new_tokens = int(most)
    with squeezed(engine, pages):
        engine.serve(Source(requests))
    for each in requests:
        given = dict(copy=each.copy, ends=ENDS, new_tokens=each.max_new_tokens)
        answer(each.prompt, sampling, name, **given).check(each)


def test_reused_idle_lane_keeps_its_steps_in_flight():
    """The chunk repeats the end token of the lane's old answer."""
    runner = host_engine("keeps", 2, ends=ENDS).runner
    rule = LanesFilter(2).of({})
    runner.recover()
    runner.reservation.reserve(np.array([8, 8]))

    def launch(remaining):
        tokens = np.array([ENDS[0], ENDS[0] + 1], np.int32)
        tokens[0] += remaining[0] > 0  # of the new request
        remaining = np.array(remaining, np.int32)
        return runner.decode(tokens, remaining, rule, num_steps=4, end_tokens=ENDS)

    idle, taken = launch([0, 4]), launch([4, 0])
    runner.collect(idle)
    assert runner.reservation.steps_in_flight.tolist() == [4, 0]
    runner.collect(taken)
    assert not runner.reservation.steps_in_flight.any()
    runner.clear([0, 1])
