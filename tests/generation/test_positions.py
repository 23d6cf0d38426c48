"""Warnings about answers that exceed the model's positions."""

import warnings

import pytest

from dms_jax.generation import Sampling
from dms_jax.generation.requests import make_requests
from tests.support.models import tiny_config

CONFIG = tiny_config()
POSITIONS = CONFIG.max_position_embeddings


def test_warns_if_answers_exceed_positions():
    prompts = [[1] * 2, [1] * 12, [1] * 3]
    sampling = Sampling(max_new_tokens=POSITIONS - 3)
    says = (
        rf"max_new_tokens={POSITIONS - 3:,} .* model's {POSITIONS:,} positions leave after a "
        rf"prompt of 12 tokens: 1 of 3 answers end earlier, prompt 1's after {POSITIONS - 12:,}"
    )
    with pytest.warns(UserWarning, match=says):
        requests = make_requests(CONFIG, prompts, sampling)
    assert [each.max_new_tokens for each in requests] == [
        POSITIONS - 3,
        POSITIONS - 12,
        POSITIONS - 3,
    ]


def test_no_warning_if_answers_fit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_requests(CONFIG, [[1] * 3], Sampling(max_new_tokens=POSITIONS - 3))
