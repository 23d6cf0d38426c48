"""Copies of cached states that are launched together."""

import chex
import jax
import numpy as np
import pytest

from dms_jax.generation import Engine, programs
from dms_jax.generation.copies import Copies, Load
from tests.generation.support import SHAPE, model_for

LANES = 12


@pytest.fixture(scope="module")
def cache():
    """A cache with random contents of all arrays that copies and loads change."""
    engine = Engine(model_for("dms"), max_tokens=64, **(SHAPE | {"num_lanes": LANES}))
    random = np.random.default_rng(0)

    def filled(x):
        return random.integers(0, 100, x.shape).astype(x.dtype)

    found = engine.runner.cache
    changed = ("pool", "page_state", "row_state", "lengths", "seen")
    return found.replace(**{name: jax.tree.map(filled, getattr(found, name)) for name in changed})


def on_device(cache):
    return jax.tree.map(jax.numpy.array, cache)


def test_launched_together_equals_one_after_another(cache):
    """Also if pages are written that were read, read that were written, or written twice."""
    num_pages = cache.k_pages.shape[0]
    layers, _, kv_heads = cache.lengths.shape
    random = np.random.default_rng(1)
    for trial in range(30):
        copies = Copies(LANES, num_pages, page_bytes=2**24)
        want = jax.tree.map(np.array, cache)
        pool = jax.tree.leaves((want.pool, want.page_state))
        for _ in range(random.integers(1, 12)):
            count = random.integers(0, random.choice([5, 20]))
            if random.random() < 0.7:
                targets, others = np.split(random.permutation(40).astype(np.int32), [count])
                sources = random.choice(others, count)
                copies.add_pages(sources, targets)
                for leaf in pool:
                    leaf[targets] = leaf[sources]
            else:
                lane, tokens = int(random.integers(LANES)), int(random.integers(100))
                lengths = random.integers(0, 9, (layers, kv_heads))
                rows = jax.tree.map(
                    lambda x: random.integers(0, 9, (layers, *x.shape[2:])).astype(x.dtype),
                    want.row_state,
                )
                copies.add_load(lane, Load(lengths, tokens, jax.device_put(rows)))
                want.lengths[:, lane], want.seen[lane] = lengths, tokens
                jax.tree.map(
                    lambda x, new, lane=lane: np.copyto(x[:, lane], new), want.row_state, rows
                )
        assert copies
        chex.assert_trees_all_equal(copies.launched(on_device(cache)), want, custom_message=trial)
        assert not copies


def test_many_states_need_few_launches(cache, monkeypatch):
    launches = []
    for name in ("copy_pages", "load_lanes"):
        program = getattr(programs, name)

        def counted(*args, name=name, program=program):
            launches.append(name)
            return program(*args)

        monkeypatch.setattr(programs, name, counted)
    num_pages = cache.k_pages.shape[0]
    copies = Copies(LANES, num_pages, page_bytes=1)
    rows = jax.tree.map(lambda x: x[:, 0], cache.row_state)
    for lane in range(LANES):
        copies.add_pages(np.array([lane]), np.array([num_pages - 1 - lane]))
        copies.add_load(lane, Load(cache.lengths[:, lane], 1, jax.device_put(rows)))
    copies.launched(on_device(cache))
    assert launches.count("copy_pages") == -(-LANES // copies.blocks[-1])
    assert launches.count("load_lanes") == 2
