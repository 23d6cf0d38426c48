"""Selection of the implementation: by lowering platform, by name, in order, with reasons."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, decode_plan, dispatch
from pallas_kernels.decode import cases, gpu, tpu
from pallas_kernels.decode.rows import Rows
from pallas_kernels.dispatch import GPU, Implementation, Operation
from tests.pallas_kernels.decode.served import refusal
from tests.pallas_kernels.support import (
    as_arrays,
    by_name,
    decode_inputs,
    lower_for_cuda,
    split_rows,
    structs,
)
from tests.support.instances import further

XLA = "stablehlo.dot_general"

OPERATION = Operation(
    "sum",
    (
        Implementation("card", "cuda", lambda x: x + 1),
        Implementation("picky", "cuda", lambda x: x + 2, lambda x: "serves nothing"),
        Implementation("plain", None, lambda x: x - 1),
    ),
)


def test_platform_is_chosen_at_lowering():
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    function = jax.jit(lambda x: OPERATION(None, x))
    assert "stablehlo.subtract" in function.trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.add" in function.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_traced_only_for_its_platform():
    traced = []

    def card(x):
        traced.append(x.dtype)
        return x * 3

    operation = Operation(
        "triple",
        (Implementation("card", "cuda", card), Implementation("plain", None, lambda x: x + x + x)),
    )
    x = np.float32([2.0, 5.0])
    function = jax.jit(lambda x: operation(None, x))
    chex.assert_trees_all_equal(function(x), 3 * x)
    assert not traced
    lowered = function.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.multiply" in lowered
    assert "stablehlo.add" not in lowered
    assert traced == [np.float32]

    both = jax.jit(jax.vmap(jax.value_and_grad(lambda x: operation(None, x))))
    chex.assert_trees_all_equal(both(x), (3 * x, np.full_like(x, 3.0)))
    assert "stablehlo.multiply" in both.trace(x).lower(lowering_platforms=("cuda",)).as_text()


class TestNames(chex.TestCase):
    """An explicit name forces the implementation."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_name_forces_its_implementation(self):
        run = self.variant(OPERATION.__call__, static_argnums=0)
        chex.assert_trees_all_equal(run("plain", 1.0), 0.0)
        with pytest.raises(NotImplementedError, match=r"only card \(cuda\) may serve"):
            run("card", 1.0)


def test_refusals_say_why():
    with pytest.raises(NotImplementedError, match="picky: serves nothing"):
        OPERATION("picky", 1.0)
    cards = replace(OPERATION, implementations=OPERATION.implementations[1::-1])
    with pytest.raises(NotImplementedError, match=r"only card(.|\n)*picky: serves nothing"):
        cards(None, 1.0)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no implementation 'fast'; it has card, picky, plain"):
        OPERATION("fast", 1.0)


def decode(case, implementation=None, **options):
    return functools.partial(
        decode_attention, scale=0.1, implementation=implementation, **options
    ), structs(case)


@pytest.mark.parametrize(
    ("name", "implementation", "marker"),
    [
        ("base", "mosaic_mma", "decode_attention_mma"),
        ("float8_page16", None, "decode_attention_mma"),
        ("float32", None, XLA),
        ("head_dim8", None, XLA),
        ("base", "xla", XLA),
        *further(
            ("base", None, "mosaic_gpu"),
        ),
    ],
)
def test_decode_attention_for_cuda(name, implementation, marker):
    function, shapes = decode(by_name(cases, name), implementation)
    text = lower_for_cuda(function, **shapes)
    assert marker in text
    assert (XLA in text) == (marker == XLA)


T4, A100 = GPU("Tesla T4", 40, (7, 5)), GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0))
L4, B200 = GPU("NVIDIA L4", 58, (8, 9)), GPU("NVIDIA B200", 148, (10, 0))


H200 = dispatch.DEFAULT_GPU
FORMS = {
    "mosaic_gpu": gpu.why_not_mosaic,
    "mosaic_mma": gpu.why_not_mma,
    "mosaic_tpu": tpu.why_not,
}


@pytest.mark.parametrize("card", [T4, A100, L4, H200, B200], ids=lambda card: card.kind)
@pytest.mark.parametrize("form", FORMS)
def test_each_kernel_serves_its_listed_cases(card, form, monkeypatch):
    """It refuses the others with a reason; other tests run the served ones."""
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: card)
    for case in (*cases.CONTRACT, *cases.XLA_ONLY):
        with jax.enable_x64(case.dtype == "float64"):
            said = FORMS[form](*split_rows(structs(case)), plan=None)
        want = refusal(case, form, card.capability)
        assert (said is None) == (want is None), (case.name, said)
        assert (want or "") in (said or ""), (case.name, said)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 96, 128, 192, 208, 1024, 2048])
def test_tpu_blocks_are_whole_lanes_of_scores(page_size, monkeypatch):
    """The TPU compiler refuses to copy others; the interpreter accepts them."""
    case = replace(cases.BASE, page_size=page_size, lengths=(1, 9 * page_size))
    q, rows = split_rows(structs(case))
    assert tpu.why_not(q, rows, None) is None
    blocks = []
    kernel = tpu._kernel
    monkeypatch.setattr(
        tpu, "_kernel", lambda *refs, sizes: blocks.append(sizes) or kernel(*refs, sizes=sizes)
    )
    run = functools.partial(
        tpu.decode_attention_tpu, scale=0.1, return_lse=True, return_scores=True, interpret=True
    )
    jax.eval_shape(run, q, rows)
    (sizes,) = blocks
    assert sizes.block % 128 == 0
    assert sizes.buffers * sizes.block * 2 * 128 * 2 <= 8 << 20


def test_decode_without_accelerator_is_xla():
    case = by_name(cases, "head_dim64")
    inputs = as_arrays(decode_inputs(case))
    by_default, forced = (
        decode_attention(**inputs, scale=0.1, implementation=choice) for choice in (None, "xla")
    )
    chex.assert_trees_all_equal(by_default, forced)
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        decode_attention(**inputs, scale=0.1, implementation="mosaic_gpu")


@pytest.mark.parametrize("rows", [0, -1])
def test_plan_of_another_step_is_refused(rows):
    """A plan of several layers, or of fewer rows."""
    inputs = as_arrays(decode_inputs(by_name(cases, "head_dim64")))
    lengths = inputs["lengths"]
    shape = {"columns": inputs["page_table"].shape[1], "page_size": 64, "head_dim": 64}
    plan = decode_plan(lengths[None] if rows == 0 else lengths[:rows], dtype="bfloat16", **shape)
    with pytest.raises(ValueError, match="not those of one step of"):
        decode_attention(**inputs, scale=0.1, plan=plan)


@pytest.mark.parametrize("page_size", [4096 + 16, 16384])
def test_pages_too_large_for_a_tpu_are_refused(page_size):
    """Whole lanes of scores take eight pages of the first kind, and one of the second."""
    q, rows = split_rows(structs(replace(cases.BASE, page_size=page_size, lengths=(1,))))
    assert "needs two buffers" in str(tpu.why_not(q, rows, None))


@pytest.mark.parametrize(
    ("rows", "columns", "served"),
    [
        (2, 1007 * 128, True),  # "widest" of `compile_for_tpu`
        (2, 1007 * 128 + 1, False),
        (240_000, 128, True),
        (262_144, 128, False),
    ],
)
def test_tpu_rows_and_tables_fit_scalar_memory(rows, columns, served):
    """Otherwise the compiler fails, and XLA serves them."""
    of = jax.ShapeDtypeStruct
    pages = of((4, 16, 128), jnp.bfloat16)
    table, lengths = of((rows, columns), jnp.int32), of((rows,), jnp.int32)
    said = tpu.why_not(of((rows, 4, 128), jnp.bfloat16), Rows(pages, pages, table, lengths), None)
    assert said is None if served else "bytes of scalar memory" in str(said)
