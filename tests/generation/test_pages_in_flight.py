"""Chunks run with the pages that they were launched with, also behind others that were not read.

On a GPU a kernel that is given a page outside the pool, or a row longer than its table, reads or
writes what is not its own; XLA on a CPU would clamp the number and say nothing. So the tables are
looked at: at the launch of every chunk, and again when it is read.
"""

import dataclasses
import functools

import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, Sampling
from dms_jax.generation.requests import make_requests
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import GenerationDefaults
from tests.generation.support import stories, story_tokens

PAGE, CHUNK, LANES = 4, 8, 12
# Every kind of row: it grows by each token, by some, to a budget, or is cut after the prompt.
ROWS = {
    "vanilla": dms_jax.Vanilla(),
    "dms": dms_jax.DMS(window=6, alpha_offset=0.0),
    "tova": dms_jax.TOVA(budget=12),
    "snapkv": dms_jax.SnapKV(budget=10, window=4),
}


class Watch:
    """Looks at what chunks are launched with, and at what became of it when they are read."""

    def __init__(self, monkeypatch, pages: int):
        self.pages = pages  # of the pool
        self.ahead = self.chunks = 0
        self._inflight: list[np.ndarray] = []
        launch, read = Runner.decode, Runner.read

        def launched(runner, tokens, remaining, *args, **options):
            lengths = np.asarray(runner.cache.lengths, np.int64)  # after all that was launched
            result = launch(runner, tokens, remaining, *args, **options)
            self._look(runner, lengths, result.most, result.table)
            self._inflight.append(result.table)
            self.ahead += len(self._inflight) > 1
            self.chunks += 1
            return result

        def was_read(runner, chunk):
            steps = read(runner, chunk)
            table = self._inflight.pop(0)
            ran = np.flatnonzero(steps.ran.any(0))
            covered = -(-np.asarray(steps.lengths)[:, ran] // PAGE)
            live = np.arange(table.shape[-1]) < covered[..., None]
            # No page that it wrote to was given to anybody meanwhile.
            width = min(table.shape[-1], runner.allocator.table.shape[-1])
            assert not live[..., width:].any()
            own = runner.allocator.table[:, ran, :, :width]
            assert (table[:, ran, :, :width] == own)[live[..., :width]].all()
            return steps

        monkeypatch.setattr(Runner, "decode", launched)
        monkeypatch.setattr(Runner, "read", was_read)

    def _look(self, runner, lengths, most, table):
        assert (most <= CHUNK).all()
        held = int(runner.allocator.reserved.max()) * PAGE
        assert table.shape[-1] == runner.table_width(held, steps=True)
        # The most that the chunk can come to. An idle lane writes nothing and is not read.
        slots = np.where((most > 0)[:, None], lengths + most[:, None], 0)
        slots = np.minimum(slots, np.maximum(runner._slot_limit or slots, lengths))
        assert (slots <= table.shape[-1] * PAGE).all()
        named = table[np.arange(table.shape[-1]) < -(-slots // PAGE)[..., None]]
        assert ((named >= 0) & (named < runner.allocator.pages_per_shard)).all()
        assert len(set(named.tolist())) == len(named)  # of one row each
        free = np.concatenate(runner.allocator._free)
        assert not np.isin(named, free).any()
        assert len(free) + runner.allocator.pages_in_use == self.pages


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_every_page_that_a_chunk_can_touch_is_its_rows_own(name, monkeypatch):
    """More requests than lanes, of very different lengths; then in a pool that is too small."""
    rng, text, engine = np.random.default_rng(0), story_tokens(), engine_with_ends(name)
    prompts = [text[at : at + int(rng.choice([1, 2, 8, 17]))] for at in range(0, 380, 20)]
    lengths = rng.choice([1, 7, 8, 9, 16, 17, 40, 100], len(prompts))
    sampling = Sampling(temperature=0, max_new_tokens=100)
    whole, answers = len(engine.runner.allocator._free[0]), []
    for pages in (whole, 500):
        watch = Watch(monkeypatch, pages)
        answers.append(answers_within(engine, pages, prompts, lengths, sampling))
        monkeypatch.undo()
        assert watch.chunks > 2
        assert watch.ahead or pages < whole
    assert answers[0] == answers[1]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_are_counted_in_a_lane_that_was_idle_behind_the_end_of_an_answer(seed, monkeypatch):
    """It is given the end token again in steps that still run when it is taken."""
    engine, text = engine_with_ends("vanilla"), story_tokens()
    sampling = Sampling(temperature=0, max_new_tokens=60)
    whole = len(engine.runner.allocator._free[0])
    rng = np.random.default_rng(seed)
    starts, sizes = rng.integers(0, 200, 24), rng.choice([1, 8, 17, 28], 24)
    prompts = [text[at : at + size] for at, size in zip(starts, sizes, strict=True)]
    lengths, answers = rng.choice([1, 9, 30, 60], 24), []
    for pages in (whole, whole // 4):
        Watch(monkeypatch, pages)
        answers.append(answers_within(engine, pages, prompts, lengths, sampling))
        monkeypatch.undo()
    assert answers[0] == answers[1]


@functools.cache
def engine_with_ends(name: str) -> Engine:
    """Returns an engine some of whose answers end at a token."""
    text = story_tokens()
    common = sorted(set(text), key=text.count)[-8]
    model = dataclasses.replace(
        stories(), generation=GenerationDefaults(eos_token_ids=(common,)), policy=ROWS[name]
    )
    return Engine(
        model, num_lanes=LANES, page_size=PAGE, chunk=CHUNK, prefill_chunk=16, max_tokens=128
    )


def answers_within(engine: Engine, pages: int, prompts, lengths, sampling) -> list[list[int]]:
    """Returns the tokens of answers of at most these lengths, from a pool of so many pages."""
    allocator = engine.runner.allocator
    whole = allocator._free[0]
    allocator._free[0] = whole[len(whole) - pages :]
    made = make_requests(engine.model.config, prompts, sampling)
    requests = [
        dataclasses.replace(request, max_new_tokens=int(most))
        for request, most in zip(made, lengths, strict=True)
    ]
    answers = [each.tokens for each in engine.serve(requests, sampling)]
    assert not engine.runner.unread.any()
    assert allocator.pages_in_use == 0
    allocator._free[0] = whole
    return answers
