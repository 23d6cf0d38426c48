"""Paged decode attention in Pallas's Triton form, for NVIDIA GPUs before and after Hopper.

It follows the same plan as the Hopper kernel and checks it on the same card; GPUs of other
generations are served by it alone. A program takes its stretch of tiles page by page, with the G
query heads padded to 16 rows, the minimum of the matrix unit, and the online softmax of
FlashAttention. A row that one program reads whole is written to the result; of other rows the
programs leave partial results, which a second kernel merges.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode.plan import DecodePlan, owner, stretch_start
from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import LOG2_E, LOWEST

_HEADS = 16
# Number of partial results of a row that are merged at a time.
_AT_ONCE = 4


def column_blocks(head_dim: int) -> list[tuple[int, int]]:
    """Returns (start, size) of the powers of two that sum to D: 96 is 64 and 32."""
    blocks, start = [], 0
    while start < head_dim:
        size = 1 << ((head_dim - start).bit_length() - 1)
        blocks.append((start, size))
        start += size
    return blocks


def _head_rows(index, group):
    """Returns the rows of a flat [R * G, D] array that belong to row `index`, as a block of 16."""
    return pl.ds(index * group, _HEADS)


def _attend(*refs, group, programs, tile, scale, scaled, return_scores):
    tile_starts_ref, edge_rows_ref, lengths_ref, table_ref, q_ref, k_ref, v_ref, *refs = refs
    scale_refs, refs = (refs[:2], refs[2:]) if scaled else ((None, None), refs)
    out_ref, lse_ref, partial_ref, partial_lse_ref, scores_ref = refs
    program = pl.program_id(0)
    total_tiles = tile_starts_ref[tile_starts_ref.shape[0] - 1]
    start = stretch_start(total_tiles, program, programs)
    stop = stretch_start(total_tiles, program + 1, programs)
    dtype = q_ref.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    blocks, page_size = column_blocks(q_ref.shape[1]), k_ref.shape[1]
    heads = jnp.arange(_HEADS) < group
    pages_a_tile = tile // page_size
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32, precision=precision)

    def page_of(ref, scales_ref, page, where):
        values = ref[page, :, pl.ds(*where)]
        if scales_ref is None:
            return values
        return (values.astype(jnp.float32) * scales_ref[page][:, None]).astype(dtype)

    def row_step(row, _):
        row_start, row_stop = tile_starts_ref[row], tile_starts_ref[row + 1]
        length = lengths_ref[row]
        lo = jnp.maximum(start, row_start) - row_start
        hi = jnp.minimum(stop, row_stop) - row_start
        last_page = (length + (page_size - 1)) // page_size
        q = [q_ref[_head_rows(row, group), pl.ds(*where)] for where in blocks]

        def page_step(i, carry):
            peak, total, sums = carry
            page = table_ref[row, i]
            read = i * page_size + jnp.arange(page_size) < length
            s = sum(
                dot(part, page_of(k_ref, scale_refs[0], page, where).T)
                for part, where in zip(q, blocks, strict=True)
            ) * (scale * LOG2_E)
            s = jnp.where(read[None, :], s, -jnp.inf)
            if return_scores:
                plt.store(
                    scores_ref.at[row, :, pl.ds(i * page_size, page_size)],
                    s,
                    mask=jnp.broadcast_to(heads[:, None], s.shape),
                )
            new_peak = jnp.maximum(peak, s.max(axis=1))
            p = jnp.exp2(s - new_peak[:, None])
            shrink = jnp.exp2(peak - new_peak)
            values = [
                jnp.where(read[:, None], page_of(v_ref, scale_refs[1], page, where), 0)
                for where in blocks
            ]
            sums = tuple(
                acc * shrink[:, None] + dot(p.astype(dtype), value.astype(dtype))
                for acc, value in zip(sums, values, strict=True)
            )
            return new_peak, total * shrink + p.sum(axis=1), sums

        peak, total, sums = lax.fori_loop(
            lo * pages_a_tile,
            jnp.minimum(hi * pages_a_tile, last_page),
            page_step,
            (
                jnp.full((_HEADS,), LOWEST, jnp.float32),
                jnp.zeros((_HEADS,), jnp.float32),
                tuple(jnp.zeros((_HEADS, size), jnp.float32) for _, size in blocks),
            ),
        )
        share = jnp.where(total > 0, 1 / total, 0)
        lse = jnp.where(total > 0, peak + jnp.log2(total), -jnp.inf)
        whole = (lo == 0) & (hi == row_stop - row_start)

        def write(target, lse_target, index):
            rows = _head_rows(index, group)
            for where, acc in zip(blocks, sums, strict=True):
                value = (acc * share[:, None]).astype(target.dtype)
                mask = jnp.broadcast_to(heads[:, None], value.shape)
                plt.store(target.at[rows, pl.ds(*where)], value, mask=mask)
            plt.store(lse_target.at[rows], lse, mask=heads)

        @pl.when(whole)
        def _finish():
            write(out_ref, lse_ref, row)

        @pl.when(jnp.logical_not(whole))
        def _leave_partial():
            write(partial_ref, partial_lse_ref, row + program)

        return _

    lax.fori_loop(edge_rows_ref[program], edge_rows_ref[programs + program] + 1, row_step, 0)


def _merge(*refs, group, programs):
    tile_starts_ref, partial_ref, partial_lse_ref, _, _, out_ref, lse_ref = refs
    row, blocks = pl.program_id(0), column_blocks(out_ref.shape[1])
    total = tile_starts_ref[tile_starts_ref.shape[0] - 1]
    first = row + owner(total, tile_starts_ref[row], programs)
    count = row + owner(total, tile_starts_ref[row + 1] - 1, programs) + 1 - first
    heads = jnp.arange(_HEADS) < group

    @pl.when(count > 1)
    def _cut():
        def step(i, carry):
            peak, weight, sums = carry
            for j in range(_AT_ONCE):
                index = i * _AT_ONCE + j
                rows = _head_rows(first + jnp.minimum(index, count - 1), group)
                e = jnp.where(index < count, partial_lse_ref[rows], LOWEST)
                new_peak = jnp.maximum(peak, e)
                shrink, factor = jnp.exp2(peak - new_peak), jnp.exp2(e - new_peak)
                factor = jnp.where(index < count, factor, 0)
                sums = tuple(
                    acc * shrink[:, None] + partial_ref[rows, pl.ds(*where)] * factor[:, None]
                    for acc, where in zip(sums, blocks, strict=True)
                )
                peak, weight = new_peak, weight * shrink + factor
            return peak, weight, sums

        peak, weight, sums = lax.fori_loop(
            0,
            (count + (_AT_ONCE - 1)) // _AT_ONCE,
            step,
            (
                jnp.full((_HEADS,), LOWEST, jnp.float32),
                jnp.zeros((_HEADS,), jnp.float32),
                tuple(jnp.zeros((_HEADS, size), jnp.float32) for _, size in blocks),
            ),
        )
        rows = _head_rows(row, group)
        for where, acc in zip(blocks, sums, strict=True):
            value = (acc / weight[:, None]).astype(out_ref.dtype)
            mask = jnp.broadcast_to(heads[:, None], value.shape)
            plt.store(out_ref.at[rows, pl.ds(*where)], value, mask=mask)
        plt.store(lse_ref.at[rows], peak + jnp.log2(weight), mask=heads)


def decode_attention_triton(
    q,
    rows: Rows,
    plan: DecodePlan,
    *,
    scale: float,
    return_scores: bool,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the attention kernel and the one that merges partial results.

    Returns:
      The result, base-2 lse [R, G], and base-2 scores [R, 16, M * P], unwritten at unread slots.
    """
    row_count, group, head_dim = q.shape
    # Blocks of 16 heads extend past the last row of flat arrays.
    flat = row_count * group + _HEADS
    partials = (row_count + plan.programs) * group + _HEADS
    score_shape = (row_count, _HEADS, rows.slots) if return_scores else (1, _HEADS, rows.page_size)
    out_shape = (
        jax.ShapeDtypeStruct((flat, head_dim), q.dtype),
        jax.ShapeDtypeStruct((flat,), jnp.float32),
        jax.ShapeDtypeStruct((partials, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((partials,), jnp.float32),
        jax.ShapeDtypeStruct(score_shape, jnp.float32),
    )
    heads = jnp.pad(q.reshape(row_count * group, head_dim), ((0, _HEADS), (0, 0)))
    tile_starts = plan.tile_starts[: row_count + 1]  # it may be longer
    out, lse, partial, partial_lse, scores = pl.pallas_call(
        functools.partial(
            _attend,
            group=group,
            programs=plan.programs,
            tile=plan.tile,
            scale=scale,
            scaled=bool(rows.scales),
            return_scores=return_scores,
        ),
        grid=(plan.programs,),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="decode_attention_triton",
    )(
        tile_starts,
        plan.edge_rows,
        rows.lengths,
        rows.page_table,
        heads,
        rows.k_pages,
        rows.v_pages,
        *rows.scales,
    )
    out, lse = pl.pallas_call(
        functools.partial(_merge, group=group, programs=plan.programs),
        grid=(row_count,),
        out_shape=out_shape[:2],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_merge_triton",
    )(tile_starts, partial, partial_lse, out, lse)
    heads_only = row_count * group
    out = out[:heads_only].reshape(row_count, group, head_dim)
    return out, lse[:heads_only].reshape(row_count, group), scores
