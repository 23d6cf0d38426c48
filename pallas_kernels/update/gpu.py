"""The write of one slot of each row on NVIDIA GPUs, all arrays in one launch.

Latency is what counts, so each row has a program of its own. XLA needs a scatter for each array, in
which every element computes its own address. For 256 rows of 128 bfloat16 numbers on an H200
(`experiments/results/kernels/write.json`) the scatters of keys and values take 3.6 us, the Hopper
kernel and the stacking of keys and values 2.7 us, the Triton kernel and the stacking 2.5 us.

The kernels' modules are imported when a call is traced: Pallas for GPUs takes as long to import as
jax itself.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import target_gpu, triton_lacks
from pallas_kernels.four_bits import PACKED
from pallas_kernels.update.reference import is_slot

_WARPGROUP = 128


def _why_no_kernel(pages) -> str | None:
    """Returns why no GPU kernel can serve a call, or None."""
    if any(x is not None and x.dtype.itemsize > 4 for x in pages):
        return f"writes numbers of at most 32 bits, not {pages[0].dtype}"
    if pages[0].dtype == PACKED:
        return "does not write pages of 4 bits"
    return None


def why_not_mosaic(pages, new, page, offset) -> str | None:
    """Returns why the Hopper kernel cannot serve a call, or None."""
    del new, page, offset
    gpu = target_gpu()
    head_dim = pages[0].shape[2]
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), {gpu.kind} has {gpu.capability}"
    if head_dim % _WARPGROUP:
        return f"serves head dims that are multiples of {_WARPGROUP}, not {head_dim}"
    return _why_no_kernel(pages)


def why_not_triton(pages, new, page, offset) -> str | None:
    """Returns why the Triton kernel cannot serve a call, or None."""
    del new, page, offset
    head_dim = pages[0].shape[2]
    if head_dim & (head_dim - 1):
        return f"serves head dims that are powers of two, not {head_dim}"
    return triton_lacks(target_gpu(), *pages) or _why_no_kernel(pages)


def _stacked(new):
    """Stacks keys and values into one array, and their scales into another.

    XLA then computes both, a rotation and a slice, in one kernel.
    """
    return [jnp.stack(new[i : i + 2]) for i in range(0, len(new), 2)]


def mosaic(pages, new, page, offset, *, interpret=None):
    """Computes `write_pages` on Hopper GPUs; returns the arrays of the pool."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    new = _stacked(new)

    def body(page_ref, offset_ref, *refs):
        sources, targets = refs[: len(new)], refs[len(new) :]
        row = lax.axis_index("row")
        if interpret is None:
            # This kernel is launched while the one before it ends, and so will the next one be.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        page, offset = page_ref[row], offset_ref[row]

        def read(source, i):
            if source.ndim == 2:
                return source[i, row]
            return plgpu.load(
                source.at[i, row], layout=plgpu.Layout.WG_STRIDED(source.shape[2:], 1)
            )

        @pl.when(is_slot(page, offset, targets))
        def _():
            values = [read(source, i) for source in sources for i in range(2)]
            for target, value in zip(targets, values, strict=True):
                target[page, offset] = value

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


def triton(pages, new, page, offset, *, interpret=False):
    """Computes `write_pages` with the Triton kernel; returns the arrays of the pool."""
    from jax.experimental.pallas import triton as plt

    new = _stacked(new)

    def kernel(page_ref, offset_ref, *refs):
        sources, targets = refs[: len(new)], refs[len(new) + len(pages) :]
        row = pl.program_id(0)
        page, offset = page_ref[row], offset_ref[row]

        @pl.when(is_slot(page, offset, targets))
        def _():
            values = [source[i, row] for source in sources for i in range(2)]
            for target, value in zip(targets, values, strict=True):
                target[page, offset] = value

    return tuple(
        pl.pallas_call(
            kernel,
            grid=page.shape,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
            input_output_aliases={2 + len(new) + i: i for i in range(len(pages))},
            compiler_params=plt.CompilerParams(num_warps=1),
            interpret=interpret,
            name="write_pages_triton",
        )(page, offset, *new, *pages)
    )
