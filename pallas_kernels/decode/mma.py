"""Paged decode attention with the products of Ampere, which every later NVIDIA GPU has too.

It serves GPUs of other generations than Hopper, and on Hopper the shapes that the Hopper kernel
does not support. It uses the same plan and formulas (see `mosaic`), but moves data differently: a
single warpgroup holds the next tile's keys and values in registers while it computes on the current
tile, which it has written to shared memory. Several programs share a core, so that the loads of one
are in flight while another computes. It needs neither the copy engine nor barriers in memory.

Float8 pages are converted, and multiplied by their scales, on the way to shared memory.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.operands import per_column
from pallas_kernels.decode.plan import walk_rows
from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import LOG2_E, LOWEST, Spec, mma_operands
from pallas_kernels.mma import ACC, LHS, RHS, mma
from pallas_kernels.shared_memory import REDUCTION_BYTES
from pallas_kernels.stores import store

_PER_COLUMN = ACC.reduce(0)


def _swizzle(spec: Spec) -> int:
    """Returns the number of bytes of a page's row swizzled together in shared memory.

    A page passes through registers in tiles of 8 rows of this many bytes, split evenly over the
    four warps.
    """
    row = 2 * spec.head_dim
    whole = (s for s in (128, 64, 32) if row % s == 0 and spec.page_size // 8 * (row // s) % 4 == 0)
    return next(whole)


def _body(spec: Spec, refs, smem, interpret: bool):
    plan_refs, (lengths_ref, table_ref, q_ref, k_ref, v_ref), refs = refs[:2], refs[2:7], refs[7:]
    scale_refs, outputs = (refs[:-5] or (None, None)), refs[-5:]
    out_ref, lse_ref, partial_ref, partial_lse_ref, scores_ref = outputs
    q_smem, k_smem, v_smem, p_smem = smem
    program = lax.axis_index("program")
    tile_shape = (spec.tile, spec.columns)
    page_shape = (spec.page_size, spec.head_dim)
    copied = plgpu.Layout.SMEM_GMEM_COPY(page_shape, spec.dtype, _swizzle(spec))
    multiply = functools.partial(mma, interpret=interpret)

    def zeros(shape):
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)

    def load_tile(ref, scales_ref, pages):
        """Loads the pages of a tile, and their scales, into registers."""
        values = [plgpu.load(ref.at[page], layout=copied, optimized=False) for page in pages]
        if not spec.scaled:
            return values, []
        factors = [
            plgpu.load(scales_ref.at[page], layout=copied.reduce(1), optimized=False)
            for page in pages
        ]
        return values, factors

    def operands(tile):
        """Converts the pages of a tile to operands of products."""
        values, factors = tile
        if not spec.scaled:
            return values
        factors = [lax.broadcast_in_dim(factor, page_shape, [0]) for factor in factors]
        return [
            (page.astype(jnp.float32) * factor).astype(spec.dtype)
            for page, factor in zip(values, factors, strict=True)
        ]

    def write_pages(target, pages):
        for j, page in enumerate(pages):
            target[pl.ds(j * spec.page_size, spec.page_size)] = page

    def only_live(j, page, live):
        """Zeroes slots from `live` on: they may hold NaN, and 0 * NaN is NaN."""
        slot = plgpu.broadcasted_iota(jnp.int32, page_shape, 0, layout=copied)
        return jnp.where(slot < live - j * spec.page_size, page, jnp.zeros_like(page))

    def visit(row, lo, hi, length, whole, state):
        last_page = jnp.maximum(length - 1, 0) // spec.page_size

        def load(i):
            """Loads tile i; past the end of the row, its last page again."""
            first = i * spec.pages_a_tile
            pages = [
                jnp.clip(
                    table_ref[row, jnp.minimum(first + j, last_page)],
                    0,
                    min(k_ref.shape[0], v_ref.shape[0]) - 1,
                )
                for j in range(spec.pages_a_tile)
            ]
            return load_tile(k_ref, scale_refs[0], pages), load_tile(v_ref, scale_refs[1], pages)

        heads = plgpu.load(q_ref.at[row], layout=plgpu.Layout.WG_STRIDED(q_smem.shape, 2))
        q_smem[...] = heads
        queries = plgpu.load(q_smem.transpose((1, 0)), layout=RHS, optimized=False)

        def step(i, carry):
            (k_tile, v_tile), peak, total, blocks = carry
            live = length - i * spec.tile
            values = operands(v_tile)
            write_pages(k_smem, operands(k_tile))
            write_pages(v_smem, values)

            @pl.when(live < spec.tile)
            def _clear():
                write_pages(v_smem, [only_live(j, page, live) for j, page in enumerate(values)])

            following = load(i + 1)

            keys = plgpu.load(k_smem, layout=LHS)
            scores = multiply(zeros(tile_shape), keys, queries) * (spec.scale * LOG2_E)
            position = plgpu.broadcasted_iota(jnp.int32, tile_shape, 0, layout=ACC)
            scores = jnp.where(position < live, scores, jnp.full_like(scores, -jnp.inf))
            if spec.return_scores:
                store(scores_ref.at[row, pl.ds(i * spec.tile, spec.tile)], scores)

            new_peak = jnp.maximum(peak, scores.max(axis=0))
            weights = jnp.exp2(scores - per_column(new_peak, tile_shape))
            shrink = jnp.exp2(peak - new_peak)
            total = total * per_column(shrink, tile_shape) + weights
            store(p_smem, weights.astype(spec.dtype))
            weights = plgpu.load(p_smem, layout=RHS, optimized=False)
            blocks = tuple(
                multiply(
                    block * per_column(shrink, block.shape),
                    plgpu.load(v_smem.at[:, pl.ds(start, size)].transpose((1, 0)), layout=LHS),
                    weights,
                )
                for block, (start, size) in zip(blocks, spec.blocks, strict=True)
            )
            return following, new_peak, total, blocks

        _, peak, total, blocks = lax.fori_loop(
            lo,
            hi,
            step,
            (
                load(lo),
                plgpu.layout_cast(jnp.full((spec.columns,), LOWEST, jnp.float32), _PER_COLUMN),
                zeros(tile_shape),
                tuple(zeros((size, spec.columns)) for _, size in spec.blocks),
            ),
        )
        total = total.sum(axis=0)
        some = total > 0
        share = jnp.where(some, 1 / total, jnp.zeros_like(total))
        blocks = [block * per_column(share, block.shape) for block in blocks]
        lse = jnp.where(some, peak + jnp.log2(total), jnp.full_like(total, -jnp.inf))

        def write(target, lse_target, index):
            offset = 0
            for (_, size), block in zip(spec.blocks, blocks, strict=True):
                store(target.at[index, pl.ds(offset, size)], block.astype(target.dtype))
                offset += size
            store(lse_target.at[index], lse)

        @pl.when(whole)
        def _finish():
            write(out_ref, lse_ref, row)

        @pl.when(jnp.logical_not(whole))
        def _leave_partial():
            write(partial_ref, partial_lse_ref, row + program)

        return state

    walk_rows(plan_refs, lengths_ref, spec, visit, jnp.int32(0))


def attend(spec: Spec, plan, q, rows: Rows, interpret=None):
    """Runs the attention kernel.

    Args:
      spec: the static parameters.
      plan: the split of the work, with `spec.programs` programs.
      q: the queries, [R, N, D], with zeros from head G on.
      rows: the rows that the queries attend to.
      interpret: parameters of the interpreter, for tests.

    Returns:
      See `Spec.results`.
    """
    operand = functools.partial(plgpu.SMEM, dtype=spec.dtype)
    swizzle = _swizzle(spec)
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    queries, keys, values, weights = mma_operands(spec.tile, spec.head_dim, spec.columns)
    scratch = [
        operand(queries),
        operand(keys, transforms=transforms),
        operand(values, transforms=transforms),
        operand(weights),
    ]

    def body(*refs):
        _body(spec, refs[:-4], refs[-4:], interpret is not None)

    kernel = plgpu.kernel(
        body,
        out_type=spec.results(rows.slots),
        scratch_types=scratch,
        grid=(spec.programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=interpret,
        kernel_name="decode_attention_mma",
    )
    pages = (rows.k_pages, rows.v_pages, *rows.scales)
    return kernel(plan.tile_starts, plan.edge_rows, rows.lengths, rows.page_table, q, *pages)
