"""Paged decode attention for Hopper GPUs, in Pallas's Mosaic GPU form.

A program walks its stretch of the line of tiles (see `plan`). One warpgroup copies pages into a
ring buffer in shared memory, one computes. Keys are the 64-row operand of the matrix unit and the G
query heads its columns, so that no arithmetic is spent on padding the heads to 64 rows:

    S^T [tile, N] = K [tile, D] Q^T [D, N]          N = 8 or 16 columns, the first G of them used
    P^T = exp2(scale log2(e) S^T - m)               m: running maximum of each column
    O^T [D, N] = exp2(m_old - m) O^T + V^T [D, tile] P^T

Scales of float8 pages are factors on the scores and on P. For the latter m is the maximum of
scores plus log2 of the values' scales, so that P stays in the range of float16.

A row that one program reads whole is written to the result at once. Of other rows the programs
leave normalized partial results with their base-2 log-sum-exp, which `combine` merges.

Each program has one computing warpgroup, because reductions over rows of an accumulator go through
scratch memory that all warpgroups of a program share.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.operands import (
    key_pairs,
    matmul,
    per_column,
    prepare_values,
    store_weights,
    swizzled,
    value_pairs,
)
from pallas_kernels.decode.plan import stretch_start
from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import LEAST_SCALE, LOG2_E, LOWEST, Spec
from pallas_kernels.stores import store

_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_PER_SLOT = plgpu.Layout.WGMMA.reduce(1)
_COMPUTE, _COPY = 0, 1


def write_result(spec: Spec, out_ref, out_smem, row, blocks) -> None:
    """Writes the blocks of O^T of a row to the result."""
    if spec.transposed:
        offset = 0
        for (_, size), block in zip(spec.blocks, blocks, strict=True):
            store(out_ref.at[row, pl.ds(offset, size)], block.astype(spec.dtype))
            offset += size
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    store(out_smem.transpose((1, 0)), blocks[0].astype(spec.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, spec.group)], out_ref.at[row])


def walk_rows(plan_refs, lengths_ref, spec: Spec, visit, start_state):
    """Visits the rows of this program's stretch in order.

    Calls `visit(row, lo, hi, length, whole, state) -> state` where [lo, hi) are the row's live
    tiles in this stretch, and `whole` says that no other program reads the row. The start, the end
    and the length of a row are loaded one row ahead.
    """
    tile_starts_ref, edge_rows_ref = plan_refs
    program = lax.axis_index("program")
    total = tile_starts_ref[spec.rows]
    first_row, last_row = edge_rows_ref[program], edge_rows_ref[spec.programs + program]
    start = stretch_start(total, program, spec.programs)
    stop = stretch_start(total, program + 1, spec.programs)

    def bounds(row):
        row = jnp.minimum(row, spec.rows - 1)
        return tile_starts_ref[row], tile_starts_ref[row + 1], lengths_ref[row]

    def step(row, carry):
        (row_start, row_stop, length), state = carry
        following = bounds(row + 1)
        lo = jnp.maximum(start, row_start) - row_start
        hi = jnp.minimum(stop, row_stop) - row_start
        whole = (lo == 0) & (hi == row_stop - row_start)
        live = (length + (spec.tile - 1)) // spec.tile
        state = visit(row, lo, jnp.minimum(hi, live), length, whole, state)
        return following, state

    _, state = lax.fori_loop(first_row, last_row + 1, step, (bounds(first_row), start_state))
    return state


def _copy_rows(spec: Spec, plan_refs, lengths_ref, table_ref, inputs, smem, barriers):
    """Runs the copying warpgroup, which keeps the ring buffer full."""
    q_ref, k_ref, v_ref, *scale_refs = inputs
    q_smem, k_smem, v_smem, *scale_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers

    def last_page(length):
        return jnp.maximum(length - 1, 0) // spec.page_size

    def pages_of(row, i, length):
        """Returns the page numbers of tile i; past the end of the row, its last page again."""
        first, last = i * spec.pages_a_tile, last_page(length)
        return tuple(table_ref[row, jnp.minimum(first + j, last)] for j in range(spec.pages_a_tile))

    def copy(pages, live, slot, values, scales, target, scales_target, full):
        """Copies the live pages of a tile; for the others it only makes their arrivals."""

        def copy_page(j, page):
            part = pl.ds(j * spec.page_size, spec.page_size)
            plgpu.copy_gmem_to_smem(values.at[page], target.at[slot, part], full.at[slot])
            if spec.scaled:
                plgpu.copy_gmem_to_smem(
                    scales.at[page], scales_target.at[slot, part], full.at[slot]
                )

        copy_page(0, pages[0])
        for j, page in enumerate(pages[1:], start=1):

            @pl.when(j < live)
            def _(j=j, page=page):
                copy_page(j, page)

            @pl.when(j >= live)
            def _():
                for _ in range(spec.copies_a_page):
                    plgpu.barrier_arrive(full.at[slot])

    k_scales, v_scales = scale_refs or (None, None)
    k_scales_smem, v_scales_smem = scale_smem or (None, None)

    def visit(row, lo, hi, length, whole, state):
        del whole
        count, segment = state
        parity = lax.rem(segment, 2)
        plgpu.barrier_wait(q_free.at[parity])
        for part in range(spec.parts):
            # The box is wider than the group; what is outside the array arrives as zeros.
            heads = q_ref.at[part, row, pl.ds(parity * 0, spec.columns)]
            plgpu.copy_gmem_to_smem(
                heads,
                q_smem.at[parity, part],
                q_full.at[parity],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )

        def step(i, carry):
            count, pages = carry
            slot = lax.rem(count, spec.stages)
            following = pages_of(row, i + 1, length)
            live = last_page(length) + 1 - i * spec.pages_a_tile
            plgpu.barrier_wait(k_free.at[slot])
            copy(pages, live, slot, k_ref, k_scales, k_smem, k_scales_smem, k_full)
            plgpu.barrier_wait(v_free.at[slot])
            copy(pages, live, slot, v_ref, v_scales, v_smem, v_scales_smem, v_full)
            return count + 1, following

        count, _ = lax.fori_loop(lo, hi, step, (count, pages_of(row, lo, length)))
        return count, segment + 1

    walk_rows(plan_refs, lengths_ref, spec, visit, (jnp.int32(0), jnp.int32(0)))
    # Wait until every slot is free, so that no arrival is left unobserved.
    for slot in range(spec.stages):
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])
    for parity in range(2):
        plgpu.barrier_wait(q_free.at[parity])


def _compute_rows(spec: Spec, plan_refs, lengths_ref, outputs, smem, barriers, interpreted: bool):
    """Runs the computing warpgroup, which attends to the copied pages."""
    out_ref, lse_ref, partial_ref, partial_lse_ref, scores_ref = outputs
    q_smem, k_smem, v_smem, k_scales, v_scales, key_smem, value_smem, p_smem, out_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    program = lax.axis_index("program")
    tile_shape = (spec.tile, spec.columns)

    for slot in range(spec.stages):
        plgpu.barrier_arrive(k_free.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
    for parity in range(2):
        plgpu.barrier_arrive(q_free.at[parity])

    def slot_factor(scales, slot):
        factor = plgpu.load(scales.at[slot], layout=_PER_SLOT)
        return lax.broadcast_in_dim(factor, tile_shape, [0])

    def visit(row, lo, hi, length, whole, state):
        count, segment = state
        parity = lax.rem(segment, 2)
        plgpu.barrier_wait(q_full.at[parity])
        queries = [q_smem.at[parity, part].transpose((1, 0)) for part in range(spec.parts)]

        def step(i, carry):
            count, peak, total, blocks = carry
            slot = lax.rem(count, spec.stages)
            live = length - i * spec.tile

            plgpu.barrier_wait(k_full.at[slot])
            pairs = key_pairs(spec, k_smem.at[slot], key_smem, queries)
            scores = matmul(pairs, tile_shape, interpreted) * (spec.scale * LOG2_E)
            if spec.scaled:
                scores = scores * slot_factor(k_scales, slot)
            plgpu.barrier_arrive(k_free.at[slot])
            position = plgpu.broadcasted_iota(jnp.int32, tile_shape, 0, layout=plgpu.Layout.WGMMA)
            read = position < live
            scores = jnp.where(read, scores, jnp.full_like(scores, -jnp.inf))
            if spec.return_scores:
                store(scores_ref.at[row, pl.ds(i * spec.tile, spec.tile)], scores)

            scaled = scores
            if spec.scaled:
                plgpu.barrier_wait(v_full.at[slot])
                factor = jnp.log2(slot_factor(v_scales, slot))
                scaled = scores + jnp.maximum(factor, LEAST_SCALE)
                scaled = jnp.where(read, scaled, jnp.full_like(scaled, -jnp.inf))
            new_peak = jnp.maximum(peak, scaled.max(axis=0))
            weights = jnp.exp2(scores - per_column(new_peak, tile_shape))
            shrink = jnp.exp2(peak - new_peak)
            total = total * per_column(shrink, tile_shape) + weights

            if spec.scaled:
                weights = jnp.exp2(scaled - per_column(new_peak, tile_shape))
            store_weights(spec, weights, p_smem)
            if not spec.scaled:
                plgpu.barrier_wait(v_full.at[slot])
            prepare_values(spec, v_smem.at[slot], value_smem, live)
            plgpu.commit_smem()
            products = value_pairs(spec, v_smem.at[slot], value_smem, p_smem)
            blocks = tuple(
                block * per_column(shrink, block.shape) + matmul(pairs, block.shape)
                for block, pairs in zip(blocks, products, strict=True)
            )
            plgpu.barrier_arrive(v_free.at[slot])
            return count + 1, new_peak, total, blocks

        wgmma = functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA)
        count, peak, total, blocks = lax.fori_loop(
            lo,
            hi,
            step,
            (
                count,
                plgpu.layout_cast(jnp.full((spec.columns,), LOWEST, jnp.float32), _PER_COLUMN),
                wgmma(jnp.zeros(tile_shape, jnp.float32)),
                tuple(
                    wgmma(jnp.zeros((size, spec.columns), jnp.float32)) for _, size in spec.blocks
                ),
            ),
        )
        plgpu.barrier_arrive(q_free.at[parity])

        total = total.sum(axis=0)
        some = total > 0
        share = jnp.where(some, 1 / total, jnp.zeros_like(total))
        blocks = [block * per_column(share, block.shape) for block in blocks]
        lse = jnp.where(some, peak + jnp.log2(total), jnp.full_like(total, -jnp.inf))

        @pl.when(whole)
        def _finish():
            write_result(spec, out_ref, out_smem, row, blocks)
            if spec.return_lse:
                store(lse_ref.at[row], lse)

        @pl.when(jnp.logical_not(whole))
        def _leave_partial():
            slot = row + program
            offset = 0
            for (_, size), block in zip(spec.blocks, blocks, strict=True):
                store(partial_ref.at[slot, pl.ds(offset, size)], block)
                offset += size
            store(partial_lse_ref.at[slot], lse)

        return count, segment + 1

    walk_rows(plan_refs, lengths_ref, spec, visit, (jnp.int32(0), jnp.int32(0)))
    if not spec.transposed:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def attend(spec: Spec, plan, q, rows: Rows, interpret=None):
    """Runs the attention kernel.

    Args:
      spec: the static parameters.
      plan: the split of the work, with `spec.programs` programs.
      q: the queries as a sum of operands, [parts, R, G, D] (G padded to N when interpreted).
      rows: the rows that the queries attend to.
      interpret: parameters of the interpreter, for tests.

    Returns:
      The result (of rows that one program reads whole; others are left unwritten), base-2 lse
      [R, N], partial results [R + C, out_rows, N], their base-2 lse [R + C, N], and base-2 scores
      [R, slots padded to whole tiles, N].
    """
    results = (spec.rows, spec.out_rows, spec.columns)
    if not spec.transposed:
        results = (spec.rows, spec.group, spec.head_dim)
    partials = spec.rows + spec.programs
    score_slots = -(-rows.slots // spec.tile) * spec.tile if spec.return_scores else 1
    score_rows = spec.rows if spec.return_scores else 1
    out_type = (
        jax.ShapeDtypeStruct(results, spec.dtype),
        jax.ShapeDtypeStruct((spec.rows, spec.columns), jnp.float32),
        jax.ShapeDtypeStruct((partials, spec.out_rows, spec.columns), jnp.float32),
        jax.ShapeDtypeStruct((partials, spec.columns), jnp.float32),
        jax.ShapeDtypeStruct((score_rows, score_slots, spec.columns), jnp.float32),
    )
    page = (spec.stages, spec.tile, spec.head_dim)
    page_smem = plgpu.SMEM(
        page, spec.pages_dtype, transforms=swizzled(spec.head_dim, spec.pages_dtype)
    )
    operand = functools.partial(plgpu.SMEM, dtype=spec.operand)
    head_transforms = swizzled(spec.head_dim, spec.operand)
    ring_barrier = plgpu.Barrier(
        num_arrivals=spec.pages_a_tile * spec.copies_a_page, num_barriers=spec.stages
    )
    free_barrier = plgpu.Barrier(num_barriers=spec.stages)
    scratch = {
        "q_smem": operand((2, spec.parts, spec.columns, spec.head_dim), transforms=head_transforms),
        "k_smem": page_smem,
        "v_smem": page_smem,
        "p_smem": operand(
            (spec.parts, spec.columns, spec.tile), transforms=swizzled(spec.tile, spec.operand)
        ),
        "barriers": (
            plgpu.Barrier(num_arrivals=spec.parts, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            ring_barrier,
            free_barrier,
            ring_barrier,
            free_barrier,
        ),
    }
    if not spec.transposed:
        scratch["out_smem"] = plgpu.SMEM((spec.columns, spec.head_dim), spec.dtype)
    if spec.stage_keys:
        scratch["key_smem"] = operand(
            (1, spec.parts, spec.tile, spec.head_dim), transforms=head_transforms
        )
    if spec.stage_values and not spec.share_stage:
        width = spec.blocks[0][1]
        scratch["value_smem"] = operand(
            (len(spec.blocks), spec.parts, spec.tile, width),
            transforms=swizzled(width, spec.operand),
        )
    if spec.scaled:
        factor = plgpu.SMEM((spec.stages, spec.tile), jnp.float32)
        scratch["k_scales_smem"] = scratch["v_scales_smem"] = factor

    def body(*refs, **memory):
        plan_refs, (lengths_ref, table_ref), refs = refs[:2], refs[2:4], refs[4:]
        inputs, outputs = refs[:-5], refs[-5:]
        ring = [memory["q_smem"], memory["k_smem"], memory["v_smem"]]
        factors = [memory.get("k_scales_smem"), memory.get("v_scales_smem")]
        if spec.share_stage:
            memory["value_smem"] = memory["key_smem"]
        work = [memory.get(name) for name in ("key_smem", "value_smem", "p_smem", "out_smem")]
        thread = lax.axis_index("thread")
        if interpret is None:
            # This kernel is launched while the one before it ends, and so will `combine` be.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()

        @pl.when(thread == _COPY)
        def _():
            copied = ring + (factors if spec.scaled else [])
            _copy_rows(spec, plan_refs, lengths_ref, table_ref, inputs, copied, memory["barriers"])

        @pl.when(thread == _COMPUTE)
        def _():
            smem, interpreted = ring + factors + work, interpret is not None
            _compute_rows(
                spec, plan_refs, lengths_ref, outputs, smem, memory["barriers"], interpreted
            )

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(spec.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_attention",
    )
    pages = (rows.k_pages, rows.v_pages, *rows.scales)
    return kernel(plan.tile_starts, plan.edge_rows, rows.lengths, rows.page_table, q, *pages)
