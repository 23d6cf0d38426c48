"""Law 10: requests that decode or prefill during each other's prefill answer as alone.

A request decodes when two longer ones arrive, whose prompts are prefilled in parts between its
steps. All three have the same tokens and usage as alone, and equal log-probabilities up to
rounding, because programs of other shapes may prefill them.
"""

import dataclasses

import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Completion
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import completion_of, make_request
from dms_jax.model.language_model import LanguageModel
from tests.laws.rows import MODEL_ROWS, POLICY_ROWS, Row, model_for
from tests.laws.serving import ALMOST_GREEDY, PREFILL_CHUNK, TOLERANCE, engine_of
from tests.support.instances import nightly_but
from tests.support.models import random_tokens

# A window of queries, and cuts of answers, too; a victim for each token after a dense prompt.
QUICK = [MODEL_ROWS[4], Row(dms_jax.TOVA(budget=8), 2, 4)]
EVERY_POLICY = [Row(policy, 2, 4) for _, policy in POLICY_ROWS]
ROWS = QUICK + [row for row in MODEL_ROWS + EVERY_POLICY if row not in QUICK]
PROMPTS = [random_tokens(90 + length, length).tolist() for length in (3, 21, 19)]
ANSWERS = (24, 5, 7)


def figures(completion: Completion) -> dict:
    """Returns the figures that must be equal: all but the pages reserved meanwhile."""
    usage = dataclasses.asdict(completion.usage)
    del usage["peak_cache_bytes"]
    return usage


@pytest.mark.parametrize("row", nightly_but(QUICK, ROWS), ids=lambda row: row.name)
def test_answers_are_the_same_during_prefills(row):
    model = LanguageModel(model_for(row), policy=row.policy)
    engine = engine_of(model, row, prefill_tokens=PREFILL_CHUNK)
    samplings = [dataclasses.replace(ALMOST_GREEDY, max_new_tokens=most) for most in ANSWERS]
    alone = [
        engine.generate([prompt], sampling=sampling)[0]
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    requests = [
        make_request(model.config, prompt, sampling, index=index)
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    looks, between = iter([requests[:1], [], requests[1:]]), []

    def incoming(wait):
        if any(each.generated for each in requests[1:]):
            return None
        between.append(len(requests[0].generated))
        return next(looks, [])

    engine.serve(Source(incoming=incoming))
    # Parts of prompts were prefilled between steps of the first answer, with one step after each.
    assert between[-2] - between[2] >= 3
    for expected, request in zip(alone, requests, strict=True):
        found = completion_of(request)
        assert found.tokens == expected.tokens
        assert figures(found) == figures(expected)
        assert np.abs(np.subtract(found.logprobs, expected.logprobs)).max() < TOLERANCE
    assert engine.runner.reservation.allocator.pages_in_use == 0
