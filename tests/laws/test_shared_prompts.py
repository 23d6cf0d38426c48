"""Law 8: chains from one prefill equal prompts that are read one by one, to the bit.

The same engine serves the same requests twice: as users have it, and with every prompt read for
itself. One prompt runs per program in both, so the programs are the same and so must every token,
log-probability and figure be, except for how many tokens were prefilled and for the bytes held.
"""

import dataclasses

import chex
import pytest

from dms_jax.generation import Completion, Engine, Sampling, sharing
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import H2O, ExpectedAttention, KVpop
from tests.laws.rows import MODEL_ROWS, Row, model_for
from tests.laws.serving import ALMOST_GREEDY, PREFILL_CHUNK, engine_of
from tests.laws.test_sharding import ROWS as MESH_ROWS
from tests.laws.test_sharding import on_mesh
from tests.support.instances import further, nightly_but
from tests.support.models import random_tokens

# States that no row of a mechanism has: a number of each slot, and statistics of queries.
OTHER_STATES = [
    Row(H2O(budget=8), 2, 5),
    Row(KVpop(budget=8, window=3, hidden=6), 2, 5),
    Row(ExpectedAttention(budget=9, interval=4, future=16), 2, 4),
]
by_name = dict(ids=lambda row: row.name)
LONG, SHORT = (random_tokens(seed, length).tolist() for seed, length in ((70, 19), (71, 5)))
SAMPLED = Sampling(temperature=1.0, max_new_tokens=6, seed=3, logprobs=True)
GREEDY = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=6)
# Three chains of a prompt of three chunks, one of another prompt, and more chains than lanes.
PROMPTS = [LONG, LONG, SHORT, LONG, SHORT, SHORT, LONG]


def one_by_one(engine: Engine, prompts, sampling: Sampling) -> list[Completion]:
    """Returns the completions without sharing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "prompt_of", lambda *arguments: None)
        return engine.generate(prompts, sampling=sampling)


def without_costs(completion: Completion) -> Completion:
    """Leaves out what sharing is there to change."""
    usage = dataclasses.replace(completion.usage, prefilled_tokens=0, peak_cache_bytes=0)
    return dataclasses.replace(completion, usage=usage)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert without_costs(one) == without_costs(other)
        assert one.usage.peak_cache_bytes <= other.usage.peak_cache_bytes


def prefilled(completions: list[Completion]) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


@pytest.mark.parametrize("row", [*MODEL_ROWS, *further(*OTHER_STATES)], **by_name)
def test_chains_of_one_prompt_equal_prompts_read_one_by_one(row):
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = engine_of(model, row, prefill_tokens=PREFILL_CHUNK)
    # Programs that take the most likely token differ in what follows the logits, which no policy
    # has a part in: one row runs them.
    greedy = dataclasses.replace(GREEDY, temperature=0) if row is MODEL_ROWS[0] else GREEDY
    for sampling in (SAMPLED, greedy):
        expected = one_by_one(engine, PROMPTS, sampling)
        assert prefilled(expected) == [len(prompt) for prompt in PROMPTS]
        found = engine.generate(PROMPTS, sampling=sampling)
        assert_same(found, expected)
        # Four lanes take the first four; the other three follow together.
        assert prefilled(found) == [19, 0, 5, 0, 5, 0, 19]
        assert engine.runner.allocator.pages_in_use == 0
    assert len({tuple(completion.tokens) for completion in expected}) == 2


@pytest.mark.parametrize("row", nightly_but(MESH_ROWS[1:2], MESH_ROWS), **by_name)
def test_on_a_mesh_every_device_reads_a_prompt_once(row):
    """On a (2, 4) mesh two lanes of four have their pages on the same devices.

    All lanes take part in every program there, so several prompts run in one.
    """
    model = on_mesh(row, 4)
    engine = engine_of(model, row)
    expected = one_by_one(engine, PROMPTS, SAMPLED)
    found = engine.generate(PROMPTS, sampling=SAMPLED)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        chex.assert_trees_all_close(one.logprobs, other.logprobs, rtol=0, atol=1e-10)
        assert one.usage.kv_reads == other.usage.kv_reads
        assert one.usage.live_tokens == other.usage.live_tokens
    assert sum(prefilled(found)) < sum(map(len, PROMPTS))
    assert prefilled(engine.generate([LONG] * 4, sampling=SAMPLED)) == [19, 19, 0, 0]
    assert engine.runner.allocator.pages_in_use == 0
