"""Inputs and the NumPy oracle of the write of new keys and values."""

import chex
import jax
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np


def write_inputs(case, seed=0):
    """Draw a case: keyword arguments of `write_pages`, as NumPy arrays.

    Every row writes to a page of its own, in random order; idle rows name a slot that is none, each
    in another way. The pool holds NaN here and there, as unused memory may.
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
        new = rng.standard_normal((case.rows, case.head_dim))
        inputs |= {f"{name}_pages": pool.astype(case.dtype), f"{name}_new": new.astype(case.dtype)}
        if case.scaled:
            for kind, shape in (("scales", pool.shape[:2]), ("new_scales", pages.shape)):
                inputs[f"{name}_{kind}"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    return inputs


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
    """Asserts that arrays are equal, the bits of NaN included."""
    got, want = [np.asarray(x) for x in got], list(want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    bits = [[x.view(f"uint{8 * x.dtype.itemsize}") for x in arrays] for arrays in (got, want)]
    chex.assert_trees_all_equal(*bits)


def write_structs(case, sharding=None):
    """Shapes and dtypes of a case's inputs, with no arrays behind them."""

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    pool = (case.pages, case.page_size, case.head_dim)
    shapes = {name: struct((case.rows,), np.int32) for name in ("pages", "offsets")}
    for name in ("k", "v"):
        shapes[f"{name}_pages"] = struct(pool, case.dtype)
        shapes[f"{name}_new"] = struct((case.rows, case.head_dim), case.dtype)
        if case.scaled:
            shapes[f"{name}_scales"] = struct(pool[:2], np.float32)
            shapes[f"{name}_new_scales"] = struct((case.rows,), np.float32)
    return shapes


def operands(inputs):
    """The arguments of an implementation, from those of `write_pages`."""
    groups = []
    for names in (("pages", "scales"), ("new", "new_scales")):
        keys = [f"{name}_{kind}" for kind in names for name in ("k", "v")]
        groups.append(tuple(inputs[key] for key in keys if key in inputs))
    return *groups, inputs["pages"], inputs["offsets"]
