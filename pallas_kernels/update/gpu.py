"""The write of one slot of each row on NVIDIA GPUs, all arrays in one launch.

Latency is what counts, so each row has a program of its own. XLA needs a scatter for each array, in
which every element computes its own address. For 256 rows of 128 bfloat16 numbers on an H200
(`experiments/results/kernels/write.json`) the scatters of keys and values take 3.6 us, the kernel
and the stacking of keys and values 2.7 us.

The kernel's module is imported when a call is traced: Pallas for GPUs takes as long to import as
jax itself.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import mosaic_lacks, target_gpu
from pallas_kernels.four_bits import PACKED
from pallas_kernels.update.reference import is_slot

_WARPGROUP = 128
# Numbers of a row that is no multiple of a warpgroup come in multiples of these.
_COLUMNS = 8


def why_not(pages, new, page, offset) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    del page, offset
    head_dim = pages[0].shape[2]
    if head_dim % _COLUMNS:
        return f"serves head dims that are multiples of {_COLUMNS}, not {head_dim}"
    if any(x is not None and x.dtype.itemsize > 4 for x in pages):
        return f"writes numbers of at most 32 bits, not {pages[0].dtype}"
    if pages[0].dtype == PACKED:
        return "does not write pages of 4 bits"
    for old, its_new in zip(pages, new, strict=True):
        if old.dtype != its_new.dtype:
            return f"does not convert scales of {its_new.dtype} to {old.dtype}"
    return mosaic_lacks(target_gpu())


def _stacked(new):
    """Stacks keys and values into one array, and their scales into another.

    XLA then computes both, a rotation and a slice, in one kernel.
    """
    return [jnp.stack(new[i : i + 2]) for i in range(0, len(new), 2)]


def mosaic(pages, new, page, offset, *, interpret=None):
    """Computes `write_pages` with the kernel; returns the arrays of the pool."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.stores import store

    new = _stacked(new)

    def body(page_ref, offset_ref, *refs):
        sources, targets = refs[: len(new)], refs[len(new) :]
        row = lax.axis_index("row")
        if interpret is None and target_gpu().capability >= (9, 0):
            # This kernel is launched while the one before it ends, and so will the next one be.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        page, offset = page_ref[row], offset_ref[row]

        def read(source, i):
            if source.ndim == 2:
                return source[i, row]
            if source.shape[2] % _WARPGROUP:
                # Every warp holds the whole row, and all write the same.
                layout = plgpu.Layout.WGMMA.reduce(0)
                return plgpu.load(source.at[i, row], layout=layout, optimized=False)
            layout = plgpu.Layout.WG_STRIDED(source.shape[2:], 1)
            return plgpu.load(source.at[i, row], layout=layout)

        @pl.when(is_slot(page, offset, targets))
        def _():
            values = [read(source, i) for source in sources for i in range(2)]
            for target, value in zip(targets, values, strict=True):
                store(target.at[page, offset], value)

    # XLA may fuse a kernel with slices of its operands, and then loses the aliasing by which it
    # writes in place.
    page, offset, *new = lax.optimization_barrier((page, offset, *new))
    targets = [jax.new_ref(x) for x in lax.optimization_barrier(tuple(pages))]
    plgpu.kernel(
        body,
        out_type=(),
        grid=page.shape,
        grid_names=("row",),
        interpret=interpret,
        kernel_name="write_pages",
    )(page, offset, *new, *targets)
    return lax.optimization_barrier(tuple(target[...] for target in targets))
