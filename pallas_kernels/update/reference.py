"""The write of one slot of each row in plain XLA: a scatter into every array.

pages[page[r], offset[r]] = new[r]        for rows r whose slot is in the pool

With a rotation, a row's key and its queries are rotated first.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.rotation import rotate_halves

# cos and sin of the tokens' positions [B, D/2]; the rows of sequence b start at b R/B.
Rotation = tuple[Float[Array, "B half"], Float[Array, "B half"]]
# Zeroed numbers of a row's queries and key, each as (head, dimension).
Zeroed = tuple[tuple[int, int], ...]


def is_slot(page, offset, pages) -> Bool[Array, "*rows"]:
    """Returns whether a slot exists in each of these arrays."""
    num_pages = min(x.shape[0] for x in pages)
    page_size = pages[0].shape[1]
    return (page >= 0) & (page < num_pages) & (offset >= 0) & (offset < page_size)


def rotated(
    heads: Shaped[Array, "R n D"], rotation: Rotation | None, zeroed: Zeroed
) -> Shaped[Array, "R n D"]:
    """Rotates every head of a row but the last, its value, in at least float32.

    `zeroed` numbers are zeroed before and after the rotation.
    """
    if rotation is None:
        return heads
    wide = jnp.promote_types(heads.dtype, jnp.float32)
    turned, value = heads[:, :-1], heads[:, -1:]
    zero = np.zeros(turned.shape[1:], bool)
    zero[tuple(np.array(zeroed, int).reshape(-1, 2).T)] = True

    def cleared(x):
        return jnp.where(zero, jnp.zeros((), x.dtype), x) if zeroed else x

    first, second = jnp.split(cleared(turned).astype(wide), 2, axis=-1)
    repeats = len(heads) // len(rotation[0])
    cos, sin = (jnp.repeat(x.astype(wide), repeats, axis=0)[:, None] for x in rotation)
    turned = jnp.concatenate(rotate_halves(first, second, cos, sin), axis=-1)
    return jnp.concatenate([cleared(turned.astype(heads.dtype)), value], axis=1)


def write_pages_xla(
    pages: tuple[Shaped[Array, "..."], ...],
    new: tuple[Shaped[Array, "..."], ...],
    page: Int[Array, " R"],
    offset: Int[Array, " R"],
    rotation: Rotation | None = None,
    *,
    zeroed: Zeroed = (),
) -> tuple[Shaped[Array, "..."], ...]:
    """Computes `write_pages` and `rotate_and_write` in XLA.

    Args:
      pages: arrays to write to, [N, P, ...]: keys, values, and the scales of both if any.
      new: heads [R, n, D], the last two being each row's key and value, and their scales [R, 2,
        ...].
      page: page of each row.
      offset: slot of each row in its page.
      rotation: rotates all heads but the values; None to write heads unchanged.
      zeroed: see `rotated`.

    Returns:
      The queries (the heads before the last two) if there is a rotation, and the arrays of the
      pool.
    """
    heads = rotated(new[0], rotation, zeroed)
    # A scatter drops indices past the end, but takes -1 as the last page.
    written = is_slot(page, offset, pages)
    entries = [each[:, i] for each in (heads, *new[1:]) for i in (-2, -1)]
    results = tuple(
        x.at[jnp.where(written, page, x.shape[0]), offset].set(values, mode="drop")
        for x, values in zip(pages, entries, strict=True)
    )
    return results if rotation is None else (heads[:, :-2], *results)
