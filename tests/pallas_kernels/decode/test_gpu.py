"""The GPU kernels on a GPU: every case, determinism, large pools, loops."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, decode_plan
from pallas_kernels.decode import cases
from pallas_kernels.dispatch import target_gpu
from tests.pallas_kernels.decode.served import refusal
from tests.pallas_kernels.support import (
    TOLERANCE,
    as_arrays,
    decode_inputs,
    decode_oracle,
    float8_score_bound,
    poison_free_memory,
    relative_error,
)

pytestmark = pytest.mark.gpu

SCALE = 0.1


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_mma"])
@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda c: c.name)
def test_every_case_agrees_with_the_oracle(case, implementation):
    if (reason := refusal(case, implementation, target_gpu().capability)) is not None:
        pytest.skip(reason)
    arrays = as_arrays(decode_inputs(case, seed=11))
    run = jax.jit(
        lambda arrays: decode_attention(
            **arrays,
            scale=SCALE,
            return_lse=True,
            return_scores=True,
            implementation=implementation,
        )
    )
    poison_free_memory()
    first, second = run(arrays), run(arrays)
    chex.assert_trees_all_equal(first, second)
    want = decode_oracle(decode_inputs(case, seed=11), SCALE)
    assert relative_error(first[0], want[0]) <= TOLERANCE[case.dtype]
    if case.pages_dtype is not None and implementation == "mosaic_gpu":
        bound = float8_score_bound(decode_inputs(case, seed=11), SCALE)
        for got, oracle, most in zip(first[1:], want[1:], (bound.max(-1), bound), strict=True):
            live = np.isfinite(oracle)
            chex.assert_trees_all_equal(np.isneginf(got), ~live)
            off = np.abs(np.asarray(got, np.float64)[live] - oracle[live])
            assert (off <= most[live] + 2e-5 * np.abs(oracle[live])).all()
        return
    rounded = case.pages_dtype is not None
    for got, oracle in zip(first[1:], want[1:], strict=True):
        assert relative_error(got, oracle) <= (1e-2 if rounded else 2e-5)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_mma"])
def test_a_pool_of_more_than_two_to_the_31_elements(implementation):
    """The rows lie at the far end of a pool of 2.2e9 elements."""
    pages = 2_200_000_000 // (64 * 128)
    draw = jax.jit(lambda key: jax.random.normal(key, (pages, 64, 128), jnp.bfloat16))
    k_pages, v_pages = draw(jax.random.key(0)), draw(jax.random.key(1))
    table = jnp.array([[pages - 1, pages - 3], [pages - 2, 0]], jnp.int32)
    lengths = jnp.array([100, 64], jnp.int32)
    q = jax.random.normal(jax.random.key(2), (2, 4, 128), jnp.bfloat16)
    run = functools.partial(decode_attention, scale=SCALE, implementation=implementation)
    got = jax.jit(run)(q, k_pages, v_pages, table, lengths)
    near = table.reshape(-1)
    small = {
        "q": np.asarray(q),
        "k_pages": np.asarray(k_pages[near]),
        "v_pages": np.asarray(v_pages[near]),
        "page_table": np.arange(4, dtype=np.int32).reshape(2, 2),
        "lengths": np.asarray(lengths),
    }
    assert relative_error(got, decode_oracle(small, SCALE)[0]) <= TOLERANCE["bfloat16"]


def test_a_loop_on_the_device_equals_single_calls():
    """Lengths grow inside one compiled loop, with a new plan each step."""
    case = cases.DecodeCase("loop", (1, 60, 200, 0, 127), spare_columns=3, poison=False)
    arrays = as_arrays(decode_inputs(case))
    owned = jnp.arange(case.rows * case.columns, dtype=jnp.int32)
    arrays["page_table"] = owned.reshape(case.rows, case.columns) % case.pages

    def step(lengths):
        plan = decode_plan(
            lengths, columns=case.columns, page_size=64, head_dim=128, dtype=case.dtype
        )
        return decode_attention(**arrays | {"lengths": lengths}, scale=SCALE, plan=plan)

    @jax.jit
    def loop(lengths):
        def body(lengths, _):
            return lengths + 1, step(lengths)

        return jax.lax.scan(body, lengths, length=12)[1]

    together = loop(arrays["lengths"])
    for i in range(12):
        chex.assert_trees_all_equal(together[i], jax.jit(step)(arrays["lengths"] + i))
