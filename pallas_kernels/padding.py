"""Padding of one axis of an array."""

import jax
import jax.numpy as jnp


def pad_axis(x: jax.Array, axis: int, multiple: int, **mode) -> jax.Array:
    """Pads the end of an axis to a multiple; does nothing if its size is one already.

    Args:
      x: the array.
      axis: the axis to pad.
      multiple: the size becomes a multiple of this.
      **mode: options of `jax.numpy.pad`; the default is zeros.
    """
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, **mode) if widths[axis][1] else x
