"""Tiles, zones and idioms shared by the training kernels for NVIDIA GPUs (Mosaic GPU, Hopper).

Every kernel runs three warpgroups: two that compute, 64 rows each, and one that only issues the
bulk copies. A tile of scores is in one of four zones, by the distances query - key that it holds:

    far       every distance is beyond the window: the bias is added, nothing is masked
    boundary  some are: the bias is selected per score
    near      none is, and the tile is below the diagonal: plain attention
    diagonal  the causal mask is needed (and the bias too if the window is small)

Each zone is its own loop, so that far and near tiles, nearly all of the work, carry no mask.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.dispatch import target_gpu

ROWS = 64  # rows of one wgmma, and so of one computing warpgroup
TILE = 128  # sequences are padded to a multiple of this
COMPUTE = 2  # computing warpgroups of a program
LOG2E = math.log2(math.e)
# A score that is not seen, and the running maximum before any is. Both are finite, and the first
# is so far below the second that exp2(hidden - maximum) = 0 however the two are rounded: a tile in
# which a row sees nothing adds nothing to it.
HIDDEN = -1e30
LOWEST = -1e20
# Shared memory of a program, and what of it barriers, reductions and values per row may take.
SHARED_BYTES, SPARE_BYTES = 227 * 1024, 8 * 1024


@dataclass(frozen=True)
class Problem:
    """The static facts of one call; T is already a multiple of TILE.

    Attributes:
      packed: there are segment ids.
      interpret: run in the interpreter, which takes no wgmma operand from registers.
    """

    B: int
    T: int
    H: int
    K: int
    D: int
    window: int
    scale: float
    dtype: jnp.dtype
    packed: bool
    interpret: bool

    @property
    def heads_per_program(self) -> int:
        """Query heads that a program of the forward and dq kernels takes.

        Two heads of one KV group over the same 64 queries have equal trip counts and share the
        key tiles. An odd group has no such pairs: then the warpgroups split 128 queries.
        """
        return 2 if (self.H // self.K) % 2 == 0 else 1

    @property
    def rows(self) -> int:
        """Queries that a program of the forward and dq kernels takes."""
        return ROWS * COMPUTE // self.heads_per_program


@dataclass(frozen=True)
class Ring:
    """How a kernel streams tiles through shared memory: tokens of one, and how many at a time."""

    block: int
    stages: int


def fits(ring: Ring, problem: Problem, resident: int) -> bool:
    """Whether a ring of pairs of tiles fits beside `resident` rows of D elements."""
    row = problem.D * problem.dtype.itemsize
    streamed = 2 * ring.stages * ring.block * (row + 4)
    return resident * row + streamed <= SHARED_BYTES - SPARE_BYTES


def find_ring(operation: str, part: str, problem: Problem, resident: int, wanted: Ring) -> Ring:
    """Return the ring measured for this kind of GPU, else what fits of the one wanted.

    Args:
      operation: whose kernel it is, as the file of settings has it.
      part: which of its kernels.
      problem: the static facts.
      resident: rows of D elements that the program keeps in shared memory.
      wanted: what is good where nothing was measured.
    """
    shape = {"part": part, "head_dim": problem.D}
    found = tuned.lookup(target_gpu().kind, f"{operation}/mosaic_gpu", **shape)
    if found is not None:
        return Ring(**found)
    rings = (Ring(wanted.block, stages) for stages in range(wanted.stages, 0, -1))
    return next((ring for ring in rings if fits(ring, problem, resident)), Ring(wanted.block, 1))


def tile_memory(shape: tuple[int, ...], dtype):
    """Return a shared-memory tile in the form that wgmma reads: 128-byte swizzle where it fits."""
    elements = 64 if shape[-1] % 64 == 0 else 32
    swizzle = elements * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ceil_div(a, b: int):
    """Return ceil(a / b) for a >= 0."""
    return lax.div(a + (b - 1), jnp.int32(b))


def key_zones(q0, rows: int, window: int, block: int, first):
    """Tile numbers (far end, boundary end, near end, end) for queries [q0, q0 + rows).

    Tiles of `block` keys start at `first` (far) and end at `end` (diagonal). All are >= first.
    """
    near_end = lax.div(q0, jnp.int32(block))
    far_end = lax.div(jnp.maximum(q0 - window, 0), jnp.int32(block))
    boundary_end = ceil_div(jnp.maximum(q0 + rows - 1 - window, 0), block)
    boundary_end = jnp.clip(boundary_end, far_end, near_end)
    end = ceil_div(q0 + rows, block)
    return (
        jnp.maximum(far_end, first),
        jnp.maximum(boundary_end, first),
        jnp.maximum(near_end, first),
        end,
    )


def rows_of(x, shape):
    """Broadcast a value per row over a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_of(x, shape):
    """Broadcast a value per column over a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def distances(shape, row0, column0):
    """Return (row0 + row) - (column0 + column) for a tile of scores."""
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (rows + (row0 - column0)) - columns


def row_vector(value: float):
    """Return a float32 value per row of a computing warpgroup."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_rows(ref):
    """Load one value per row."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def load_columns(ref):
    """Load one value per column."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def release(barrier, *, interpret: bool) -> None:
    """Tell the copying warpgroup that this one has read its tile.

    The interpreter wants a proxy fence between a plain read and the bulk copy that overwrites it.
    On the card the values are in registers before the arrival is seen, and a fence is a barrier.
    """
    if interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def accumulate(initials, body, result_shape, *, interpret: bool):
    """Run `body(refs, read)` on accumulators that start from `initials`; return what it returns.

    Starting a product from the terms that are added to it costs nothing (the registers are written
    anyway) and frees the registers of those terms. `read(index, wait)` gives an accumulator once at
    most `wait` products are in flight. The interpreter starts from zero: there it adds afterwards.
    """
    shapes = [plgpu.ACC(x.shape, jnp.float32) for x in initials]
    if interpret:

        def run_from_zero(*refs):
            return body(
                refs,
                lambda index, wait: (
                    plgpu.wgmma_accumulator_load(refs[index], wait_n=wait) + initials[index]
                ),
            )

        return pl.run_scoped(run_from_zero, *shapes)

    def run(state):
        *refs, result = state
        result[...] = body(
            refs, lambda index, wait: plgpu.wgmma_accumulator_load(refs[index], wait_n=wait)
        )

    result = plgpu.layout_cast(jnp.zeros(result_shape, jnp.float32), plgpu.Layout.WGMMA)
    return pl.run_state(run)((*map(plgpu.ACC.init, initials), result))[-1]


def multiply_registers(accumulator, a, b, staging) -> None:
    """Issue accumulator += a @ b for a tile `a` in registers.

    The interpreter takes `a` from shared memory only: there it goes through `staging`.
    """
    if staging is None:
        plgpu.wgmma(accumulator, a, b)
    else:
        plgpu.wgmma_wait(0)
        staging[...] = a
        plgpu.commit_smem()
        plgpu.wgmma(accumulator, staging, b)


def zone_loops(body, bounds, carry, *, diagonal_bias: bool):
    """Run `body(tile, carry, bias=, causal=)` over the four zones that `bounds` delimits.

    Args:
      body: the work of one tile; bias is "all", "select" or None.
      bounds: first tile, then the end of the far, boundary, near and diagonal zones.
      carry: what the loops carry.
      diagonal_bias: the window is so small that diagonal tiles hold biased scores.
    """
    kinds = (("all", False), ("select", False), (None, False))
    kinds = (*kinds, ("select" if diagonal_bias else None, True))
    for (bias, causal), lower, upper in zip(kinds, bounds[:-1], bounds[1:], strict=True):

        def step(tile, carry, bias=bias, causal=causal):
            return body(tile, carry, bias=bias, causal=causal)

        carry = lax.fori_loop(lower, upper, step, carry)
    return carry


def segment_overlap(segments: jax.Array, rows: int, columns: int) -> jax.Array:
    """Which blocks of `columns` tokens can share a segment with which of `rows`: [B, R, C]."""
    row_blocks = segments.reshape(segments.shape[0], -1, rows)
    column_blocks = segments.reshape(segments.shape[0], -1, columns)
    low = row_blocks.min(-1)[:, :, None], column_blocks.min(-1)[:, None, :]
    high = row_blocks.max(-1)[:, :, None], column_blocks.max(-1)[:, None, :]
    return (low[0] <= high[1]) & (low[1] <= high[0])


def segment_operands(problem: Problem, segments, ring: Ring) -> tuple[dict, list]:
    """What packed documents add to a kernel that walks keys: shared memory, and operands.

    The operands are the segment ids and, for each program, the first tile of keys worth a visit.
    """
    scratch = {
        "query_segments": plgpu.SMEM((COMPUTE, ROWS), jnp.int32),
        "key_segments": plgpu.SMEM((ring.stages, ring.block), jnp.int32),
    }
    overlap = segment_overlap(segments, problem.rows, ring.block)
    return scratch, [segments, jnp.argmax(overlap, axis=-1).astype(jnp.int32)]


def head_and_query(problem: Problem, warpgroup):
    """Return (query head, first query, program's first query) of this warpgroup's 64 rows.

    The grid is (batch, heads, queries); queries run backwards, so the longest programs start first.
    """
    heads, programs = lax.axis_index("heads"), problem.T // problem.rows
    q0 = (programs - 1 - lax.axis_index("queries")) * problem.rows
    if problem.heads_per_program == COMPUTE:
        return heads * COMPUTE + warpgroup, q0, q0
    return heads, q0 + warpgroup * ROWS, q0


def query_kernel(problem: Problem, body, out_type, scratch_types, name: str):
    """Build a kernel with one program for every `rows` queries and `heads_per_program` heads."""
    heads, queries = problem.H // problem.heads_per_program, problem.T // problem.rows
    grid = {"heads": heads, "queries": queries}
    return build_kernel(problem, body, out_type, scratch_types, grid, name)


def build_kernel(problem: Problem, body, out_type, scratch_types, grid: dict[str, int], name: str):
    """Build a kernel over (batch, *grid), the last axis fastest, with three warpgroups."""
    interpret = plgpu.InterpretGPUParams(detect_races=True) if problem.interpret else None
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(problem.B, *grid.values()),
        grid_names=("batch", *grid),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name=name,
    )

    def run(*operands):
        # Index arithmetic is int32 throughout, also for callers who enabled 64-bit types.
        with jax.enable_x64(False):
            return kernel(*operands)

    return run


def roles(warpgroup, compute, copy) -> None:
    """Split the warpgroups: two compute with most of the registers, one copies."""

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()
