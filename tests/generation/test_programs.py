"""Programs: compiler options, the loop over layers, and results in one transfer."""

import re

import chex
import jax
import numpy as np
import pytest

from dms_jax.generation import Engine, programs
from dms_jax.generation.copies import no_load
from dms_jax.generation.precompile import _Calls
from dms_jax.generation.prefill import Shape
from dms_jax.generation.programs import Packed
from tests.generation.support import SHAPE, model_for


def test_xla_accepts_step_options():
    """XLA knows the names and values on every platform, and refuses an unknown one."""
    step = jax.jit(lambda x: x + 1, compiler_options=programs.GPU_STEP_OPTIONS)
    assert step(1) == 2
    unknown = programs.GPU_STEP_OPTIONS | {"xla_gpu_enable_while_loop_unrolling": "SOMETIMES"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
        jax.jit(lambda x: x + 2, compiler_options=unknown)(1)


@pytest.mark.parametrize("backend", ["cpu", "gpu"], ids="on {}".format)
def test_options_follow_backend(backend, monkeypatch):
    """An unknown option on only one kind of device."""
    program = programs.Program(lambda x: x + 1, gpu_options={"xla_no_such_option": True})
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if backend == "cpu":
        assert program(1) == 2
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program(1)


TREE = {
    "numbers": np.arange(-3, 3, dtype=np.int32).reshape(2, 3),
    "booleans": np.array([[True], [False]]),
    "shares": np.array([0.1, -np.inf, np.nan], np.float32),
    "nothing": np.zeros((0, 4), np.int32),
    "absent": None,
}


def test_packed_results_round_trip():
    packed = jax.jit(Packed.of)(TREE)
    assert len(jax.tree.leaves(packed)) == 1
    read = packed.read()
    chex.assert_trees_all_equal(read, TREE)
    chex.assert_trees_all_equal_shapes_and_dtypes(read, TREE)


@pytest.mark.parametrize("name", ["vanilla", "quest", "dms"])
def test_copies_do_not_duplicate_pool(name, optimized):
    """Programs of copies and prefixes donate the cache and need little further memory."""
    del optimized

    def compiled(max_tokens):
        engine = Engine(model_for(name), max_tokens=max_tokens, **(SHAPE | {"num_lanes": 4}))
        cache = engine.runner.cache
        pages, lanes = np.zeros(16, np.int32), np.arange(4, dtype=np.int32)
        contents = jax.eval_shape(programs.read_pages.jitted, cache, pages)
        heads = engine.model.config.num_kv_heads
        lowered = {
            "lanes": programs.copy_lanes.lower(cache, np.zeros((1, 2, 16), np.int32), lanes, heads),
            "copy": programs.copy_pages.lower(cache, np.stack([pages, pages])),
            "write": programs.write_pages.lower(cache, pages, contents),
            "load": programs.load_lanes.lower(*no_load(cache, lanes[:2])),
        }
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.pool, cache.page_state)))
        return {key: each.compile() for key, each in lowered.items()}, pool

    (small, pool), (large, four_pools) = compiled(64), compiled(256)
    assert four_pools == 4 * pool
    assert " while(" not in large["lanes"].as_text()  # it would block the host until it ended
    for key in large:
        own, less = large[key].memory_analysis(), small[key].memory_analysis()
        assert own.alias_size_in_bytes >= four_pools
        assert own.temp_size_in_bytes - less.temp_size_in_bytes < pool / 50


@pytest.mark.parametrize("name", ["vanilla", "dms", "snapkv"])
def test_prompts_do_not_copy_pool(name, optimized):
    """On a CPU too: otherwise a prompt takes longer the larger the cache is."""
    del optimized
    runner = Engine(model_for(name), max_tokens=64, **SHAPE).runner
    program, given = _Calls(runner, None).extend(Shape(16, 1, None, one_pass=True), pages=4)
    pool = ",".join(map(str, runner.cache.k_pages.shape))
    assert not re.findall(rf"\[{pool}\]\S* copy\(", program.lower(*given).compile().as_text())
