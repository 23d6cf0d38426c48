"""Answers do not depend on the batch in float32 and float64; in bfloat16 they depend only on the
order in which products are summed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, Sampling
from dms_jax.model.language_model import LanguageModel
from tests.support.models import random_model, random_tokens, tiny_config

LENGTHS = (11, 3, 20, 7, 20)
PROMPTS = [random_tokens(index, length).tolist() for index, length in enumerate(LENGTHS)]
# One compiled shape for all prompt lengths.
ALONE = dict(page_size=8, table_width=6, chunk=8, prefill_chunk=8)
# Lanes, page sizes, prompt chunks and decode chunks.
ARRANGEMENTS = (
    dict(num_lanes=5, page_size=4, chunk=5, prefill_chunk=32),
    dict(num_lanes=2, page_size=16, chunk=16, prefill_chunk=8),
)


def answers(model: LanguageModel, sampling: Sampling, **options) -> list:
    return Engine(model, max_tokens=48, **options).generate(PROMPTS, sampling=sampling)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "dtype", "arrangements"),
    [
        (dms_jax.Vanilla(), "float32", ARRANGEMENTS[:1]),
        (dms_jax.DMS(window=3, source="adapter"), "float64", ARRANGEMENTS),
    ],
    ids=["Vanilla", "DMS"],
)
def test_answers_do_not_depend_on_batch(policy, dtype, arrangements):
    with jax.enable_x64(dtype == "float64"):
        transformer = random_model(tiny_config(), adapter=True, dtype=jnp.dtype(dtype))
        model = LanguageModel(transformer, policy=policy)
        # One policy runs without sampling; the others always run the sampling programs.
        for temperature in (0.0 if policy == dms_jax.Vanilla() else 1e-30, 0.9):
            options = dict(temperature=temperature, max_new_tokens=20, logprobs=True)
            alone = []
            engine = Engine(model, num_lanes=1, max_tokens=48, **ALONE)
            for index, prompt in enumerate(PROMPTS):
                sampling = Sampling(seed=index, **options)
                alone += engine.generate([prompt], sampling=sampling)
            for arrangement in arrangements:
                sampling = Sampling(seed=range(len(PROMPTS)), **options)
                together = answers(model, sampling, **arrangement)
                for left, right in zip(alone, together, strict=True):
                    assert left.tokens == right.tokens
                    tolerance = 1e-4 if dtype == "float32" else 1e-10
                    chex.assert_trees_all_close(
                        np.array(left.logprobs), np.array(right.logprobs), rtol=1e-7, atol=tolerance
                    )
