"""Paged decode attention for Hopper GPUs, in Pallas Mosaic GPU.

A program walks its stretch of the line of tiles (see `plan`). One warpgroup copies pages into a
ring buffer in shared memory, one computes, and one converts the values of float8 pages for it (see
`copying`). Keys are the 64-row operand of the matrix unit and the G query heads its columns, so
heads need not be padded to 64 rows:

    S^T [tile, N] = K [tile, D] Q^T [D, N]          N = 8 or 16 columns, the first G of them used
    P^T = exp2(scale log2(e) S^T - m)               m: running maximum of each column
    O^T [D, N] = exp2(m_old - m) O^T + V^T [D, tile] P^T

Scales of float8 pages are factors on the scores and on P. For the latter m is the maximum of
scores plus log2 of the values' scales, so that P stays in the range of float16.

A row that one program reads whole is written directly to the result. For other rows the programs
write normalized partial results with their base-2 log-sum-exp, which `combine` merges.

Each program has one computing warpgroup, because reductions over rows of an accumulator go through
scratch memory that all warpgroups of a program share.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.copying import convert_rows, copy_rows
from pallas_kernels.decode.operands import (
    matmul,
    multiply_keys,
    per_column,
    prepare_values,
    swizzled,
    value_operands,
)
from pallas_kernels.decode.plan import walk_rows
from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import CONVERTED, LEAST_SCALE, LOG2_E, LOWEST, Spec
from pallas_kernels.stores import store

_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_PER_SLOT = plgpu.Layout.WGMMA.reduce(1)
_COMPUTE, _COPY, _CONVERT = 0, 1, 2


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


def _compute_rows(spec: Spec, plan_refs, lengths_ref, outputs, smem, barriers):
    """Runs the computing warpgroup, which attends to the copied pages."""
    out_ref, lse_ref, partial_ref, partial_lse_ref, scores_ref = outputs
    q_smem, k_smem, v_smem, k_scales, v_scales, value_smem, p_smem, out_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free, c_full, c_free = barriers
    program = lax.axis_index("program")
    tile_shape = (spec.tile, spec.columns)

    for slot in range(spec.stages):
        plgpu.barrier_arrive(k_free.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
    for parity in range(2):
        plgpu.barrier_arrive(q_free.at[parity])
    if spec.scaled:
        for buffer in range(CONVERTED):
            plgpu.barrier_arrive(c_free.at[buffer])

    def slot_factor(scales, slot):
        factor = plgpu.load(scales.at[slot], layout=_PER_SLOT)
        return lax.broadcast_in_dim(factor, tile_shape, [0])

    def visit(row, lo, hi, length, whole, state):
        count, segment = state
        parity = lax.rem(segment, 2)
        plgpu.barrier_wait(q_full.at[parity])

        def step(i, carry):
            count, peak, total, blocks = carry
            slot = lax.rem(count, spec.stages)
            live = length - i * spec.tile

            plgpu.barrier_wait(k_full.at[slot])
            scores = multiply_keys(spec, k_smem.at[slot], q_smem.at[parity])
            scores = scores * (spec.scale * LOG2_E)
            if spec.scaled:
                scores = scores * slot_factor(k_scales, slot)
            if not spec.scaled:
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
            p_smem.transpose((1, 0))[...] = weights.astype(spec.operand)
            if spec.scaled:
                buffer = lax.rem(count, CONVERTED)
                values, free = value_smem.at[buffer], c_free.at[buffer]
                plgpu.commit_smem()
                # Threads have read the scales, and the copy engine writes the next ones;
                # `commit_smem` orders the two.
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                plgpu.barrier_wait(c_full.at[buffer])
            else:
                values, free = value_smem, v_free.at[slot]
                plgpu.barrier_wait(v_full.at[slot])
                prepare_values(spec, v_smem.at[slot], values, live)
                plgpu.commit_smem()
            operands = value_operands(spec, v_smem.at[slot], values)
            blocks = tuple(
                block * per_column(shrink, block.shape)
                + matmul(value.transpose((1, 0)), p_smem.transpose((1, 0)), block.shape)
                for block, value in zip(blocks, operands, strict=True)
            )
            plgpu.barrier_arrive(free)
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
      q: the operands that sum to the queries, [parts, R, G, D] (G padded to N when interpreted).
      rows: the rows that the queries attend to.
      interpret: parameters of the interpreter, for tests.

    Returns:
      See `Spec.results`.
    """
    page = (spec.stages, spec.tile, spec.head_dim)
    page_smem = plgpu.SMEM(
        page, spec.pages_dtype, transforms=swizzled(spec.head_dim, spec.pages_dtype)
    )
    operand = functools.partial(plgpu.SMEM, dtype=spec.operand)
    ring_barrier = plgpu.Barrier(
        num_arrivals=spec.pages_a_tile * spec.copies_a_page, num_barriers=spec.stages
    )
    free_barrier = plgpu.Barrier(num_barriers=spec.stages)
    # One warpgroup reads the values to convert, the other their scales.
    values_free = plgpu.Barrier(num_arrivals=1 + spec.scaled, num_barriers=spec.stages)
    converted = plgpu.Barrier(num_barriers=CONVERTED)
    scratch = {
        "q_smem": plgpu.SMEM(
            (2, spec.query_parts * spec.columns, spec.head_dim),
            spec.query,
            transforms=swizzled(spec.head_dim, spec.query),
        ),
        "k_smem": page_smem,
        "v_smem": page_smem,
        "p_smem": operand((spec.columns, spec.tile), transforms=swizzled(spec.tile, spec.operand)),
        "barriers": (
            plgpu.Barrier(num_arrivals=spec.query_parts, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            ring_barrier,
            free_barrier,
            ring_barrier,
            values_free,
            *((converted, converted) if spec.scaled else ()),
        ),
    }
    if not spec.transposed:
        scratch["out_smem"] = plgpu.SMEM((spec.columns, spec.head_dim), spec.dtype)
    if spec.stage_values:
        width = spec.blocks[0][1]
        shape = (len(spec.blocks), spec.tile, width)
        scratch["value_smem"] = operand(
            (CONVERTED, *shape) if spec.scaled else shape, transforms=swizzled(width, spec.operand)
        )
    if spec.scaled:
        factor = plgpu.SMEM((spec.stages, spec.tile), jnp.float32)
        scratch["k_scales_smem"] = scratch["v_scales_smem"] = factor

    def body(*refs, **memory):
        plan_refs, (lengths_ref, table_ref), refs = refs[:2], refs[2:4], refs[4:]
        inputs, outputs = refs[:-5], refs[-5:]
        ring = [memory["q_smem"], memory["k_smem"], memory["v_smem"]]
        factors = [memory.get("k_scales_smem"), memory.get("v_scales_smem")]
        work = [memory.get(name) for name in ("value_smem", "p_smem", "out_smem")]
        thread = lax.axis_index("thread")
        if interpret is None:
            # This kernel is launched while the previous one ends, and so is `combine`.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()

        barriers = memory["barriers"] if spec.scaled else (*memory["barriers"], None, None)

        @pl.when(thread == _COPY)
        def _():
            copy_rows(spec, plan_refs, lengths_ref, table_ref, inputs, [*ring, *factors], barriers)

        if spec.scaled:

            @pl.when(thread == _CONVERT)
            def _():
                values = memory["v_smem"], memory["value_smem"]
                convert_rows(spec, plan_refs, lengths_ref, *values, barriers)

        @pl.when(thread == _COMPUTE)
        def _():
            _compute_rows(spec, plan_refs, lengths_ref, outputs, [*ring, *factors, *work], barriers)

    kernel = plgpu.kernel(
        body,
        out_type=spec.results(rows.slots),
        scratch_types=scratch,
        grid=(spec.programs,),
        grid_names=("program",),
        num_threads=2 + spec.scaled,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_attention",
    )
    pages = (rows.k_pages, rows.v_pages, *rows.scales)
    return kernel(plan.tile_starts, plan.edge_rows, rows.lengths, rows.page_table, q, *pages)
