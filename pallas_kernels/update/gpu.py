"""The write of one slot of each row on NVIDIA GPUs, all arrays in one launch.

Latency counts, so each row has its own program. XLA needs a scatter for each array, in which every
element computes its address. For 256 rows of 128 bfloat16 numbers on an H200
(`experiments/results/kernels/write.json`) the scatters of keys and values take 3.6 us, the kernel
and the stacking of keys and values 2.7 us.

With rotation, a program takes all heads of its row from the output of the projection, so nothing is
launched in between.

The kernel's module is imported when a call is traced, because Pallas for GPUs takes as long to
import as jax.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import mosaic_lacks, target_gpu
from pallas_kernels.rotation import rotate_halves
from pallas_kernels.update.reference import is_slot

_WARPGROUP, _WARP = 128, 32
# A vector that is no multiple of a warp must be a multiple of these.
_COLUMNS = 8


def why_not(pages, new, page, offset, rotation, **static) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    del page, offset, static
    head_dim = pages[0].shape[2]
    least = _COLUMNS if rotation is None else 2 * _COLUMNS
    if head_dim % least:
        return f"serves head dims that are multiples of {least}, not {head_dim}"
    if any(x.dtype.itemsize > 4 for x in pages):
        return f"writes numbers of at most 32 bits, not {pages[0].dtype}"
    for i, old in enumerate(pages):
        if old.dtype != new[i // 2].dtype:
            return f"does not convert scales of {new[i // 2].dtype} to {old.dtype}"
    if rotation is not None and rotation[0].dtype != jnp.float32:
        return f"rotates by angles in float32, not {rotation[0].dtype}"
    return mosaic_lacks(target_gpu())


def _in_a_warp(size):
    """Returns the layout of a vector replicated in every warp; all write the same."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if size % _WARP:
        return plgpu.Layout.WGMMA.reduce(0)
    each = next(n for n in (4, 2, 1) if size % (n * _WARP) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((each * _WARP,), (each,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def mosaic(pages, new, page, offset, rotation=None, *, zeroed=(), interpret=None):
    """Computes `write_pages` and `rotate_and_write` with the kernel; see `write_pages_xla`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.stores import store

    rows, count, head_dim = new[0].shape
    group, half = count - 2, head_dim // 2
    angles = [] if rotation is None else list(rotation)
    halves = pl.ds(0, half), pl.ds(half, half)

    def read(source, row, head):
        if source.ndim == 2:
            return source[row, head]
        if head_dim % _WARPGROUP:
            layout = _in_a_warp(head_dim)
            return plgpu.load(source.at[row, head], layout=layout, optimized=False)
        layout = plgpu.Layout.WG_STRIDED((head_dim,), 1)
        return plgpu.load(source.at[row, head], layout=layout)

    def read_half(ref):
        return plgpu.load(ref, layout=_in_a_warp(half), optimized=False)

    def cleared(head, side, x):
        """Applies `zeroed` to one half of a head."""
        for each, dim in zeroed:
            if (each, dim // half) == (head, side):
                index = plgpu.broadcasted_iota(jnp.int32, (half,), 0, layout=_in_a_warp(half))
                x = jnp.where(index == dim % half, jnp.zeros_like(x), x)
        return x

    def rotated(heads_ref, angle_refs, row):
        """Returns the halves of the row's queries and key, rotated."""
        # Do all loads before the first store, because the compiler cannot move them before it.
        heads = [
            [read_half(heads_ref.at[row, head, part]) for part in halves]
            for head in range(group + 1)
        ]
        sequence = lax.div(row, rows // angles[0].shape[0])
        cos, sin = (read_half(ref.at[sequence]) for ref in angle_refs)
        results = []
        for head, parts in enumerate(heads):
            first, second = (
                cleared(head, side, x).astype(jnp.float32) for side, x in enumerate(parts)
            )
            turned = rotate_halves(first, second, cos, sin)
            results.append(
                [cleared(head, side, x.astype(new[0].dtype)) for side, x in enumerate(turned)]
            )
        return results

    def store_halves(target, parts):
        for place, part in zip(halves, parts, strict=True):
            store(target.at[place], part)

    def body(page_ref, offset_ref, *refs):
        sources, refs = refs[: len(new)], refs[len(new) :]
        angle_refs, refs = refs[: len(angles)], refs[len(angles) :]
        targets, results = refs[: len(pages)], refs[len(pages) :]
        row = lax.axis_index("row")
        if interpret is None and target_gpu().capability >= (9, 0):
            # This kernel is launched while the previous one ends, and so is the next one.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        page, offset = page_ref[row], offset_ref[row]
        if rotation is None:

            @pl.when(is_slot(page, offset, targets))
            def _():
                values = [
                    read(source, row, source.shape[1] - 2 + i) for source in sources for i in (0, 1)
                ]
                for target, value in zip(targets, values, strict=True):
                    store(target.at[page, offset], value)

            return
        (heads_ref,), (k_pages, v_pages) = sources, targets
        value = read(heads_ref, row, count - 1)
        *queries, key = rotated(heads_ref, angle_refs, row)
        # Before the branch: inside it, loads would wait until the slot is known.
        for head, query in enumerate(queries):
            store_halves(results[0].at[row, head], query)

        @pl.when(is_slot(page, offset, targets))
        def _():
            store_halves(k_pages.at[page, offset], key)
            store(v_pages.at[page, offset], value)

    # XLA may fuse a kernel with slices of its operands, and then loses the aliasing for in-place
    # writes.
    page, offset, *operands = lax.optimization_barrier((page, offset, *new, *angles))
    targets = [jax.new_ref(x) for x in lax.optimization_barrier(tuple(pages))]
    queries = jax.ShapeDtypeStruct((rows, group, head_dim), new[0].dtype)
    results = plgpu.kernel(
        body,
        out_type=() if rotation is None else (queries,),
        grid=page.shape,
        grid_names=("row",),
        # No thread reads another thread's writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="write_pages",
    )(page, offset, *operands, *targets)
    return (*results, *lax.optimization_barrier(tuple(target[...] for target in targets)))
