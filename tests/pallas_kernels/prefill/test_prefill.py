"""`prefill_attention`: the XLA form against NumPy, and the kernels without a device."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies

from pallas_kernels import prefill_attention
from pallas_kernels.prefill import cases, gpu, mma, tiles, tpu
from pallas_kernels.prefill.api import check_arguments
from pallas_kernels.prefill.chunk import Chunk, Past
from tests.pallas_kernels.prefill.support import (
    ORDER,
    draw,
    oracle,
    split_keys,
    structs,
)
from tests.pallas_kernels.support import (
    TOLERANCE,
    interpret,
    on_the_card,
    poison_free_memory,
    relative_error,
    sinks_of,
    tpu_interpreters,
)
from tests.support.ahead import compile_ahead
from tests.support.instances import further, nightly_but

BY_NAME = {case.name: case for case in cases.CONTRACT}


def attend(case, implementation):
    def run(arguments):
        return prefill_attention(
            *arguments, window=case.window, scale=case.D**-0.5, implementation=implementation
        )

    return jax.jit(run)


@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda case: case.name)
def test_every_case_agrees_with_the_oracle(case):
    arguments = draw(case)
    output = attend(case, "xla")([*map(jnp.asarray, arguments)])
    chex.assert_type(output, case.dtype)
    error = relative_error(output, oracle(arguments, case.window, case.D**-0.5))
    assert error <= TOLERANCE[case.dtype]
    for b, count in enumerate(case.counts):
        chex.assert_trees_all_equal(output[b, count:], 0.0)


@pytest.mark.parametrize("case", cases.SINKS_AND_CAPS, ids=lambda case: case.name)
def test_sinks_and_soft_caps_agree_with_the_oracle(case):
    drawn, sinks = draw(case), jax.tree.map(jnp.asarray, sinks_of(case))
    arguments = [*map(jnp.asarray, drawn)]

    @jax.jit
    def run(arguments, sinks):
        options = dict(window=case.window, scale=case.D**-0.5)
        return prefill_attention(*arguments, **options, sinks=sinks, soft_cap=case.soft_cap)

    output = run(arguments, sinks)
    more = dict(sinks=sinks, soft_cap=case.soft_cap)
    expected = oracle(drawn, case.window, case.D**-0.5, **more)
    assert relative_error(output, expected) <= TOLERANCE[case.dtype]
    with pytest.raises(NotImplementedError, match="a sink or a soft cap is served by xla alone"):
        prefill_attention(
            *arguments, window=1, scale=1.0, sinks=sinks, soft_cap=case.soft_cap,
            implementation="mosaic_gpu",
        )  # fmt: skip


def test_float64_stays_float64():
    case = BY_NAME["ragged"]
    arguments = draw(case, dtype="float64")
    with jax.enable_x64(True):
        output = attend(case, None)([*map(jnp.asarray, arguments)])
        chex.assert_type(output, "float64")
    assert relative_error(output, oracle(arguments, case.window, case.D**-0.5)) < 1e-12


# Keys that leave the window within a tile of queries, whose first query sees them all.
LEAVING = cases.PrefillCase("leaving", 300, 2, 1, 64, 64, 0, (300,), ((0,),), 160)


@pytest.mark.parametrize(
    "case",
    [BY_NAME[name] for name in ("ragged", "page_edges", "small_pages", "no_pages", "evict_all")]
    + [LEAVING],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize(
    ("rows", "order"), [(64, tiles.order_by_sort), (128, tiles.order_by_count)]
)
def test_plan_visits_only_visible_tiles(case, rows, order):
    arguments = draw(case)
    _, _, _, evicted, _, _, _, _, past, until = arguments
    _, *keys = split_keys([*map(jnp.asarray, arguments)])
    plan = jax.jit(lambda *keys: tiles.make_plan(*keys, case.window, rows, order))(*keys)
    chex.assert_tree_all_finite((plan.dense_k, plan.dense_v))
    since, last = np.asarray(plan.since), np.asarray(plan.until)
    tail = since.shape[0] - plan.dense_k.shape[1]
    for b in range(case.B):
        for h in range(case.K):
            # Every query sees as many keys as it should.
            for i in range(case.counts[b]):
                j = np.arange(i + 1)
                wanted = ((i - j <= case.window) | ~evicted[b, h, : i + 1]).sum()
                wanted += (until[b, h, : past[b, h]] >= i).sum()
                assert ((since <= i) & (i <= last[b, h])).sum() == wanted
            for block in range(plan.visits.shape[2]):
                queries = np.arange(block * rows, min((block + 1) * rows, case.counts[b]))
                seen = (since <= queries[:, None]) & (queries[:, None] <= last[b, h])
                seen = seen.reshape(len(queries), seen.shape[1] // tiles.TILE, tiles.TILE)
                whole, end = np.asarray(plan.ends)[b, h, block]
                visits = np.asarray(plan.visits)[b, h, block, :end]
                needed = set(np.flatnonzero(seen.any((0, 2))))
                assert len(queries) or not end  # queries of padding visit nothing
                # Interval bounds of a tile may be too large, never too small.
                assert needed <= set(visits)
                assert len(set(visits)) == len(visits)
                assert seen[:, visits[:whole]].all()
                # Page tiles contain only whole tiles of live slots.
                paged = visits[visits * tiles.TILE < tail]
                assert (paged * tiles.TILE + tiles.TILE <= past[b, h]).all()


@pytest.mark.parametrize(
    ("implementation", "names"),
    [
        ("mosaic_gpu", ["odd_group"]),
        ("mosaic_mma", ["small_pages"]),
        *further(
            ("mosaic_gpu", ["plain", "ragged", "small_pages", "large_pages", "no_pages"]),
            ("mosaic_mma", ["odd_group", "ragged", "large_pages", "no_pages"]),
            ("mosaic_mma", ["float16", "dim_96", "dim_256"]),
        ),
    ],
    ids=str,
)
def test_gpu_kernel_in_the_interpreter(implementation, names):
    interpret("prefill", implementation, names)


@pytest.mark.parametrize(
    "name", nightly_but({"long_past"}, [name for name in BY_NAME if name != "float16"])
)
def test_tpu_kernel_in_the_interpreter(name):
    case = BY_NAME[name]
    arguments = draw(case)
    operands = split_keys([*map(jnp.asarray, arguments)])
    wanted = oracle(arguments, case.window, case.D**-0.5)
    for parameters in tpu_interpreters():
        options = {"window": case.window, "scale": case.D**-0.5, "interpret": parameters}
        output = tpu.prefill(*operands, **options)
        assert not interpret_pallas_call.races.races_found
        assert relative_error(output, wanted) <= TOLERANCE[case.dtype]


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v5e:2x2", "plain"),
        ("v5p:2x2x1", "plain"),
        ("v5e:2x2", "dim_96"),
        ("v5p:2x2x1", "float32"),
        ("v6e:2x2", "small_pages"),
        ("v5e:2x2", "long_past"),
        ("v6e:2x2", "dim_256"),
        ("v5e:2x2", "dim_512"),
        ("v6e:2x2", "many_rows"),
    ],
)
def test_tpu_kernel_compiles(topology, name):
    # Hundreds of rows of hundreds of pages: the whole page table would not fit scalar memory.
    many = dataclasses.replace(
        BY_NAME["plain"],
        name="many_rows",
        M=512,
        H=16,
        K=16,
        counts=(128,) * 16,
        past=((64,) * 16,) * 16,
    )
    case = BY_NAME.get(name, many)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    arrays = structs(case, jax.sharding.SingleDeviceSharding(devices[0]))
    lowered = attend(case, None).trace(arrays).lower(lowering_platforms=("tpu",))
    text = compile_ahead(lowered, topology).text
    assert 'custom_call_target="tpu_custom_call"' in text


def test_reasons_name_the_limit():
    def reason(module, page=64, dim=64, dtype="bfloat16", scale=1.0, group=4):
        q = jax.ShapeDtypeStruct((1, 8, group, dim), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((1, 8, 1, dim), jnp.dtype(dtype))
        pages = jax.ShapeDtypeStruct((9, page, dim), jnp.dtype(dtype))
        chunk, past = Chunk(k, k, None, None), Past(pages, pages, None, None, None)
        return module.why_not(q, chunk, past, window=1, scale=scale)

    for module in (gpu, mma, tpu):
        assert reason(module) is None
        assert reason(module, page=256) is None
        assert "48" in reason(module, page=48)
        assert "320" in reason(module, dim=320)
        assert "float64" in reason(module, dtype="float64")
        assert "positive" in reason(module, scale=0.0)
    for dtype in ("float16", "float32"):
        assert f"bfloat16 operands alone, got {dtype}" in reason(gpu, dtype=dtype)
    assert "multiplies 16-bit numbers, not float32" in reason(mma, dtype="float32")
    assert "512" in reason(gpu, dim=512)
    assert "512" in reason(mma, dim=512)
    assert reason(tpu, dim=512) is None
    assert "they take 16384" in reason(tpu, dim=512, dtype="float32", group=8)
    assert reason(gpu, page=8) is None
    assert reason(mma, page=16) is None
    assert "16 tokens" in reason(mma, page=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 8, 3, 4)}, "share 2 KV heads"),
        ({"page_table": (2, 3, 6)}, "page_table"),
        ({"window": -2}, "window"),
        ({"floats": {"counts"}}, "counts must hold integers"),
    ],
)
def test_bad_input_is_refused(change, message):
    shapes = {
        "q": (2, 8, 4, 4),
        "k": (2, 8, 2, 4),
        "v": (2, 8, 2, 4),
        "evicted": (2, 2, 8),
        "counts": (2,),
        "k_pages": (5, 16, 4),
        "v_pages": (5, 16, 4),
        "page_table": (2, 2, 6),
        "past_lengths": (2, 2),
        "past_until": (2, 2, 96),
    }
    facts = shapes | {"window": 3, "floats": set()} | change
    integers = {"counts", "page_table", "past_lengths", "past_until"} - facts["floats"]
    dtypes = {n: jnp.int32 if n in integers else jnp.float32 for n in ORDER} | {"evicted": bool}
    arrays = [jax.ShapeDtypeStruct(facts[n], dtypes[n]) for n in ORDER]
    with pytest.raises(ValueError, match=message):
        check_arguments(*split_keys(arrays), facts["window"])


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "case"), on_the_card(cases.CONTRACT))
def test_every_case_on_the_card(implementation, case):
    arguments = draw(case)
    arrays = [*map(jnp.asarray, arguments)]
    run = attend(case, implementation)
    poison_free_memory()
    output = run(arrays)
    error = relative_error(output, oracle(arguments, case.window, case.D**-0.5))
    assert error <= TOLERANCE[case.dtype]
    chex.assert_trees_all_equal(output, run(arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_mma"])
def test_a_pool_of_more_than_two_to_the_31_elements(implementation):
    """The same pages at the far end of a pool of 2.2e9 elements give the same bits."""
    case = BY_NAME["plain"]
    arrays = dict(zip(ORDER, map(jnp.asarray, draw(case)), strict=True))
    near = attend(case, implementation)([arrays[name] for name in ORDER])
    used = arrays["k_pages"].shape[0]
    behind = 2_200_000_000 // (case.P * case.D) - used
    for name in ("k_pages", "v_pages"):
        arrays[name] = jnp.pad(arrays[name], ((behind, 0), (0, 0), (0, 0)))
    arrays["page_table"] = arrays["page_table"] + behind
    far = attend(case, implementation)([arrays[name] for name in ORDER])
    chex.assert_trees_all_equal(near, far)
