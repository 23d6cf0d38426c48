"""`received_attention`: the XLA form against NumPy, and the kernels without a device."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, received_attention
from pallas_kernels.received import NEVER, cases, gpu, reference
from tests.pallas_kernels.received.support import ORDER, draw, oracle, structs
from tests.pallas_kernels.support import (
    by_name,
    interpret,
    lower_for_cuda,
    poison_free_memory,
    relative_error,
)
from tests.support.instances import further

BFLOAT16 = [case for case in cases.CONTRACT if case.dtype == "bfloat16"]
# Products of 16-bit numbers are exact in float32, in which sums are taken.
TOLERANCE = 1e-5


def receive(case, implementation=None):
    scale = case.D**-0.5
    return jax.jit(
        functools.partial(received_attention, scale=scale, implementation=implementation)
    )


@pytest.mark.parametrize("most", [reference.MOST_WEIGHTS, 1])
@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda case: case.name)
def test_every_case_agrees_with_the_oracle(case, most, monkeypatch):
    """With one block of queries, and with the most blocks."""
    monkeypatch.setattr(reference, "MOST_WEIGHTS", most)
    arguments = draw(case)
    sums = receive(case, "xla")(*map(jnp.asarray, arguments))
    chex.assert_type(sums, "float32")
    assert relative_error(sums, oracle(arguments, case.D**-0.5)) <= TOLERANCE


def test_float64_stays_float64():
    case = by_name(cases, "reused")
    arguments = draw(case, dtype="float64")
    with jax.enable_x64(True):
        sums = receive(case)(*map(jnp.asarray, arguments))
        chex.assert_type(sums, "float64")
    assert relative_error(sums, oracle(arguments, case.D**-0.5)) < 1e-12


def in_tiles(case):
    """The positions of a case, in whole tiles."""
    _, _, positions, since = draw(case)
    positions = np.pad(positions, ((0, 0), (0, -case.T % 128)), constant_values=-1)
    since = np.pad(since, ((0, 0), (0, 0), (0, -case.slots % 128)), constant_values=NEVER)
    return positions, since


def in_no_order():
    """Tiles of queries and keys with near positions, in any order of tiles."""
    rng = np.random.default_rng(0)
    bases = 100 * rng.integers(0, 9, (3, 6)), 100 * rng.integers(0, 9, (3, 2, 7))
    positions, since = (
        base[..., None] + rng.integers(0, 120, (*base.shape, 128)) for base in bases
    )
    positions[:, 2, 100:] = -1
    return positions.reshape(3, -1).astype(np.int32), since.reshape(3, 2, -1).astype(np.int32)


@pytest.mark.parametrize("case", [*BFLOAT16, None], ids=lambda case: getattr(case, "name", None))
def test_plan_visits_visible_tiles(case):
    positions, since = in_no_order() if case is None else in_tiles(case)
    over_keys, over_queries = map(np.asarray, jax.jit(gpu.plan)(positions, since))
    seen = since[:, :, None] <= positions[:, None, :, None]
    seen = seen.reshape(*seen.shape[:2], seen.shape[2] // 128, 128, -1, 128)
    real = (positions >= 0).reshape(len(positions), 1, -1, 128, 1, 1)
    some, every = seen.any((3, 5)), (seen | ~real).all((3, 5))
    for place in np.ndindex(some.shape):
        row, query_tile, key_tile = place[:2], place[2], place[3]
        whole_end, end = over_keys[(*row, query_tile)]
        first, whole_first, last = over_queries[(*row, key_tile)]
        assert 0 <= whole_end <= end
        assert 0 <= first <= whole_first <= last
        if some[place]:
            assert key_tile < end
            assert first <= query_tile < last
        if key_tile < whole_end or whole_first <= query_tile < last:
            assert every[place]
    # With slots in order nothing else is visited, and whole tiles are not compared.
    if case is not None and not case.shuffled:
        whole = (some & every).sum()
        assert over_keys[..., 1].sum() == (over_queries[..., 2] - over_queries[..., 0]).sum()
        assert over_keys[..., 1].sum() == some.sum()
        assert over_keys[..., 0].sum() == whole
        assert (over_queries[..., 2] - over_queries[..., 1]).sum() == whole


@pytest.mark.parametrize(
    "names",
    [
        ["reused", "ragged"],
        *further(["plain", "second_chunk", "one_head", "group_of_eight"]),
        *further(["odd_group", "dim_256", "long_past"]),
    ],
    ids=str,
)
def test_gpu_kernel_in_the_interpreter(names):
    interpret("received", "mosaic_gpu", names)


@pytest.mark.parametrize("name", ["plain", "float32", "small_heads"])
def test_a_gpu_runs_the_kernels_they_serve(name):
    case = by_name(cases, name)
    text = lower_for_cuda(lambda **x: receive(case)(*(x[n] for n in ORDER)), **structs(case))
    kernels = 2 if case.dtype == "bfloat16" else 0
    assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels


def test_reasons_name_the_limit(monkeypatch):
    def reason(dim=64, dtype="bfloat16", keys="bfloat16", scale=1.0):
        q = jax.ShapeDtypeStruct((1, 8, 4, dim), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((1, 1, 9, dim), jnp.dtype(keys))
        return gpu.why_not(q, k, None, None, scale=scale)

    assert reason() is None
    assert "32" in reason(dim=32)
    assert "serves bfloat16 operands alone" in reason(dtype="float16")
    assert "float32" in reason(keys="float32")
    assert "positive" in reason(scale=0.0)
    card = dispatch.GPU("NVIDIA L4", 58, (8, 9))
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: card)
    assert "NVIDIA L4" in reason()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 8, 3, 4)}, "share 2 KV heads"),
        ({"positions": (2, 9)}, "positions must be"),
        ({"floats": {"since"}}, "since must hold integers"),
    ],
)
def test_bad_input_is_refused(change, message):
    facts = {"q": (2, 8, 4, 4), "k": (2, 2, 9, 4), "positions": (2, 8), "since": (2, 2, 9)}
    facts |= {"floats": {"q", "k"}} | change
    floats = facts["floats"] | {"q", "k"}
    arrays = [jnp.zeros(facts[n], jnp.float32 if n in floats else jnp.int32) for n in ORDER]
    unchecked = inspect.unwrap(received_attention)
    with pytest.raises(ValueError, match=message):
        unchecked(*arrays, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.name)
def test_every_case_on_the_card(case):
    arguments = draw(case)
    arrays = [*map(jnp.asarray, arguments)]
    run = receive(case, "mosaic_gpu")
    poison_free_memory()
    sums = run(*arrays)
    assert relative_error(sums, oracle(arguments, case.D**-0.5)) <= 1e-4
    chex.assert_trees_all_equal(sums, run(*arrays))
