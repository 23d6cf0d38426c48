"""Paged decode attention for TPUs.

The grid walks the rows in order, split over the cores of a chip, and a row in blocks of about a
thousand slots; a row without keys is one block without pages. While a block is computed, the next
blocks are copied into a ring of buffers with enough bytes to cover the latency of device memory:
later blocks of the row, or of several next rows, which are short after eviction. The page table
stays in device memory, with a few of its rows in scalar memory at a time, because a table of
hundreds of rows of hundreds of pages would not fit.

    copied      . . . row 5, block 2 | row 6, block 0 | row 7, block 0 | row 7, block 1
    computed    row 5, block 1

A core starts copies and computes from one stream of instructions, so starting the copy of a page
adds to the time of the block (`experiments/results/kernels`).

Within a row this is the online softmax of FlashAttention. Slots beyond the row's length are masked
in the scores and in the values, which may be NaN there.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import LOWEST

# Number of slots in a block. Larger blocks need fewer instructions per slot; but the last block of
# a row is computed whole, so a block is at most a quarter of the longest row.
_LEAST_SLOTS, _MOST_SLOTS = 512, 2048
_LANES = 128
# Number of pages whose copies are started in one unrolled group.
_RUN = 8
# The rows are split in two for chips with two cores; a chip with one core walks both halves.
_CORES = 2
# Bytes in flight while a block is computed: as many as v6e reads in 1.9 us.
_BYTES_AHEAD = 3 << 20
# The most buffers of a block, and the most bytes of all of them.
_MOST_BUFFERS, _VMEM_BYTES = 9, 8 << 20
# The most rows of the page table in scalar memory, and the most bytes of them: more than the blocks
# copied ahead, so that a row's table arrives before its first block.
_MOST_TABLES, _SMEM_BYTES = 16, 128 << 10
# Share of tables and lengths in the 1 MiB of scalar memory; the compiler needs some too.
_MOST_SCALAR_BYTES = (1 << 20) - (16 << 10)


@dataclass(frozen=True)
class _Sizes:
    """The static parameters of the kernel; see `decode_attention_tpu`."""

    rows_a_core: int
    page_size: int
    pages_a_block: int
    buffers: int
    columns: int
    tables: int  # a power of two
    scale: float
    precision: lax.Precision | None
    return_lse: bool
    return_scores: bool

    @property
    def block(self) -> int:
        """Number of slots in a block."""
        return self.page_size * self.pages_a_block


def _ceil_divide(count, size: int):
    """Divides a non-negative count, without `//`, whose lowering needs a local TPU."""
    return lax.div(count + (size - 1), size)


def _kernel(lengths_ref, table_hbm, q_ref, k_hbm, v_hbm, *refs, sizes: _Sizes):
    out_ref, *refs = refs
    lse_ref, refs = (refs[0], refs[1:]) if sizes.return_lse else (None, refs)
    scores_hbm, refs = (refs[0], refs[1:]) if sizes.return_scores else (None, refs)
    table, k_buffer, v_buffer, state, table_arrived, arrived, *refs = refs
    first_row, step = pl.program_id(0) * sizes.rows_a_core, pl.program_id(1)
    row = first_row + step
    length = lengths_ref[row]

    def blocks_of(of_length):
        return jnp.maximum(_ceil_divide(of_length, sizes.block), 1)

    def after(buffer):
        return jnp.where(buffer + 1 == sizes.buffers, 0, buffer + 1)

    def before(buffer):
        return jnp.where(buffer == 0, sizes.buffers - 1, buffer - 1)

    def table_copy(of_step, act):
        """Calls `act` on the copies of a row of the page table, one per plane of lanes."""
        place = of_step & (sizes.tables - 1)
        for plane in range(sizes.columns // _LANES):
            source = table_hbm.at[first_row + of_step, plane]
            start = pl.multiple_of(place * sizes.columns + plane * _LANES, _LANES)
            act(
                pltpu.make_async_copy(
                    source, table.at[pl.ds(start, _LANES)], table_arrived.at[place]
                )
            )

    def copy_pages(of_step, of_length, block, buffer):
        """Starts the copies of the live pages of a block."""
        first = block * sizes.pages_a_block
        entry = (of_step & (sizes.tables - 1)) * sizes.columns + first
        live = _ceil_divide(of_length, sizes.page_size) - first

        def start(j):
            page = table[entry + j]
            for source, target in ((k_hbm, k_buffer), (v_hbm, v_buffer)):
                pltpu.make_async_copy(
                    source.at[page], target.at[buffer, j], arrived.at[buffer]
                ).start()

        # Most blocks are whole. Their pages are unrolled, so that several addresses are computed in
        # parallel.
        run = math.gcd(sizes.pages_a_block, _RUN)

        @pl.when(live >= sizes.pages_a_block)
        def _whole():
            def run_step(number, _):
                for j in range(run):
                    start(number * run + j)
                return _

            lax.fori_loop(0, sizes.pages_a_block // run, run_step, 0)

        @pl.when(live < sizes.pages_a_block)
        def _part():
            def page_step(j, _):
                start(j)
                return _

            lax.fori_loop(0, live, page_step, 0)

    def copy_next(buffer):
        """Starts the copies of this core's next block, if any is left."""
        of_step, block = state[0], state[1]

        @pl.when(of_step < sizes.rows_a_core)
        def _():
            of_length = lengths_ref[first_row + of_step]

            @pl.when(block == 0)
            def _change_row():
                table_copy(of_step, lambda copy: copy.wait())
                # It takes the place of the previous row, which is completely copied.
                later = of_step + sizes.tables - 1

                @pl.when(later < sizes.rows_a_core)
                def _():
                    table_copy(later, lambda copy: copy.start())

            copy_pages(of_step, of_length, block, buffer)
            last = block + 1 >= blocks_of(of_length)
            state[0] = of_step + last.astype(jnp.int32)
            state[1] = jnp.where(last, 0, block + 1)

    def wait(block, buffer):
        """Waits for the copies of the live pages of a block."""
        live = _ceil_divide(length, sizes.page_size) - block * sizes.pages_a_block

        def arrive(target):
            # Waits for as many bytes as the target has, from any source.
            pltpu.make_async_copy(target, target, arrived.at[buffer]).wait()

        @pl.when(live >= sizes.pages_a_block)
        def _whole():
            arrive(k_buffer.at[buffer])
            arrive(v_buffer.at[buffer])

        @pl.when(live < sizes.pages_a_block)
        def _part():
            def page_step(j, _):
                arrive(k_buffer.at[buffer, j])
                arrive(v_buffer.at[buffer, j])
                return _

            lax.fori_loop(0, live, page_step, 0)

    @pl.when(step == 0)
    def _begin():
        # Row and block of the next copies, and the buffer to compute next.
        for place in range(3):
            state[place] = 0

        def start_table(of_step, _):
            table_copy(of_step, lambda copy: copy.start())
            return _

        def start_block(buffer, _):
            copy_next(buffer)
            return _

        lax.fori_loop(0, min(sizes.tables - 1, sizes.rows_a_core), start_table, 0)
        lax.fori_loop(0, sizes.buffers - 1, start_block, 0)

    q = q_ref[...]
    heads, head_dim = q.shape
    dot = functools.partial(
        lax.dot_general, precision=sizes.precision, preferred_element_type=jnp.float32
    )

    def block_step(block, carry):
        buffer, peak, total, out = carry
        copy_next(before(buffer))  # the last computed one
        wait(block, buffer)
        k = k_buffer[buffer].reshape(sizes.block, head_dim)
        live = length - block * sizes.block

        @pl.when(live < sizes.block)
        def _clear_dead_values():
            v = v_buffer[buffer].reshape(sizes.block, head_dim)
            slot = lax.broadcasted_iota(jnp.int32, v.shape, 0)
            v_buffer[buffer] = jnp.where(slot < live, v, jnp.zeros_like(v)).reshape(
                v_buffer.shape[1:]
            )

        scores = dot(q, k, (((1,), (1,)), ((), ()))) * sizes.scale
        slot = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(slot < live, scores, -jnp.inf)
        if sizes.return_scores:
            staged, sent = refs
            staged[...] = scores
            columns = pl.ds(pl.multiple_of(block * sizes.block, _LANES), sizes.block)
            assert scores_hbm is not None
            copy = pltpu.make_async_copy(staged, scores_hbm.at[row, :, columns], sent)
            copy.start()
            copy.wait()
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_peak)
        shrink = jnp.exp(peak - new_peak)
        v = v_buffer[buffer].reshape(sizes.block, head_dim)
        new_out = out * shrink + dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
        return after(buffer), new_peak, total, new_out

    buffer, peak, total, out = lax.fori_loop(
        0,
        blocks_of(length),
        block_step,
        (
            state[2],
            jnp.full((heads, 1), LOWEST, jnp.float32),
            jnp.zeros((heads, 1), jnp.float32),
            jnp.zeros((heads, head_dim), jnp.float32),
        ),
    )

    state[2] = buffer
    some = total > 0
    out_ref[...] = (out * jnp.where(some, 1 / total, 0)).astype(out_ref.dtype)
    if sizes.return_lse:
        lse = jnp.where(some, peak + jnp.log(total), -jnp.inf)
        assert lse_ref is not None
        lse_ref[...] = jnp.broadcast_to(lse, lse_ref.shape)


def _packing(dtype) -> int:
    """Returns the rows of a tile of device memory: 8 of 32 bits, 16 of 16 bits, 32 of 8 bits."""
    return 32 // jnp.dtype(dtype).itemsize


def why_not(q, rows: Rows, plan, **static):
    """Returns why the kernel cannot serve a call, or None."""
    del plan, static
    head_dim, page_size, packing = q.shape[2], rows.page_size, _packing(rows.k_pages.dtype)
    if rows.scales:
        return "does not read float8 pages"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"serves bfloat16 and float32, not {q.dtype}"
    if head_dim % 32 or head_dim > 512:
        return f"serves head dims that are multiples of 32 up to 512, not {head_dim}"
    if page_size % packing:
        return f"serves page sizes that are multiples of {packing}, not {page_size}"
    least = _whole_lanes(page_size) * _slot_bytes(head_dim, rows.k_pages.dtype)
    if 2 * least > _VMEM_BYTES:
        return (
            f"needs two buffers of {least} bytes for pages of {page_size} x {head_dim} x "
            f"{rows.k_pages.dtype}, there are {_VMEM_BYTES}"
        )
    tables, all_columns = _tables(rows.page_table.shape[1])
    scalars = 4 * (-(-q.shape[0] // _CORES) * _CORES + tables * all_columns)
    if scalars > _MOST_SCALAR_BYTES:
        return (
            f"needs {scalars} bytes of scalar memory for {q.shape[0]} rows of "
            f"{rows.page_table.shape[1]} pages, there are {_MOST_SCALAR_BYTES}"
        )
    return None


def _tables(columns: int) -> tuple[int, int]:
    """Returns the number of page-table rows in memory, a power of two, and their width.

    Copies to scalar memory take whole planes of lanes.
    """
    all_columns = -(-columns // _LANES) * _LANES
    tables = min(max(2, _SMEM_BYTES // (4 * all_columns)), _MOST_TABLES)
    return 1 << (tables.bit_length() - 1), all_columns


def _slot_bytes(head_dim: int, dtype) -> int:
    """Returns the bytes of a key and a value in vector memory."""
    return 2 * -(-head_dim // _LANES) * _LANES * jnp.dtype(dtype).itemsize


def _whole_lanes(page_size: int) -> int:
    """Returns the slots of the fewest pages whose scores fill whole lanes: 384 of pages of 48."""
    return math.lcm(page_size, _LANES)


def decode_attention_tpu(
    q,
    rows: Rows,
    plan=None,
    *,
    scale: float,
    return_lse: bool,
    return_scores: bool,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """Computes `decode_attention` on TPUs; returns a tuple of results."""
    del plan
    row_count, group, head_dim = q.shape
    page_size, columns, dtype = rows.page_size, rows.page_table.shape[1], rows.k_pages.dtype
    slot_bytes = _slot_bytes(head_dim, dtype)
    wanted = min(max(rows.slots // 4, _LEAST_SLOTS), _MOST_SLOTS)
    wanted = min(wanted, max(_LANES, rows.slots), _VMEM_BYTES // (2 * slot_bytes))
    whole = _whole_lanes(page_size)
    pages_a_block = max(1, wanted // whole) * whole // page_size
    block_bytes = pages_a_block * page_size * slot_bytes
    buffers = min(1 + -(-_BYTES_AHEAD // block_bytes), _MOST_BUFFERS, _VMEM_BYTES // block_bytes)
    tables, all_columns = _tables(columns)
    rows_a_core = -(-row_count // _CORES)
    all_rows = rows_a_core * _CORES
    packing = _packing(q.dtype)
    heads = -(-group // packing) * packing
    sizes = _Sizes(
        rows_a_core=rows_a_core,
        page_size=page_size,
        pages_a_block=pages_a_block,
        buffers=max(2, buffers),
        columns=all_columns,
        tables=tables,
        scale=scale,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        return_lse=return_lse,
        return_scores=return_scores,
    )
    padding = (0, all_rows - row_count)
    q = jnp.pad(q, (padding, (0, heads - group), (0, 0)))
    lengths = jnp.pad(rows.lengths, padding)
    table = jnp.pad(rows.page_table, (padding, (0, sizes.columns - columns)))
    table = table.reshape(all_rows, -1, _LANES)

    def of_row(core, step, *_):
        return core * rows_a_core + step, 0, 0

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    out_specs = [pl.BlockSpec((None, heads, head_dim), of_row)]
    page_buffer = pltpu.VMEM((sizes.buffers, pages_a_block, page_size, head_dim), dtype)
    scratch = [
        pltpu.SMEM((sizes.tables * sizes.columns,), jnp.int32),
        page_buffer,
        page_buffer,
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SemaphoreType.DMA((sizes.tables,)),
        pltpu.SemaphoreType.DMA((sizes.buffers,)),
    ]
    if return_lse:
        out_shape.append(jax.ShapeDtypeStruct((all_rows, heads, _LANES), jnp.float32))
        out_specs.append(pl.BlockSpec((None, heads, _LANES), of_row))
    if return_scores:
        slots = -(-rows.slots // sizes.block) * sizes.block
        out_shape.append(jax.ShapeDtypeStruct((all_rows, heads, slots), jnp.float32))
        out_specs.append(anywhere)
        scratch += [pltpu.VMEM((heads, sizes.block), jnp.float32), pltpu.SemaphoreType.DMA]
    results = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(_CORES, rows_a_core),
            in_specs=[
                anywhere,
                pl.BlockSpec((None, heads, head_dim), of_row),
                anywhere,
                anywhere,
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        # Bounds checks would double the cost of starting copies.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="decode_attention",
    )(lengths, table, q, rows.k_pages, rows.v_pages)
    out, *rest = results
    finished = [out[:row_count, :group]]
    if return_lse:
        finished.append(rest.pop(0)[:row_count, :group, 0])
    if return_scores:
        scores = rest.pop(0)[:row_count, :group, : rows.slots]
        read = jnp.arange(rows.slots) < lengths[:row_count, None, None]
        finished.append(jnp.where(read, scores, -jnp.inf))
    return tuple(finished)
