"""The usage of selective reading, recounted exactly from the recorded decisions of a run.

In float32 a near tie (two pages with equal bounds, a logit at its threshold) may fall one way in
one program and the other way in another, and everything after it differs. A recount from another
computation would then differ by the entries of that decision. Here the decisions of the run itself,
evictions and selected pages, are recorded, and everything else is counted from them.
"""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

from dms_jax.generation import Engine, Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMS, KCache, Quest
from tests.oracles import dms
from tests.support.models import random_model, random_tokens, tiny_config

LAYERS, HEADS, GROUP = 2, 2, 2
PROMPTS = {length: random_tokens(length, length).tolist() for length in (3, 17, 30)}
NEW_TOKENS = 24

marks: dict[tuple[int, int], np.ndarray] = {}  # (layer, position) -> [K]
chosen: dict[tuple[int, int], np.ndarray] = {}  # (layer, position) -> [K, G, n] pages of the row


def _note_marks(layer, positions, found):
    for position, one in zip(positions[0].tolist(), found[0].T, strict=True):
        marks[int(layer), position] = one


def _note_pages(layer, positions, table, read):
    """Records the pages that were selected for each query head."""
    read = read.reshape(*table.shape[1:2], GROUP, -1)
    columns = (read[..., None] == table[0, :, None, None, :]).argmax(-1)
    chosen[int(layer), int(positions[0, 0])] = columns


@dataclasses.dataclass(frozen=True)
class RecordedDMS(DMS):
    """DMS that records its eviction decisions; a token overwrites what padding recorded."""

    def decide(self, tokens):
        decisions = super().decide(tokens)
        found = (tokens.layer, tokens.positions, decisions.marks)
        jax.debug.callback(_note_marks, *found)
        return decisions


@dataclasses.dataclass(frozen=True)
class RecordedQuest(Quest):
    """Quest that records the pages that it selects."""

    def read(self, state, q, chunk, placement):
        reading = super().read(state, q, chunk, placement)
        if reading.reads is not None:
            tokens = chunk.tokens
            found = (tokens.layer, tokens.positions, chunk.page_table, reading.page_table)
            jax.debug.callback(_note_pages, *found)
        return reading


@functools.cache
def model_with_adapter() -> LanguageModel:
    config = tiny_config(num_heads=HEADS * GROUP, num_kv_heads=HEADS, num_layers=LAYERS)
    return LanguageModel(random_model(config, adapter=True, dtype=np.float32))


def entries(policy: KCache | Quest, live: int, page_size: int, pages) -> int:
    """Returns the reads of a row of `live` tokens, in key-value entries."""
    if isinstance(policy, KCache):
        return live if live <= policy.top else -(-(live + GROUP * policy.top) // 2)
    in_use = -(-live // page_size)
    count = max(policy.budget // page_size, 1 if policy.force_last_page else 3)
    if pages is None or count >= in_use:
        return live
    selected = pages[:, :count].ravel().tolist()  # any pages fill the columns behind them
    tokens = sum(min(page_size, live - page * page_size) for page in selected)
    return tokens + in_use


def recount(policy: KCache | Quest, prompt: int, fed: int, page_size: int) -> dict[str, float]:
    """Usage from the recorded decisions."""
    over = policy.over
    assert isinstance(over, DMS)
    live: collections.Counter = collections.Counter()
    reads = 0
    for layer in range(LAYERS):
        decided = np.array([marks[layer, position] for position in range(fed)])
        for head in range(HEADS):
            steps = dms.slots_per_step(decided[:, head], over.window, over.shift)
            for position, slots in enumerate(steps):
                live[position] += len(slots)
                if position >= prompt:
                    pages = chosen.get((layer, position))
                    pages = None if pages is None else pages[head]
                    reads += entries(policy, len(slots), page_size, pages)
    rows = LAYERS * HEADS
    return {
        "kv_reads": reads / rows,
        "peak_tokens": max(live.values()) / rows,
        "live_tokens": live[fed - 1] / rows,
        "compression_ratio": fed * rows / live[fed - 1],
    }


SMALL = RecordedDMS(window=3, source="adapter")
SHIFTED = RecordedDMS(window=2, shift=3, source="adapter", per="layer", alpha_offset=0.0)
CASES = [
    (KCache(top=3, first_layers=0, over=SMALL), 4),
    (KCache(top=6, first_layers=0, renormalize=True, over=SHIFTED), 3),
    (RecordedQuest(budget=8, dense_layers=0, over=SMALL), 4),
    (RecordedQuest(budget=9, dense_layers=0, force_last_page=False, over=SHIFTED), 3),
    (RecordedQuest(budget=4, dense_layers=1, over=SHIFTED), 2),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "page_size"), CASES)
def test_the_same_decisions_are_the_same_usage(policy, page_size):
    model = model_with_adapter()
    engine = Engine(
        model, policy, num_lanes=1, max_tokens=60, page_size=page_size, chunk=6, prefill_chunk=8
    )
    sampling = Sampling(temperature=0, max_new_tokens=NEW_TOKENS)
    evicted = 0
    for length, prompt in PROMPTS.items():
        marks.clear()
        chosen.clear()
        (completion,) = engine.generate([prompt], sampling=sampling)
        jax.effects_barrier()
        usage = dataclasses.asdict(completion.usage)
        fed = length + NEW_TOKENS - 1
        expected = recount(policy, length, fed, page_size)
        assert {name: usage[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        evicted += fed - expected["live_tokens"]
    assert evicted > 10
