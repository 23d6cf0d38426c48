"""Law 8: chains from one prefill equal separately prefilled prompts, bit for bit.

The same engine serves the same requests twice: with sharing, and with a separate prefill of every
prompt. Both run one prompt per program, so the programs are the same, and every token,
log-probability and figure must be equal, except the number of prefilled tokens and the bytes held.
Later chains prefill their prompt again, as without a prefix cache (see law 9). Chains of a long
prompt continue one prefix (see law 9, too), in other programs: there numbers are equal up to their
rounding.
"""

import dataclasses

import chex
import numpy as np
import pytest

from dms_jax.generation import Completion, Engine, Sampling, prefixes, scheduler
from dms_jax.generation.prefixes import Prefixes
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import H2O, ExpectedAttention, KVpop
from tests.laws.rows import MODEL_ROWS, Row, model_for
from tests.laws.serving import ALMOST_GREEDY, PREFILL_CHUNK, TOLERANCE, engine_of
from tests.support.instances import nightly_but
from tests.support.models import random_tokens

# A ring per row, a window of queries with cuts, and bounds per page.
STATES = [MODEL_ROWS[1], MODEL_ROWS[4], MODEL_ROWS[5]]
# Further states: a number per slot, and statistics of queries.
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
        patch.setattr(scheduler, "prompt_key", lambda *arguments: None)
        return engine.generate(prompts, sampling=sampling)


def without_costs(completion: Completion) -> Completion:
    """Leaves out the figures that sharing changes."""
    usage = dataclasses.replace(completion.usage, prefilled_tokens=0, peak_cache_bytes=0)
    return dataclasses.replace(completion, usage=usage)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert without_costs(one) == without_costs(other)
        assert one.usage.peak_cache_bytes <= other.usage.peak_cache_bytes


def prefilled(completions: list[Completion]) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


@pytest.mark.parametrize("row", nightly_but(STATES, [*MODEL_ROWS, *OTHER_STATES]), **by_name)
def test_chains_of_one_prompt_equal_separate_prefills(row, monkeypatch):
    monkeypatch.setattr(Prefixes, "serves", lambda self, request: False)
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = engine_of(model, row, prefill_tokens=PREFILL_CHUNK)
    # Programs that take the most likely token differ only after the logits, where no policy takes
    # part: one row runs them.
    greedy = dataclasses.replace(GREEDY, temperature=0) if row is STATES[0] else GREEDY
    for sampling in (SAMPLED, greedy):
        expected = one_by_one(engine, PROMPTS, sampling)
        assert prefilled(expected) == [len(prompt) for prompt in PROMPTS]
        found = engine.generate(PROMPTS, sampling=sampling)
        assert_same(found, expected)
        # Four lanes take the first four; the other three follow together.
        assert prefilled(found) == [19, 0, 5, 0, 5, 0, 19]
        assert engine.runner.reservation.allocator.pages_in_use == 0
    assert len({tuple(completion.tokens) for completion in expected}) == 2


@pytest.mark.parametrize("row", nightly_but(STATES[:1], [*MODEL_ROWS, *OTHER_STATES]), **by_name)
def test_chains_of_a_long_prompt_equal_separate_prefills(row, monkeypatch):
    monkeypatch.setattr(prefixes, "_SHARED_PAGES", 2)
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = engine_of(model, row, prefill_tokens=PREFILL_CHUNK)
    found = engine.generate(PROMPTS, sampling=SAMPLED)
    shares = row.policy.appends or row.policy.parallel == "always"
    assert (found[1].usage.cached_tokens > 0) == (shares and 2 * row.page_size <= len(LONG))
    monkeypatch.setattr(Prefixes, "serves", lambda self, request: False)
    for one, other in zip(found, one_by_one(engine, PROMPTS, SAMPLED), strict=True):
        assert one.tokens == other.tokens
        chex.assert_trees_all_close(
            np.array(one.logprobs), np.array(other.logprobs), atol=TOLERANCE, rtol=TOLERANCE
        )
        assert one.usage.kv_reads == other.usage.kv_reads
        assert one.usage.peak_tokens == other.usage.peak_tokens
        assert one.usage.live_tokens == other.usage.live_tokens
