"""The supplying warpgroups of the Hopper decode kernel: one copies, one converts.

The first keeps the ring of pages full. For float8 pages, the second converts values to the matrix
unit's format, because the steps of the computing warpgroup are sequential.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.operands import prepare_values
from pallas_kernels.decode.plan import walk_rows
from pallas_kernels.decode.spec import CONVERTED, Spec


def copy_rows(spec: Spec, plan_refs, lengths_ref, table_ref, inputs, smem, barriers) -> None:
    """Runs the copying warpgroup.

    Args:
      spec: the static parameters.
      plan_refs: the arrays of the plan.
      lengths_ref: number of live slots of each row.
      table_ref: page numbers of each row.
      inputs: queries, pages of keys and of values, then their scales if there are any.
      smem: their buffers in shared memory.
      barriers: see `mosaic.attend`.
    """
    q_ref, k_ref, v_ref, *scale_refs = inputs
    q_smem, k_smem, v_smem, k_scales_smem, v_scales_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free, _, _ = barriers
    k_scales, v_scales = scale_refs or (None, None)

    def last_page(length):
        return jnp.maximum(length - 1, 0) // spec.page_size

    def pages_of(row, i, length):
        """Returns the page numbers of tile i; past the end of the row, its last page again."""
        first, last = i * spec.pages_a_tile, last_page(length)
        return tuple(table_ref[row, jnp.minimum(first + j, last)] for j in range(spec.pages_a_tile))

    def copy(pages, live, slot, values, scales, target, scales_target, full):
        """Copies the live pages of a tile; for other pages it only signals their arrivals."""

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

    def visit(row, lo, hi, length, whole, state):
        del whole
        count, segment = state
        parity = lax.rem(segment, 2)
        plgpu.barrier_wait(q_free.at[parity])
        for part in range(spec.query_parts):
            # The box is wider than the group; elements outside the array arrive as zeros.
            heads = q_ref.at[part, row, pl.ds(parity * 0, spec.columns)]
            plgpu.copy_gmem_to_smem(
                heads,
                q_smem.at[parity, pl.ds(part * spec.columns, spec.columns)],
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
    # Wait until every slot is free, so that no arrival stays unobserved.
    for slot in range(spec.stages):
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])
    for parity in range(2):
        plgpu.barrier_wait(q_free.at[parity])


def convert_rows(spec: Spec, plan_refs, lengths_ref, v_smem, value_smem, barriers) -> None:
    """Runs the converting warpgroup.

    Args:
      spec: the static parameters.
      plan_refs: the arrays of the plan.
      lengths_ref: number of live slots of each row.
      v_smem: the ring of pages of values.
      value_smem: the buffers of converted values.
      barriers: see `mosaic.attend`.
    """
    _, _, _, _, v_full, v_free, c_full, c_free = barriers
    for slot in range(spec.stages):
        plgpu.barrier_arrive(v_free.at[slot])

    def visit(row, lo, hi, length, whole, count):
        del row, whole

        def step(i, count):
            slot, buffer = lax.rem(count, spec.stages), lax.rem(count, CONVERTED)
            plgpu.barrier_wait(c_free.at[buffer])
            plgpu.barrier_wait(v_full.at[slot])
            live = length - i * spec.tile
            prepare_values(spec, v_smem.at[slot], value_smem.at[buffer], live)
            plgpu.commit_smem()
            plgpu.barrier_arrive(v_free.at[slot])
            plgpu.barrier_arrive(c_full.at[buffer])
            return count + 1

        return lax.fori_loop(lo, hi, step, count)

    walk_rows(plan_refs, lengths_ref, spec, visit, jnp.int32(0))
    for buffer in range(CONVERTED):
        plgpu.barrier_wait(c_free.at[buffer])
