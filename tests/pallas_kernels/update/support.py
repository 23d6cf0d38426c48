"""Inputs and the NumPy oracle of the write of new keys and values."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np

from pallas_kernels import rotate_and_write, write_pages


def operation(case):
    """Returns the operation of a case, to be called with its inputs."""
    return functools.partial(rotate_and_write, zeroed=case.zeroed) if case.group else write_pages


def write_inputs(case, seed=0):
    """Draws a case: keyword arguments of its operation, as NumPy arrays.

    Every row writes to a different page, in random order; idle rows name invalid slots of different
    kinds. The pool contains some NaN, as unused memory may.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(case.pages).astype(np.int32)
    offsets = rng.integers(0, case.page_size, case.rows).astype(np.int32)
    # The first and the last slot of the pool, for rows that are not idle.
    for row, page, offset in ((0, 0, 0), (2 % case.rows, case.pages - 1, case.page_size - 1)):
        other = np.flatnonzero(order == page)[0]
        order[[row, other]] = order[[other, row]]
        offsets[row] = offset
    pages = order[: case.rows].copy()
    idle = np.arange(case.rows)[1 :: case.idle] if case.idle else ()
    for way, row in enumerate(idle):
        pages[row], offsets[row] = (
            (pages[row], -1),
            (case.pages, offsets[row]),
            (-1, offsets[row]),
            (pages[row], case.page_size),
            (case.pages + 1000, -7),
        )[way % 5]
    if case.idle == 1:
        offsets[0] = -1
    inputs = {"pages": pages, "offsets": offsets}
    for name in ("k", "v"):
        pool = rng.standard_normal((case.pages, case.page_size, case.head_dim))
        pool[rng.random(pool.shape[:2]) < 0.2] = np.nan
        inputs[f"{name}_pages"] = pool.astype(case.dtype)
        if not case.group:
            new = rng.standard_normal((case.rows, case.head_dim))
            inputs[f"{name}_new"] = new.astype(case.dtype)
        if case.scaled:
            for kind, shape in (("scales", pool.shape[:2]), ("new_scales", pages.shape)):
                inputs[f"{name}_{kind}"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    if case.group:
        heads = rng.standard_normal((case.rows, case.group + 2, case.head_dim))
        inputs["heads"] = heads.astype(case.dtype)
        angles = rng.uniform(-7, 7, (case.rows // case.row_heads, case.head_dim // 2))
        wide = np.float64 if case.dtype == "float64" else np.float32
        inputs["rotation"] = tuple(f(angles).astype(wide) for f in (np.cos, np.sin))
    return inputs


def rotation_oracle(case, inputs):
    """The queries and the key of each row after rotation, in float64, plane by plane."""
    turned = inputs["heads"][:, :-1].astype(np.float64)
    cos, sin = (x.astype(np.float64) for x in inputs["rotation"])
    half = case.head_dim // 2
    for row, heads in enumerate(turned):
        sequence = row // case.row_heads
        for head, x in enumerate(heads):
            gone = [dim for at, dim in case.zeroed if at == head]
            x[gone] = 0
            for i in range(half):
                plane = np.array(
                    [[cos[sequence, i], -sin[sequence, i]], [sin[sequence, i], cos[sequence, i]]]
                )
                x[[i, i + half]] = plane @ x[[i, i + half]]
            x[gone] = 0
    return turned


def assert_agrees(case, inputs, got):
    """Asserts that results are right, unrotated ones bit for bit.

    Rotated ones may have float32's error before rounding.
    """
    got = [np.asarray(x) for x in got]
    if not case.group:
        assert_same_bits(got, write_oracle(inputs))
        return
    turned = rotation_oracle(case, inputs)
    queries, k_pages, _ = got
    chex.assert_shape(queries, (case.rows, case.group, case.head_dim))
    assert queries.dtype == np.dtype(case.dtype)
    bits = {"bfloat16": 8, "float32": 23, "float64": 52}[case.dtype]
    close = dict(rtol=2.0**-bits, atol=2.0 ** -min(21, bits))
    chex.assert_trees_all_close(queries.astype(np.float64), turned[:, :-1], **close)
    # The oracle of the write gets the returned keys, which are compared separately.
    keys = turned[:, -1].astype(case.dtype)
    for row, at in enumerate(zip(inputs["pages"], inputs["offsets"], strict=True)):
        if 0 <= at[0] < case.pages and 0 <= at[1] < case.page_size:
            keys[row] = k_pages[at]
    chex.assert_trees_all_close(keys.astype(np.float64), turned[:, -1], **close)
    for gone in case.zeroed:
        chex.assert_trees_all_equal(
            np.concatenate([queries, keys[:, None]], 1)[:, gone[0], gone[1]].astype(np.float64),
            np.zeros(case.rows),
        )
    new = {"k_new": keys, "v_new": inputs["heads"][:, -1]}
    assert_same_bits(got[1:], write_oracle(inputs | new))


def write_oracle(inputs):
    """The arrays after the write, slot by slot."""
    num_pages, page_size = inputs["k_pages"].shape[:2]
    results = []
    for kind, new in (("pages", "new"), ("scales", "new_scales")):
        for name in ("k", "v"):
            if f"{name}_{kind}" not in inputs:
                continue
            after = inputs[f"{name}_{kind}"].copy()
            for row, (page, offset) in enumerate(
                zip(inputs["pages"], inputs["offsets"], strict=True)
            ):
                if 0 <= page < num_pages and 0 <= offset < page_size:
                    after[page, offset] = inputs[f"{name}_{new}"][row]
            results.append(after)
    return results


def assert_same_bits(got, want):
    """Asserts that arrays are equal, including the bits of NaN."""
    got, want = [np.asarray(x) for x in got], list(want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    bits = [[x.view(f"uint{8 * x.dtype.itemsize}") for x in arrays] for arrays in (got, want)]
    chex.assert_trees_all_equal(*bits)


def assert_rounded_alike(got, want):
    """Asserts that arrays, also NaN, are equal up to the last bit, in which compilers differ."""
    for one, other in zip(got, want, strict=True):
        dtype = np.asarray(one).dtype
        chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
        eps = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        chex.assert_trees_all_close(one, other, rtol=eps, atol=4 * eps if eps < 0.05 else 0)


def write_structs(case, sharding=None):
    """Shapes and dtypes of a case's inputs."""

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    pool = (case.pages, case.page_size, case.head_dim)
    shapes = {name: struct((case.rows,), np.int32) for name in ("pages", "offsets")}
    for name in ("k", "v"):
        shapes[f"{name}_pages"] = struct(pool, case.dtype)
        if not case.group:
            shapes[f"{name}_new"] = struct((case.rows, case.head_dim), case.dtype)
        if case.scaled:
            shapes[f"{name}_scales"] = struct(pool[:2], np.float32)
            shapes[f"{name}_new_scales"] = struct((case.rows,), np.float32)
    if case.group:
        shapes["heads"] = struct((case.rows, case.group + 2, case.head_dim), case.dtype)
        angles = struct((case.rows // case.row_heads, case.head_dim // 2), np.float32)
        shapes["rotation"] = angles, angles
    return shapes


def operands(inputs):
    """Converts the arguments of an operation to those of an implementation."""
    pages = [f"{name}_{kind}" for kind in ("pages", "scales") for name in ("k", "v")]
    if "heads" in inputs:
        new = (inputs["heads"],)
    else:
        new = tuple(
            _stacked(inputs[f"k_{kind}"], inputs[f"v_{kind}"])
            for kind in ("new", "new_scales")
            if f"k_{kind}" in inputs
        )
    pool = tuple(inputs[key] for key in pages if key in inputs)
    return pool, new, inputs["pages"], inputs["offsets"], inputs.get("rotation")


def _stacked(keys, values):
    if isinstance(keys, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda *each: jnp.stack(each, axis=1), keys, values)
    return jnp.stack([keys, values], axis=1)
