"""Results of a program as one array: a transfer for each would take as long as a step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.generation import programs
from dms_jax.generation.programs import Packed
from dms_jax.generation.runner import Runner
from tests.generation.support import GREEDY, answer, host_engine, prompts

TREE = {
    "numbers": np.arange(-3, 3, dtype=np.int32).reshape(2, 3),
    "booleans": np.array([[True], [False]]),
    "shares": np.array([0.1, -np.inf, np.nan], np.float32),
    "nothing": np.zeros((0, 4), np.int32),
    "absent": None,
}


def test_what_is_packed_is_read_again():
    packed = jax.jit(Packed.of)(TREE)
    assert len(jax.tree.leaves(packed)) == 1
    read = packed.read()
    chex.assert_trees_all_equal(read, TREE)
    chex.assert_trees_all_equal_shapes_and_dtypes(read, TREE)


def test_double_precision_is_packed_whole():
    with jax.enable_x64(True):
        numbers = {"one": np.array([1 / 3, 2.0]), "two": np.array([True]), "three": np.array(2**40)}
        chex.assert_trees_all_equal(jax.jit(Packed.of)(numbers).read(), numbers)


@pytest.mark.usefixtures("fakes")
def test_a_chunk_of_steps_is_read_in_one_transfer(monkeypatch):
    given, read = prompts((5, 13)), Runner.collect

    def counted(runner, chunk):
        (words,) = jax.tree.leaves(chunk.steps)
        assert words.ndim == 1
        steps = read(runner, chunk)
        assert isinstance(steps, programs.Steps)
        chex.assert_trees_all_equal(steps.tokens[-1], jnp.asarray(chunk.newest))
        return steps

    monkeypatch.setattr(Runner, "collect", counted)
    for prompt, one in zip(given, host_engine().generate(given, sampling=GREEDY), strict=True):
        answer(prompt).check(one)
