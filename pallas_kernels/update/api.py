"""`write_pages`: writes one new key and value of each row into its page, in place.

A decode step gives every row one new key and one new value. Both, and with quantized pages their
scales, are written in one launch; rows that write nothing cost nothing. `rotate_and_write` takes
the output of the projection, including the row's queries, and rotates keys and queries in the same
launch.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.update import gpu
from pallas_kernels.update.reference import Rotation, Zeroed, write_pages_xla

OPERATION = Operation(
    "write_pages",
    (
        Implementation("mosaic_gpu", "cuda", gpu.mosaic, gpu.why_not),
        deferred("mosaic_tpu", "tpu", "pallas_kernels.update.tpu", "write_pages_tpu"),
        Implementation("xla", None, write_pages_xla),
    ),
)
# The same kernels.
ROTATE = dataclasses.replace(OPERATION, name="rotate_and_write")


def write_pages(
    k_pages: Shaped[Array, "N P D"],
    v_pages: Shaped[Array, "NV P D"],
    k_new: Shaped[Array, "R D"],
    v_new: Shaped[Array, "R D"],
    pages: Int[Array, " R"],
    offsets: Int[Array, " R"],
    *,
    k_scales: Float[Array, "N P"] | None = None,
    v_scales: Float[Array, "N P"] | None = None,
    k_new_scales: Float[Array, " R"] | None = None,
    v_new_scales: Float[Array, " R"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Writes one slot of each row.

    The arrays of the pool are updated in place if the caller donates them or carries them through a
    loop.

    Args:
      k_pages: key pages of the pool.
      v_pages: value pages of the pool, of the same dtype.
      k_new: the new key of each row, of the pages' dtype.
      v_new: the new value of each row, of the pages' dtype.
      pages: the page that each row writes to. No two rows may write to the same page.
      offsets: the slot in that page, 0 to P - 1; negative for a row that writes nothing. A row
        whose page is not in the pool writes nothing either.
      k_scales: with float8 pages, the factor of each slot's key.
      v_scales: the same for each slot's value.
      k_new_scales: the same for each new key.
      v_new_scales: the same for each new value.
      implementation: "mosaic_gpu", "mosaic_tpu" or "xla"; None chooses the best one for the
        platform that the call is lowered for.

    Returns:
      (k_pages, v_pages), followed by k_scales and v_scales if there are any.

    Raises:
      ValueError: shapes or dtypes disagree, or an implementation is unknown.
      NotImplementedError: the implementation cannot serve the call.
    """
    old: tuple[Any, ...] = (k_pages, v_pages)
    new: tuple[Any, ...] = (k_new, v_new)
    scales, new_scales = (k_scales, v_scales), (k_new_scales, v_new_scales)
    _check(old, new, scales, new_scales, pages, offsets)
    # XLA then computes keys and values in one kernel.
    stacked = (jnp.stack(new, axis=1),)
    if k_new_scales is not None and v_new_scales is not None:
        old, stacked = old + scales, (*stacked, jnp.stack([k_new_scales, v_new_scales], axis=1))
    if pages.size == 0:
        return old
    at = pages.astype(jnp.int32), offsets.astype(jnp.int32)
    return OPERATION(implementation, old, stacked, *at, None, zeroed=())


def rotate_and_write(
    k_pages: Shaped[Array, "N P D"],
    v_pages: Shaped[Array, "NV P D"],
    heads: Shaped[Array, "R n D"],
    rotation: Rotation,
    pages: Int[Array, " R"],
    offsets: Int[Array, " R"],
    *,
    zeroed: Zeroed = (),
    implementation: str | None = None,
) -> tuple[Float[Array, "R G D"], Array, Array]:
    """Rotates the queries and the key of each row (RoPE), and writes its key and its value.

    On a GPU this is one launch. It reads `heads` in place, so pass the output of a projection that
    is ordered by row.

    Args:
      k_pages: key pages of the pool, of floating-point numbers and without scales.
      v_pages: value pages of the pool, of the same dtype.
      heads: the heads of each row's token, n = G + 2: its G queries, its key and its value, before
        rotation, of the pages' dtype.
      rotation: cos and sin [B, D/2] of the position of each sequence's token, in at least float32.
        R is a multiple of B, and the rows of a sequence are consecutive.
      pages: see `write_pages`.
      offsets: see `write_pages`. The queries of a row that writes nothing are rotated too.
      zeroed: numbers to zero before and after the rotation, each as (head, dimension) with head G
        for the key.
      implementation: see `write_pages`.

    Returns:
      (rotated queries, k_pages, v_pages).

    Raises:
      ValueError: as for `write_pages`; or the arguments of the rotation disagree.
      NotImplementedError: the implementation cannot serve the call.
    """
    old = k_pages, v_pages
    _check_rotation(old, heads, rotation, pages, offsets, zeroed)
    if pages.size == 0:
        return heads[:, :-2], *old
    at = pages.astype(jnp.int32), offsets.astype(jnp.int32)
    return ROTATE(implementation, old, (heads,), *at, rotation, zeroed=tuple(zeroed))


def _check_pool(fail, old, pages, offsets) -> None:
    """Refuses pages of different pools, and slots other than one per row."""
    k_pages, v_pages = old
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages)):
        if array.ndim != 3 or 0 in array.shape:
            fail(f"{name} must be [N, P, D] and not empty, has shape {array.shape}")
    if k_pages.shape[1:] != v_pages.shape[1:] or k_pages.dtype != v_pages.dtype:
        fail(
            f"pages of k_pages {k_pages.shape} {k_pages.dtype} and v_pages {v_pages.shape} "
            f"{v_pages.dtype} must have one shape and one dtype"
        )
    for name, array in (("pages", pages), ("offsets", offsets)):
        if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
            fail(f"{name} must be integers [R], is {array.dtype}{list(array.shape)}")
    if offsets.shape != pages.shape:
        fail(f"pages {pages.shape} and offsets {offsets.shape} must have the same rows")


def _check_rotation(old, heads, rotation, pages, offsets, zeroed) -> None:
    def fail(text):
        raise ValueError(f"rotate_and_write: {text}")

    _check_pool(fail, old, pages, offsets)
    k_pages, rows = old[0], pages.shape[0]
    head_dim = k_pages.shape[2]
    if not jnp.issubdtype(k_pages.dtype, jnp.floating) or k_pages.dtype.itemsize == 1:
        fail(f"keys are rotated before they are quantized; the pages are {k_pages.dtype}")
    if head_dim % 2:
        fail(f"a rotation needs an even head dim, not {head_dim}")
    count = heads.shape[1] if heads.ndim == 3 else 0
    if count < 3 or heads.shape != (rows, count, head_dim) or heads.dtype != k_pages.dtype:
        fail(
            f"heads must be {k_pages.dtype}[{rows}, G + 2, {head_dim}], are "
            f"{heads.dtype}{[*heads.shape]}"
        )
    cos, sin = rotation
    sequences = cos.shape[0] if cos.ndim else 0
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != (sequences, head_dim // 2) or array.dtype != cos.dtype:
            fail(f"{name} must be [B, {head_dim // 2}], is {array.dtype}{[*array.shape]}")
    wide = jnp.promote_types(k_pages.dtype, jnp.float32)
    if jnp.promote_types(cos.dtype, wide) != cos.dtype:
        fail(f"cos and sin must be at least {wide}, are {cos.dtype}")
    if rows and (not sequences or rows % sequences):
        fail(f"{rows} rows are not a multiple of the {sequences} sequences of the rotation")
    for head, dim in zeroed:
        if not (0 <= head <= count - 2 and 0 <= dim < head_dim):
            fail(f"zeroed has ({head}, {dim}), which does not fit the queries or the key")


def _check(old, new, scales, new_scales, pages, offsets) -> None:
    def fail(text):
        raise ValueError(f"write_pages: {text}")

    _check_pool(fail, old, pages, offsets)
    k_pages, v_pages = old
    wanted = (pages.shape[0], k_pages.shape[2])
    for name, array in zip(("k_new", "v_new"), new, strict=True):
        if array.shape != wanted or array.dtype != k_pages.dtype:
            fail(f"{name} must be {k_pages.dtype}{list(wanted)}, is {array.dtype}{[*array.shape]}")
    given = [x is not None for x in (*scales, *new_scales)]
    if any(given) != (k_pages.dtype.itemsize == 1) or any(given) != all(given):
        fail(f"scales of pages and of new entries belong to quantized pages, not {k_pages.dtype}")
    if any(given):
        for name, array, shape in (
            ("k_scales", scales[0], k_pages.shape[:2]),
            # If the values are in another pool, this one still holds their scales.
            ("v_scales", scales[1][: v_pages.shape[0]], v_pages.shape[:2]),
            ("k_new_scales", new_scales[0], pages.shape),
            ("v_new_scales", new_scales[1], pages.shape),
        ):
            if array.shape != shape:
                fail(f"{name} must have shape {shape}, has {array.shape}")
