"""`write_pages`: results on this machine, refusals, and lowering of every kernel."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import rotate_and_write, write_pages
from pallas_kernels.dispatch import GPU
from pallas_kernels.update import cases, gpu
from tests.pallas_kernels.support import as_arrays, by_name, lower_for_cuda
from tests.pallas_kernels.update.support import (
    assert_agrees,
    assert_same_bits,
    operation,
    write_inputs,
    write_oracle,
    write_structs,
)

SCATTER = "stablehlo.scatter"
# Without the annotations that tests check at run time.
unchecked = getattr(write_pages, "__wrapped__", write_pages)


@pytest.mark.parametrize("case", [*cases.CONTRACT, *cases.XLA_ONLY], ids=lambda c: c.name)
def test_xla_agrees_with_the_oracle(case):
    inputs = write_inputs(case)
    with jax.enable_x64(case.dtype == "float64"):
        run = jax.jit(functools.partial(operation(case), implementation="xla"))
        got = run(**as_arrays(inputs))
    assert_agrees(case, inputs, got)


def test_without_an_accelerator_it_is_xla():
    inputs = write_inputs(cases.BASE)
    assert_same_bits(write_pages(**as_arrays(inputs)), write_oracle(inputs))
    with pytest.raises(NotImplementedError, match="only mosaic_gpu"):
        write_pages(**as_arrays(inputs), implementation="mosaic_gpu")


def test_a_donated_pool_is_written_in_place():
    shapes = write_structs(by_name(cases, "rows8"))
    pool = {name: shapes.pop(name) for name in ("k_pages", "v_pages")}
    write = jax.jit(lambda pool, rest: write_pages(**pool, **rest), donate_argnums=0)
    memory = write.lower(pool, shapes).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in pool.values())
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pages": np.zeros((4, 8), np.float32)}, "k_pages must be"),
        ({"v_new": np.zeros((2, 8), np.float16)}, "v_new must be"),
        ({"pages": np.zeros(2, np.float32)}, "pages must be integers"),
        ({"k_scales": np.zeros((4, 8), np.float32)}, "scales"),
    ],
)
def test_mismatched_arguments_are_refused(changes, message):
    inputs = {
        "k_pages": np.zeros((4, 8, 8), np.float32),
        "v_pages": np.zeros((4, 8, 8), np.float32),
        "k_new": np.zeros((2, 8), np.float32),
        "v_new": np.zeros((2, 8), np.float32),
        "pages": np.zeros(2, np.int32),
        "offsets": np.zeros(2, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        unchecked(**as_arrays(inputs | changes))


@pytest.mark.parametrize("missing", ["k_scales", "v_new_scales"])
def test_float8_pages_need_all_their_scales(missing):
    arrays = as_arrays(write_inputs(by_name(cases, "float8")))
    with pytest.raises(ValueError, match="scales"):
        unchecked(**{name: x for name, x in arrays.items() if name != missing})
    arrays[missing] = arrays[missing][:-1]
    with pytest.raises(ValueError, match=missing):
        unchecked(**arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": np.zeros((4, 8), np.float32)}, r"heads must be float32\[4, G \+ 2, 8\]"),
        ({"rotation": (np.zeros((2, 4), np.float32), np.zeros((2, 8), np.float32))}, "sin must be"),
        ({"rotation": (np.zeros((2, 4), np.float16),) * 2}, "at least float32"),
        ({"zeroed": ((3, 0),)}, r"zeroed has \(3, 0\)"),
        (
            {name: np.zeros((4, 8, 8), np.int8) for name in ("k_pages", "v_pages")},
            "before they are quantized",
        ),
    ],
)
def test_mismatched_rotations_are_refused(changes, message):
    inputs = {
        "k_pages": np.zeros((4, 8, 8), np.float32),
        "v_pages": np.zeros((4, 8, 8), np.float32),
        "heads": np.zeros((4, 4, 8), np.float32),
        "rotation": (np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)),
        "pages": np.zeros(4, np.int32),
        "offsets": np.zeros(4, np.int32),
    }
    run = getattr(rotate_and_write, "__wrapped__", rotate_and_write)
    run(**as_arrays(inputs))
    with pytest.raises(ValueError, match=f"rotate_and_write: .*{message}"):
        run(**inputs | changes)


def lowered(case, implementation=None):
    function = functools.partial(operation(case), implementation=implementation)
    return lower_for_cuda(function, **write_structs(case))


@pytest.mark.parametrize("case", [*cases.CONTRACT, *cases.BENCHMARK], ids=lambda c: c.name)
def test_kernels_lower_for_an_h200(case):
    """One launch; keys and values are written in place."""
    text = lowered(case)
    assert text.count("stablehlo.custom_call") == 1
    assert text.count("output_operand_alias<") == (4 if case.scaled else 2)
    assert SCATTER not in text


def test_refusals_name_the_limit():
    with pytest.raises(NotImplementedError, match="multiples of 8, not 20"):
        lowered(cases.WriteCase("head_dim20", 3, head_dim=20), "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="multiples of 16, not 24"):
        lowered(cases.WriteCase("head_dim24", 3, head_dim=24, group=1), "mosaic_gpu")


@pytest.mark.parametrize(
    ("card", "name", "scatter"),
    [
        (GPU("Tesla T4", 40, (7, 5)), "base", True),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "base", False),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "float8", False),
        (GPU("NVIDIA L4", 58, (8, 9)), "float8", False),
        (GPU("NVIDIA B200", 148, (10, 0)), "base", False),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_other_generations_of_gpus(card, name, scatter, monkeypatch):
    monkeypatch.setattr(gpu, "target_gpu", lambda: card)
    text = lowered(by_name(cases, name))
    assert (SCATTER in text) == scatter
    assert ("mosaic_gpu" in text) != scatter


def test_fewer_value_pages_than_key_pages():
    """A row whose page has no values does not write its key either."""
    inputs = write_inputs(cases.BASE)
    inputs["v_pages"] = inputs["v_pages"][:5]
    within = inputs["pages"] < 5
    assert 0 < within.sum() < len(within)
    want = write_oracle(inputs | {"offsets": np.where(within, inputs["offsets"], -1)})
    assert_same_bits(write_pages(**as_arrays(inputs)), want)
