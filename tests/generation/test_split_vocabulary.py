"""Drawing from logits split over devices by vocabulary: the same tokens, and no gathering."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import dms_jax
from dms_jax.generation.sampling import LanesFilter, Sampling, sample
from tests.support.instances import further, nightly_but
from tests.training.collectives import collectives

ROWS, TRIED = 6, 16 * 128  # trial tokens, one per block
RULES = {
    "greedy": Sampling(temperature=0).filter,
    "plain": Sampling().filter,
    "top-p": Sampling(temperature=0.8, top_p=0.95).filter,
    # Their program searches for the kept tokens, and uses trials.
    "lanes": LanesFilter(ROWS).of(
        {
            0: Sampling(top_k=9),
            1: Sampling(temperature=0),
            2: Sampling(),
            3: Sampling(top_k=20, top_p=0.7, min_p=0.05),
        }
    ),
}
# Qwen3's vocabulary has 1187 blocks of 128, which no number of devices divides; Llama 3's 1002.
SPLIT = [(151936, 2), (128256, 4)]


def drawn_from(vocabulary, dtype, mesh=None):
    """Returns the arguments of `sample` except the rule, with logits split over a mesh."""
    drawn = np.random.default_rng(5).normal(size=(ROWS, vocabulary))
    logits = jnp.asarray(3 * drawn, dtype)
    if mesh is not None:
        logits = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "model")))
    return logits, jax.random.split(jax.random.key(1), ROWS), jnp.arange(ROWS)


@pytest.mark.parametrize(
    ("vocabulary", "devices", "name"),
    [(1000, 8, "top-p"), *further((*SPLIT[1], "lanes"))],
)
def test_draws_do_not_depend_on_devices(vocabulary, devices, name):
    """In float64, so that rounding of sums moves no draw over the border of a token."""
    rule, mesh = RULES[name], dms_jax.make_mesh(model=devices)
    with jax.enable_x64(True):
        alone = jax.jit(sample)(*drawn_from(vocabulary, jnp.float64), rule)
        with jax.set_mesh(mesh):
            split = jax.jit(sample)(*drawn_from(vocabulary, jnp.float64, mesh), rule)
    chex.assert_trees_all_equal(split[0], alone[0])
    chex.assert_trees_all_close(split[1], alone[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", nightly_but({"plain"}, RULES))
@pytest.mark.parametrize(("vocabulary", "devices"), [SPLIT[0], *further(SPLIT[1])])
def test_logits_are_not_gathered(vocabulary, devices, name):
    """Only sums of blocks and the blocks of trial tokens are sent, per row."""
    mesh = dms_jax.make_mesh(model=devices)
    given = drawn_from(vocabulary, jnp.float32, mesh)
    with jax.set_mesh(mesh):
        text = jax.jit(sample).lower(*given, RULES[name]).compile().as_text()
    assert text is not None
    found = collectives(text)
    assert found
    for kind, arrays, _ in found:
        shapes = re.findall(r"\[([\d,]*)\]", arrays)
        sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
        assert max(sizes) <= ROWS * TRIED, (kind, arrays)
