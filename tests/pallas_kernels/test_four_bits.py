"""4-bit pages in the kernels' functions: XLA reads and writes them, and no kernel does."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, write_pages
from pallas_kernels.decode import cases
from pallas_kernels.four_bits import pack
from tests.oracles import int4
from tests.pallas_kernels.support import as_arrays, decode_inputs, decode_oracle, relative_error

CASE = cases.by_name("head_dim64")
SCALE, GROUPS = 0.11, 2


def packed_inputs(case=CASE):
    """A decode attention case with 4-bit pages, and the same with dequantised pages.

    Unread pages have NaN scales.
    """
    inputs = decode_inputs(case)
    wide = dict(inputs)
    random = np.random.default_rng(1)
    for name in ("k", "v"):
        pages = inputs[f"{name}_pages"]
        codes = random.integers(-8, 8, pages.shape).astype(np.int8)
        scales = random.uniform(-1, 1, (*pages.shape[:2], GROUPS))
        scales[np.isnan(pages.astype(np.float32)).any(-1)] = np.nan
        scales = np.asarray(scales, jnp.bfloat16)
        inputs[f"{name}_pages"] = np.asarray(pack(jnp.asarray(codes)))
        inputs[f"{name}_scales"] = scales
        wide[f"{name}_pages"] = int4.read(codes, scales, rotated=False)
    return {**inputs, "q": inputs["q"].astype(np.float32)}, wide


def test_attention_reads_dequantised_numbers():
    inputs, wide = packed_inputs()
    assert np.isnan(inputs["k_scales"].astype(np.float32)).any()
    run = functools.partial(decode_attention, scale=SCALE, return_lse=True, return_scores=True)
    got = jax.jit(lambda arrays: run(**arrays))(as_arrays(inputs))
    for one, want in zip(got, decode_oracle(wide, SCALE), strict=True):
        assert relative_error(one, want) <= 2e-5


def test_only_read_rows_are_unpacked():
    """The pool is neither copied nor dequantised as a whole."""
    case = cases.DecodeCase("few of many", (40, 33), head_dim=64, spare_pages=1000)
    arrays = as_arrays(packed_inputs(case)[0])
    run = jax.jit(lambda arrays: decode_attention(**arrays, scale=SCALE))
    text = run.lower(arrays).compile()
    assert text.memory_analysis().temp_size_in_bytes < arrays["k_pages"].nbytes / 4


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_mma", "mosaic_tpu"])
def test_no_kernel_reads_or_writes_4_bits(name):
    inputs, _ = packed_inputs()
    inputs["q"] = inputs["q"].astype(jnp.bfloat16)
    shapes = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in inputs.items()}
    read = functools.partial(decode_attention, scale=SCALE, implementation=name)
    with pytest.raises(NotImplementedError, match=f"{name}: does not read pages of 4 bits"):
        jax.eval_shape(read, **shapes)
    if name == "mosaic_mma":
        return  # only decode attention
    written = packed_structs()
    reason = "serves bfloat16" if name == "mosaic_tpu" else "does not write pages of 4 bits"
    with pytest.raises(NotImplementedError, match=f"{name}: {reason}"):
        jax.eval_shape(functools.partial(write_pages, implementation=name), **written)


def packed_structs(groups: int = GROUPS) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a write of 4-bit numbers, with heads of 256."""
    of = jax.ShapeDtypeStruct
    rows = of((5,), np.int32)
    pages, new = of((9, 16, 128), jnp.uint8), of((5, 128), jnp.uint8)
    scales, fresh = of((9, 16, groups), jnp.bfloat16), of((5, groups), jnp.bfloat16)
    both = {f"{x}_{key}": a for x in "kv" for key, a in (("pages", pages), ("new", new))}
    factors = {f"{x}_scales": scales for x in "kv"} | {f"{x}_new_scales": fresh for x in "kv"}
    return {**both, **factors, "pages": rows, "offsets": rows}


def test_write_stores_numbers_and_scales_in_its_slot():
    random = np.random.default_rng(2)
    arrays = {
        name: jnp.asarray(random.integers(0, 200, x.shape), x.dtype)
        for name, x in packed_structs().items()
    }
    pages, offsets = np.array([7, 0, 3, 9, 5]), np.array([3, 15, -1, 0, 0])
    got = jax.jit(write_pages)(**arrays | {"pages": pages, "offsets": offsets})
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    for result, name in zip(got, names, strict=True):
        want = np.array(arrays[name])
        new = arrays[name.replace("pages", "new").replace("_scales", "_new_scales")]
        for row in (0, 1, 4):  # the third writes nothing, the fourth has no page
            want[pages[row], offsets[row]] = new[row]
        chex.assert_trees_all_equal(result, want)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("v_scales", None, r"4 bits need v_scales \[N, P, D / g\]"),
        ("k_scales", (3, 16), "4 bits need k_scales"),
        ("q", (len(CASE.lengths), CASE.group, 32), "head dim"),
    ],
)
def test_mismatched_pages_are_refused(name, shape, message):
    inputs = as_arrays(packed_inputs()[0])
    inputs[name] = None if shape is None else jnp.ones(shape)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(decode_attention)(**inputs, scale=SCALE)
