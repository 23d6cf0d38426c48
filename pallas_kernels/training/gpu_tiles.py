"""Tiles, zones and common code of the training kernels for NVIDIA GPUs (Mosaic GPU, Hopper).

Every kernel runs three warpgroups: two that compute, 64 rows each, and one that only issues the
bulk copies. A tile of scores is in one of four zones, by the distances query - key in it:

    far       all distances are beyond the window: the bias is added, nothing is masked
    boundary  some distances are beyond the window: the bias is selected per score
    near      no distance is beyond the window, all are positive: plain attention
    diagonal  the causal mask is needed (and the bias too if the window is small)

Each zone has its own loop, so that far and near tiles, nearly all of the work, need no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.dispatch import target_gpu
from pallas_kernels.shared_memory import REDUCTION_BYTES, shared_bytes
from pallas_kernels.training.inputs import Inputs

ROWS = 64  # number of rows of one wgmma, and so of one computing warpgroup
TILE = 128  # sequences are padded to a multiple of this
COMPUTE = 2  # number of computing warpgroups per program


@dataclass(frozen=True)
class Problem:
    """The static parameters of one call; T queries and S keys are already multiples of TILE.

    Attributes:
      packed: there are segment ids.
      placed: queries start at an index among the keys that is known only at run time.
      interpret: run in the interpreter, which accepts no wgmma operand in registers.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    window: int
    scale: float
    dtype: jnp.dtype
    packed: bool
    placed: bool
    interpret: bool

    @property
    def heads_per_program(self) -> int:
        """Number of query heads per program of the forward and dq kernels.

        Two heads of one KV group over the same 64 queries have equal trip counts and share the key
        tiles. In an odd group heads do not pair up, so the warpgroups split 128 queries instead.
        """
        return 2 if (self.H // self.K) % 2 == 0 else 1

    @property
    def rows(self) -> int:
        """Number of queries per program of the forward and dq kernels."""
        return ROWS * COMPUTE // self.heads_per_program


@dataclass(frozen=True)
class Ring:
    """The ring in shared memory through which a kernel streams tiles.

    Attributes:
      block: number of tokens in a tile.
      stages: number of tiles in flight.
    """

    block: int
    stages: int


# A kernel's shared-memory arrays by name, given its ring of tiles: see `run`.
ScratchOf = Callable[[Problem, Ring], dict[str, Any]]


def fits(
    scratch_of: ScratchOf, problem: Problem, ring: Ring, reductions: int = REDUCTION_BYTES
) -> bool:
    """Returns whether a program fits a GPU's shared memory; only the interpreter uses `staging`."""
    scratch = scratch_of(replace(problem, interpret=False), ring)
    return shared_bytes(scratch, reductions) <= target_gpu().shared_bytes


def find_ring(
    operation: str,
    part: str,
    problem: Problem,
    wanted: Ring,
    scratch_of: ScratchOf,
    reductions: int = REDUCTION_BYTES,
) -> Ring:
    """Returns the measured ring for the GPU, otherwise the wanted one with as many stages as fit.

    Args:
      operation: name of the operation in the files of settings.
      part: name of the kernel in the files of settings.
      problem: the static parameters.
      wanted: the ring to use if none was measured.
      scratch_of: the kernel's shared-memory arrays.
      reductions: see `run`.
    """
    shape = {"part": part, "head_dim": problem.D}
    measured = tuned.lookup(target_gpu().measured_as, f"{operation}/mosaic_gpu", **shape)
    if measured is not None:
        return Ring(**measured)
    rings = (Ring(wanted.block, stages) for stages in range(wanted.stages, 1, -1))
    fit = (ring for ring in rings if fits(scratch_of, problem, ring, reductions))
    return next(fit, Ring(wanted.block, 1))


def tile_memory(shape: tuple[int, ...], dtype):
    """Returns a shared-memory tile in a layout for wgmma: with 128-byte swizzle if it fits."""
    elements = 64 if shape[-1] % 64 == 0 else 32
    swizzle = elements * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ceil_div(a, b: int):
    """Returns ceil(a / b) for a >= 0."""
    return lax.div(a + (b - 1), jnp.int32(b))


def hidden_zero(tile):
    """Returns 0, computed from a tile's number so that the compiler does not know it.

    A shared-memory tile multiplied in every step of a loop has a descriptor for each 16 columns.
    Computed before the loop, they would fill registers and spill others; with an index that seems
    to depend on the step they are computed at their use.
    """
    return lax.bitwise_and(tile * (tile + 1), jnp.int32(1))


def key_zones(q0, rows: int, window: int, block: int, first, count: int | None = None):
    """Returns tile numbers (far end, boundary end, near end, end) for queries [q0, q0 + rows).

    Tiles hold `block` keys, and the far zone starts at tile `first`. All results are >= `first`.
    With a `count` of tiles, some queries may be padding, past all keys.
    """
    near_end = lax.div(q0, jnp.int32(block))
    far_end = lax.div(jnp.maximum(q0 - window, 0), jnp.int32(block))
    boundary_end = ceil_div(jnp.maximum(q0 + rows - 1 - window, 0), block)
    boundary_end = jnp.clip(boundary_end, far_end, near_end)
    end = ceil_div(q0 + rows, block)
    if count is not None:
        ends = (far_end, boundary_end, near_end, end)
        far_end, boundary_end, near_end, end = (jnp.minimum(x, count) for x in ends)
    return (
        jnp.maximum(far_end, first),
        jnp.maximum(boundary_end, first),
        jnp.maximum(near_end, first),
        end,
    )


def rows_of(x, shape):
    """Broadcasts one value per row over a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_of(x, shape):
    """Broadcasts one value per column over a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def distances(shape, row0, column0):
    """Returns (row0 + row) - (column0 + column) for a tile of scores."""
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (rows + (row0 - column0)) - columns


def row_vector(value: float):
    """Returns a float32 vector with one value per row of a computing warpgroup."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_rows(ref):
    """Loads one value per row of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def load_columns(ref):
    """Loads one value per column of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def release(barrier, *, interpret: bool) -> None:
    """Signals the copying warpgroup that this one has read its tile.

    The interpreter needs a proxy fence between a plain read and the bulk copy that overwrites it.
    On a GPU the values are in registers before the arrival is visible, and a fence would cost a
    barrier.
    """
    if interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def accumulate(initials, body, result_shape, *, interpret: bool):
    """Runs `body(refs, read)` on accumulators that start from `initials`; returns its result.

    Starting a product from the terms to be added costs nothing (the registers are written anyway)
    and frees their registers. `read(index, wait)` returns an accumulator once at most `wait`
    products are in flight. In the interpreter accumulators start from zero, and the terms are added
    afterwards.
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
    """Issues accumulator += a @ b for a tile `a` in registers.

    The interpreter accepts `a` only in shared memory, so it is copied to `staging` there.
    """
    if staging is None:
        plgpu.wgmma(accumulator, a, b)
    else:
        plgpu.wgmma_wait(0)
        staging[...] = a
        plgpu.commit_smem()
        plgpu.wgmma(accumulator, staging, b)


def zone_loops(body, bounds, carry, *, diagonal_bias: bool):
    """Runs `body(tile, carry, bias=, causal=)` over the four zones delimited by `bounds`.

    Args:
      body: the work on one tile; `bias` is "all", "select" or None.
      bounds: the first tile, then the ends of the far, boundary, near and diagonal zones.
      carry: initial carry of the loops.
      diagonal_bias: whether the window is so small that diagonal tiles have biased scores.
    """
    kinds = (("all", False), ("select", False), (None, False))
    kinds = (*kinds, ("select" if diagonal_bias else None, True))
    for (bias, causal), lower, upper in zip(kinds, bounds[:-1], bounds[1:], strict=True):

        def step(tile, carry, bias=bias, causal=causal):
            return body(tile, carry, bias=bias, causal=causal)

        carry = lax.fori_loop(lower, upper, step, carry)
    return carry


def segment_overlap(of_rows: jax.Array, of_columns: jax.Array, rows: int, columns: int):
    """Returns whether blocks of `rows` and of `columns` tokens may share a segment: [B, R, C]."""
    row_blocks = of_rows.reshape(of_rows.shape[0], -1, rows)
    column_blocks = of_columns.reshape(of_columns.shape[0], -1, columns)
    low = row_blocks.min(-1)[:, :, None], column_blocks.min(-1)[:, None, :]
    high = row_blocks.max(-1)[:, :, None], column_blocks.max(-1)[:, None, :]
    return (low[0] <= high[1]) & (low[1] <= high[0])


def segment_operands(problem: Problem, inputs: Inputs, ring: Ring) -> list:
    """Returns the additional operands of a kernel over keys for packed documents.

    They are the segment ids of queries and of keys and, for each program, the first tile of keys to
    visit.
    """
    own, others = inputs.query_segments, inputs.segments
    overlap = segment_overlap(own, others, problem.rows, ring.block)
    return [own, others, jnp.argmax(overlap, axis=-1).astype(jnp.int32)]


def segment_references(problem: Problem, rest) -> tuple[list, list]:
    """Splits references into the three segment operands, if there are any, and the others."""
    count = 3 if problem.packed else 0
    return rest[:count], rest[count:]


def head_and_query(problem: Problem, warpgroup):
    """Returns (query head, first query, the program's first query) of this warpgroup's 64 rows.

    The grid is (batch, heads, queries); queries run backwards, so the longest programs start first.
    """
    heads, programs = lax.axis_index("heads"), problem.T // problem.rows
    q0 = (programs - 1 - lax.axis_index("queries")) * problem.rows
    if problem.heads_per_program == COMPUTE:
        return heads * COMPUTE + warpgroup, q0, q0
    return heads, q0 + warpgroup * ROWS, q0


def run_over_queries(problem: Problem, program, operands, out_type, scratch, name, **options):
    """Runs one program for every `rows` queries and `heads_per_program` heads; see `run`."""
    heads, queries = problem.H // problem.heads_per_program, problem.T // problem.rows
    grid = {"heads": heads, "queries": queries}
    return run(problem, program, operands, out_type, scratch, grid, name, **options)


def run(
    problem: Problem,
    program,
    operands,
    out_type,
    scratch: dict,
    grid: dict[str, int],
    name: str,
    warpgroups: int = COMPUTE + 1,
    reductions: int = REDUCTION_BYTES,
):
    """Runs a kernel over (batch, *grid), the last axis fastest.

    Args:
      problem: the static parameters.
      program: called as `program(problem, inputs, outputs, memory)` with references to the operands
        and the results; `memory` has an attribute for each entry of `scratch`.
      operands: arrays in device memory.
      out_type: shapes and dtypes of the results.
      scratch: a program's shared-memory arrays by name.
      grid: sizes of the grid's axes, by name.
      name: name of the kernel in profiles.
      warpgroups: number of warpgroups of a program.
      reductions: bytes of shared memory for sums and maxima over threads; 0 if there are none.
    """
    interpret = plgpu.InterpretGPUParams(detect_races=True) if problem.interpret else None
    count = len(operands)

    def body(*refs, **memory):
        program(problem, refs[:count], refs[count:], SimpleNamespace(**memory))

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(problem.B, *grid.values()),
        grid_names=("batch", *grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=reductions),
        interpret=interpret,
        kernel_name=name,
    )
    # Index arithmetic is int32 throughout, even if the caller enabled 64-bit types.
    with jax.enable_x64(False):
        return kernel(*operands)


def roles(warpgroup, compute, copy) -> None:
    """Splits the warpgroups: two compute, with most of the registers, and one copies."""

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()
