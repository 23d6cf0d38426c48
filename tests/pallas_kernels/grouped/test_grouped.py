"""Grouped matrix products against NumPy, and the selection of the implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import dispatch, grouped_product
from pallas_kernels.dispatch import GPU
from pallas_kernels.grouped.api import GRADIENT, OPERATION
from pallas_kernels.grouped.gpu import why_not

# Empty groups, groups that end within a block, rows after the last group, no rows.
COUNTS = [[3, 0, 5, 2], [0, 0, 0, 0], [0, 14, 0, 0], [1, 1, 1, 11], [40, 1, 30, 9], [0, 0, 0, 9]]
ROWS = {14: COUNTS[:4], 82: COUNTS[4:]}


def oracle(x, matrices, counts):
    """Row by row."""
    group = np.repeat(np.arange(len(counts)), counts)
    y = np.zeros((len(x), matrices.shape[2]))
    for row, own in enumerate(group):
        y[row] = x[row] @ matrices[own]
    return y, group


@pytest.mark.parametrize("implementation", ["xla", "ragged_dot"])
@pytest.mark.parametrize("rows", ROWS)
def test_products_and_gradients(rows, implementation):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, matrices = random.normal(size=(rows, 6)), random.normal(size=(4, 6, 10))
        given = random.normal(size=(rows, 10))
        x, matrices, given = map(jnp.asarray, (x, matrices, given))
        by_name = {
            operation.name: {each.name: each.function for each in operation.implementations}
            for operation in (OPERATION, GRADIENT)
        }
        product = by_name[OPERATION.name][implementation]
        gradient = by_name[GRADIENT.name][implementation]

        @jax.jit
        def run(counts):
            return (
                product(x, matrices, counts, transposed=False),
                product(given, matrices, counts, transposed=True),
                gradient(x, given, counts),
            )

        for counts in ROWS[rows]:
            y, of_rows, of_matrices = run(jnp.asarray(counts, jnp.int32))
            expected, group = oracle(x, matrices, counts)
            assert np.abs(y - expected).max() < 1e-12
            back, _ = oracle(given, matrices.swapaxes(1, 2), counts)
            assert np.abs(of_rows - back).max() < 1e-12
            change = np.zeros(matrices.shape)
            for row, own in enumerate(group):
                change[own] += np.outer(x[row], given[row])
            assert np.abs(of_matrices - change).max() < 1e-12


def test_gradients_equal_finite_differences():
    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        x, matrices = (jnp.asarray(random.normal(size=size)) for size in ((9, 3), (2, 3, 4)))
        counts = jnp.array([5, 2])

        def product(*arrays):  # finite differences use NumPy's products
            return grouped_product(*map(jnp.asarray, arrays), counts)

        check_grads(product, (x, matrices), order=1, modes=["rev"])


def test_narrow_numbers_are_summed_in_float32():
    """300 products of 1 and 1; a bfloat16 sum would stop at 256."""
    x, matrices = jnp.ones((2, 300), jnp.bfloat16), jnp.ones((1, 300, 1), jnp.bfloat16)
    y = grouped_product(x, matrices, jnp.array([2]))
    assert y.dtype == jnp.bfloat16
    assert y.ravel().tolist() == [300, 300]


@pytest.mark.parametrize(
    ("x", "matrices", "reason"),
    [
        (((8, 128), "bfloat16"), (4, 128, 256), None),
        (((8, 2880), "bfloat16"), (4, 2880, 5760), None),
        (((8, 128), "float16"), (4, 128, 64), None),
        (((8, 128), "float32"), (4, 128, 256), "bfloat16 or float16, not float32"),
        (((8, 96), "bfloat16"), (4, 96, 256), "multiples of 64 numbers, not 96 x 256"),
        (((8, 128), "bfloat16"), (4, 128, 80), "multiples of 64 numbers, not 128 x 80"),
        (((0, 128), "bfloat16"), (4, 128, 64), "no rows"),
    ],
)
def test_hopper_kernel_serves_its_cases(x, matrices, reason):
    rows = jax.ShapeDtypeStruct(*x)
    stack = jax.ShapeDtypeStruct(matrices, rows.dtype)
    found = why_not(rows, stack, None, transposed=False)
    assert found is None if reason is None else reason in found
    back = jax.ShapeDtypeStruct((rows.shape[0], matrices[2]), rows.dtype)
    found = why_not(back, stack, None, transposed=True)
    assert (found is None) == (reason is None)


def test_other_gpus_multiply_block_by_block(monkeypatch):
    rows = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((4, 128, 64), jnp.bfloat16)
    chosen, _ = OPERATION.select(None, rows, stack, None, transposed=False)
    assert {platform: each.name for platform, each in chosen.items()} == {
        "cuda": "mosaic_gpu",
        "tpu": "ragged_dot",
        None: "xla",
    }
    card = GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0))
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: card)
    chosen, reasons = OPERATION.select(None, rows, stack, None, transposed=False)
    assert chosen.keys() == {"tpu", None}
    assert "Hopper" in reasons[0]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 3), (2, 4, 5), (2,)), r"rows of 3 float32 do not fit matrices of 4 x 5"),
        (((4, 3), (2, 3, 5), (3,)), r"counts \[X\], got \[4, 3\], \[2, 3, 5\] and \[3\]"),
        (((4, 3, 1), (2, 3, 5), (2,)), r"takes rows \[R, n\]"),
    ],
)
def test_mismatched_shapes_are_refused(shapes, message, pytestconfig):
    if pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("jaxtyping's checks refuse what the code is to refuse")
    x, matrices, counts = shapes
    with pytest.raises(ValueError, match=message):
        grouped_product(jnp.ones(x), jnp.ones(matrices), jnp.ones(counts, jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 512, 20_000])
@pytest.mark.parametrize("shape", [(128, 2048, 1536), (32, 2880, 5760)])
def test_hopper_kernel_agrees(rows, shape):
    experts, inputs, _ = shape
    random = np.random.default_rng(rows)
    counts = random.multinomial(rows - 3, random.dirichlet(np.full(experts, 0.5))).astype(np.int32)
    x = jnp.asarray(random.normal(size=(rows, inputs)), jnp.bfloat16)
    matrices = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    found, expected = (
        jax.vjp(lambda *a, name=name: grouped_product(*a, counts, implementation=name), x, matrices)
        for name in ("mosaic_gpu", "xla")
    )
    for one, other in (
        (found[0], expected[0]),
        *zip(found[1](found[0]), expected[1](found[0]), strict=True),
    ):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() < 2e-2 * np.abs(other).max()
    assert not np.asarray(found[0][-3:], np.float32).any()
