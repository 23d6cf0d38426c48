"""Merges the partial results of rows that several programs share (see `plan`), in place.

With normalized partial results o_i and their base-2 log-sum-exp e_i:

    o = sum_i 2^(e_i - e) o_i,      e = log2 sum_i 2^(e_i)

One program handles one boundary between two stretches, if it is the first to cut its row; other
programs end at once. So the grid depends neither on the number of rows nor on their lengths. D / 64
programs merge a row that is cut many times, several partial results at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.operands import per_column
from pallas_kernels.decode.plan import owner, stretch_start
from pallas_kernels.decode.spec import LOWEST, Spec
from pallas_kernels.stores import store

# Partial results loaded together: enough to hide latency, few enough for the registers.
_AT_ONCE = 8
# Warpgroups that share the partial results of a row, if rows are cut at least this many times.
_THREADS, _MANY_CUTS = 4, 8
_BLOCK = 64
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def _add(sums, items):
    """Adds items to sums; each is (exponent, weight, value) relative to 2^exponent."""
    peak, weight, total = sums
    new_peak = peak
    for e, _, _ in items:
        new_peak = jnp.maximum(new_peak, e)
    shrink = jnp.exp2(peak - new_peak)
    weight = weight * shrink
    total = total * per_column(shrink, total.shape)
    for e, item_weight, value in items:
        factor = jnp.exp2(e - new_peak)
        weight = weight + item_weight * factor
        total = total + value * per_column(factor, value.shape)
    return new_peak, weight, total


def combine(spec: Spec, plan, partials, partial_lse, result, lse, interpret=None):
    """Writes merged rows into `result`, and into `lse` if the spec requests it.

    Args:
      spec: the static parameters of the attention kernel.
      plan: the split of its work.
      partials: normalized partial results O^T, [R + C, out_rows, N].
      partial_lse: their base-2 log-sum-exp, [R + C, N].
      result: [R, G, D] or, transposed, [R, out_rows, N]; rows that one program read are kept.
      lse: base-2 log-sum-exp [R, N]; rows that one program read are kept.
      interpret: parameters of the interpreter, for tests.

    Returns:
      The completed result and lse.
    """
    if spec.programs == 1:
        return result, lse
    parts = spec.out_rows // _BLOCK
    threads = _THREADS if spec.copies and spec.rows * _MANY_CUTS <= spec.programs else 1

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
        thread = lax.axis_index("thread")
        total = tile_starts_ref[spec.rows]
        row = jnp.minimum(edge_rows_ref[program], spec.rows - 1)
        boundary = stretch_start(total, program, spec.programs)
        before = stretch_start(total, program - 1, spec.programs)
        row_start, row_stop = tile_starts_ref[row], tile_starts_ref[row + 1]
        first_cut = (before <= row_start) & (row_start < boundary) & (boundary < row_stop)

        last = owner(total, row_stop - 1, spec.programs)
        first_slot = row + program - 1
        count = last - program + 2

        if interpret is None and spec.copies:
            # Everything above is read while the attention kernel runs.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()

        def finish(sums):
            peak, weight, merged = sums
            merged = merged * per_column(1 / weight, merged.shape)
            if spec.transposed:
                store(result_ref.at[row, pl.ds(part * _BLOCK, _BLOCK)], merged.astype(spec.dtype))
            else:
                staged = memory["staged"]
                store(staged.transpose((1, 0)), merged.astype(spec.dtype))
                plgpu.commit_smem()
                columns = pl.ds(part * _BLOCK, _BLOCK)
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(0, spec.group)], result_ref.at[row, :, columns]
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if spec.return_lse:

                @pl.when(part == 0)
                def _lse():
                    store(lse_ref.at[row], peak + jnp.log2(weight))

        @pl.when(first_cut)
        def _merge():
            chunks = (count + (_AT_ONCE - 1)) // _AT_ONCE

            def step(k, carry):
                return _add(carry, [partial(k * threads + thread, j) for j in range(_AT_ONCE)])

            def partial(chunk, j):
                index = chunk * _AT_ONCE + j
                slot = first_slot + jnp.minimum(index, count - 1)
                e = plgpu.load(partial_lse_ref.at[slot], layout=_PER_COLUMN, optimized=False)
                block = partials_ref.at[slot, pl.ds(part * _BLOCK, _BLOCK)]
                value = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
                absent = jnp.where(index < count, 0.0, LOWEST).astype(jnp.float32)
                return e + absent, jnp.ones_like(e), value

            def start(value, shape, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            vector = (spec.columns,)
            sums = lax.fori_loop(
                0,
                (chunks - thread + (threads - 1)) // threads,
                step,
                (
                    start(LOWEST, vector, _PER_COLUMN),
                    start(0.0, vector, _PER_COLUMN),
                    start(0.0, (_BLOCK, spec.columns), plgpu.Layout.WGMMA),
                ),
            )
            if threads == 1:
                finish(sums)
                return

            @pl.when(thread > 0)
            def _leave_sums():
                vectors, blocks = memory["vectors"], memory["blocks"]
                store(vectors.at[thread - 1, 0], sums[0])
                store(vectors.at[thread - 1, 1], sums[1])
                store(blocks.at[thread - 1], sums[2])
                plgpu.barrier_arrive(memory["left"])

            @pl.when(thread == 0)
            def _take_sums():
                plgpu.barrier_wait(memory["left"])
                vectors, blocks = memory["vectors"], memory["blocks"]
                others = [
                    (
                        plgpu.load(vectors.at[other, 0], layout=_PER_COLUMN, optimized=False),
                        plgpu.load(vectors.at[other, 1], layout=_PER_COLUMN, optimized=False),
                        plgpu.load(blocks.at[other], layout=plgpu.Layout.WGMMA, optimized=False),
                    )
                    for other in range(threads - 1)
                ]
                finish(_add(sums, others))

    scratch = {}
    if threads > 1:
        scratch["left"] = plgpu.Barrier(num_arrivals=threads - 1)
        scratch["vectors"] = plgpu.SMEM((threads - 1, 2, spec.columns), jnp.float32)
        scratch["blocks"] = plgpu.SMEM((threads - 1, _BLOCK, spec.columns), jnp.float32)
    if not spec.transposed:
        scratch["staged"] = plgpu.SMEM((spec.columns, _BLOCK), spec.dtype)
    # XLA may fuse a kernel with slices of its operands, or with the update of a slice by its
    # result, and then loses the aliasing for in-place writes. The barriers prevent this.
    tile_starts, edge_rows, result, lse = lax.optimization_barrier(
        (plan.tile_starts, plan.edge_rows, result, lse)
    )
    result_ref, lse_ref = jax.new_ref(result), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=scratch,
        grid=(spec.programs - 1, parts),
        grid_names=("boundary", "part"),
        num_threads=threads,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_combine",
    )(tile_starts, edge_rows, partials, partial_lse, result_ref, lse_ref)
    return lax.optimization_barrier((result_ref[...], lse_ref[...]))
