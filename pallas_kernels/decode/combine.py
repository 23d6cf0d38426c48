"""Merge the partial results of rows that several programs met (see `plan`), in place.

With partials o_i, normalised, and their base-2 log-sum-exp e_i:

    o = sum_i 2^(e_i - e) o_i,      e = log2 sum_i 2^(e_i)

One program serves one boundary between two stretches, if it is the first that cuts its row; all
others end at once. So the grid depends neither on the number of rows nor on their lengths, and a
row cut many times is merged by D / 64 programs, several partials at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.mosaic import per_column
from pallas_kernels.decode.plan import owner, stretch_start
from pallas_kernels.decode.spec import Spec

# Partials loaded together: enough to hide their latency, few enough for registers.
_AT_ONCE = 8
_BLOCK = 64


def combine(spec: Spec, plan, partials, partial_lse, result, lse, interpret=None):
    """Write merged rows into `result` (and base-2 lse, where the spec asks for it).

    Args:
      spec: the attention kernel's spec.
      plan: the split of its work.
      partials: [R + C, ., N] normalised O^T.
      partial_lse: [R + C, N].
      result: [R, G, D] or, transposed, [R, D, N]; rows of one program are kept.
      lse: [R, N]; likewise.
      interpret: parameters of the interpreter, for tests.

    Returns:
      The completed result and lse.
    """
    if spec.programs == 1:
        return result, lse
    parts = spec.out_rows // _BLOCK

    def body(
        tile_starts_ref,
        edge_rows_ref,
        partials_ref,
        partial_lse_ref,
        result_ref,
        lse_ref,
        **memory,
    ):
        program = lax.axis_index("boundary") + 1
        part = lax.axis_index("part")
        total = tile_starts_ref[spec.rows]
        row = jnp.minimum(edge_rows_ref[program], spec.rows - 1)
        boundary = stretch_start(total, program, spec.programs)
        before = stretch_start(total, program - 1, spec.programs)
        row_start, row_stop = tile_starts_ref[row], tile_starts_ref[row + 1]
        first_cut = (before <= row_start) & (row_start < boundary) & (boundary < row_stop)

        last = owner(total, row_stop - 1, spec.programs)
        first_slot = row + program - 1
        count = last - program + 2

        if interpret is None:
            # All above was read while the attention kernel ran.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()

        @pl.when(first_cut)
        def _merge():
            def step(i, carry):
                peak, weight, total = carry
                loaded = []
                for j in range(_AT_ONCE):
                    index = i * _AT_ONCE + j
                    slot = first_slot + jnp.minimum(index, count - 1)
                    absent = jnp.where(index < count, 0.0, -1e30).astype(jnp.float32)
                    e = plgpu.load(
                        partial_lse_ref.at[slot],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    value = plgpu.load(
                        partials_ref.at[slot, pl.ds(part * _BLOCK, _BLOCK)],
                        layout=plgpu.Layout.WGMMA,
                        optimized=False,
                    )
                    loaded.append((e + absent, value))
                new_peak = peak
                for e, _ in loaded:
                    new_peak = jnp.maximum(new_peak, e)
                shrink = jnp.exp2(peak - new_peak)
                weight = weight * shrink
                total = total * per_column(shrink, total.shape)
                for e, value in loaded:
                    factor = jnp.exp2(e - new_peak)
                    weight = weight + factor
                    total = total + value * per_column(factor, value.shape)
                return new_peak, weight, total

            def start(value, shape, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            vector, per_head = (spec.columns,), plgpu.Layout.WGMMA.reduce(0)
            peak, weight, merged = lax.fori_loop(
                0,
                (count + (_AT_ONCE - 1)) // _AT_ONCE,
                step,
                (
                    start(-1e30, vector, per_head),
                    start(0.0, vector, per_head),
                    start(0.0, (_BLOCK, spec.columns), plgpu.Layout.WGMMA),
                ),
            )
            merged = merged * per_column(1 / weight, merged.shape)
            if spec.transposed:
                result_ref[row, pl.ds(part * _BLOCK, _BLOCK)] = merged.astype(spec.dtype)
            else:
                staged = memory["staged"]
                staged.transpose((1, 0))[...] = merged.astype(spec.dtype)
                plgpu.commit_smem()
                columns = pl.ds(part * _BLOCK, _BLOCK)
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(0, spec.group)], result_ref.at[row, :, columns]
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if spec.return_lse:

                @pl.when(part == 0)
                def _lse():
                    lse_ref[row] = peak + jnp.log2(weight)

    staged = {}
    if not spec.transposed:
        staged["staged"] = plgpu.SMEM((spec.columns, _BLOCK), spec.dtype)
    result_ref, lse_ref = jax.new_ref(result), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=staged,
        grid=(spec.programs - 1, parts),
        grid_names=("boundary", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_combine",
    )(
        plan.tile_starts,
        plan.edge_rows,
        partials,
        partial_lse,
        result_ref,
        lse_ref,
    )
    return result_ref[...], lse_ref[...]
