"""Divergences of an adapter, against NumPy in float64."""

import types
from typing import Any

import numpy as np
import pytest

from dms_jax import Vanilla
from experiments.reproduction import lost

VOCABULARY, DIGIT = 7, 3


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture
def answers():
    """Two sequences: prompts of 2 and 3 tokens, answers of 5 and 3, padding."""
    made: Any = object.__new__(lost.Answers)
    random = np.random.default_rng(0)
    made.tokens = random.integers(0, VOCABULARY, (2, 8)).astype(np.int32)
    made.tokens[0, 4] = DIGIT
    made.of_prompt, made.of_answer = np.zeros((2, 2, 8), bool)
    for row, (prompt, whole) in enumerate(((2, 7), (3, 6))):
        made.of_prompt[row, : prompt - 1] = True
        made.of_answer[row, prompt - 1 : whole - 1] = True
    made.logits = [random.normal(size=(2, 8, VOCABULARY)).astype(np.float32)]
    made.text = lambda tokens: "".join("1" if each == DIGIT else "x" for each in tokens)
    return made


def test_means_equal_numpy(answers):
    own = 3 * np.random.default_rng(1).normal(size=(2, 8, VOCABULARY)).astype(np.float32)
    model: Any = types.SimpleNamespace(logits=lambda tokens, policy: own)
    found = lost.report(answers, model, Vanilla(), worst=3)
    mine, theirs = log_softmax(own.astype(float)), log_softmax(answers.logits[0].astype(float))
    divergence = (np.exp(mine) * (mine - theirs)).sum(-1)
    following = np.roll(answers.tokens, -1, axis=1)
    answer = answers.of_answer
    assert found["prompt"] == pytest.approx(divergence[answers.of_prompt].mean(), rel=1e-5)
    assert found["answer"] == pytest.approx(divergence[answer].mean(), rel=1e-5)
    numbers = divergence[answer & (following == DIGIT)]
    assert found["numbers"] == pytest.approx(numbers.mean(), rel=1e-5)
    assert found["by_position"] == pytest.approx([divergence[answer].mean()], rel=1e-5)
    differs = (mine.argmax(-1) != theirs.argmax(-1))[answer].mean()
    assert found["likeliest_differs"] == pytest.approx(differs)
    highest = np.sort(divergence[answer])[::-1]
    assert found["share_of_worst_percent"] == pytest.approx(highest[0] / highest.sum(), rel=1e-5)
    assert [each["divergence"] for each in found["worst"]] == pytest.approx(highest[:3], abs=6e-3)
    row, place = np.unravel_index(np.where(answer, divergence, -1).argmax(), answer.shape)
    chance = np.exp(mine[row, place, following[row, place]])
    assert found["worst"][0]["adapter"] == pytest.approx(chance, abs=6e-3)


def test_equal_models_lose_nothing(answers):
    model: Any = types.SimpleNamespace(logits=lambda tokens, policy: answers.logits[0])
    found = lost.report(answers, model, None, worst=1)
    assert (found["answer"], found["likeliest_differs"]) == pytest.approx((0, 0), abs=1e-6)
    assert found["share_of_worst_percent"] <= 1
