"""Blocks, visibility and common code of the training kernels for TPU.

A block of scores holds `rows` = G * query rows (or columns, transposed) by `keys`. Blocks above the
diagonal, or without a common segment, are neither copied nor computed. The others are in a zone:

    far     all distances query - key are beyond the window: the bias is added, nothing is masked
    near    no distance is beyond the window, all are positive: plain attention
    mixed   all others: the bias is selected and the masks are applied, per score
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.padding import pad_axis
from pallas_kernels.training.inputs import LOG2E, Inputs

LANES = 128
MAXIMUM_ROWS = 1024
MAXIMUM_TOKEN_BYTES = 8192  # of a KV head's query heads; more do not fit a v5e's VMEM
MAXIMUM_SCORES = 256 * 1024


def why_too_wide(group: int, dim: int, dtype: jnp.dtype) -> str | None:
    """Returns why blocks of queries of this shape do not fit VMEM, or None if they do."""
    if dim > 256 and dim != 512:
        return f"the head dim may be 256 at most, or 512, got {dim}"
    if group > 16:
        return f"a KV head may serve 16 query heads at most, got {group}"
    if (size := group * dim * dtype.itemsize) > MAXIMUM_TOKEN_BYTES:
        return (
            f"the {group} query heads of a KV head may take {MAXIMUM_TOKEN_BYTES} bytes a token, "
            f"they take {size}"
        )
    return None


@dataclass(frozen=True)
class Problem:
    """The static parameters of one call; T and S are already multiples of their block sizes.

    Attributes:
      query: number of tokens in a query block.
      keys: number of tokens in a key block.
      packed: there are segment ids.
      placed: queries start at an index among the keys that is known only at run time.
      interpret: False, or the parameters of the TPU interpreter.
    """

    B: int
    T: int
    S: int
    K: int
    G: int
    D: int
    window: int
    scale: float
    dtype: jnp.dtype
    query: int
    keys: int
    packed: bool
    placed: bool
    interpret: object

    @classmethod
    def make(cls, inputs: Inputs, window: int, scale: float, interpret) -> "Problem":
        """Chooses the blocks, as large as about 1 MB of float32 scores allows."""
        B, _, H, D = inputs.q.shape
        K, dtype = inputs.k.shape[2], jnp.dtype(inputs.q.dtype)
        group = H // K
        padded, padded_keys = (-(-x.shape[1] // LANES) * LANES for x in (inputs.q, inputs.k))
        wide = max(1, D * dtype.itemsize // 256)
        scores = MAXIMUM_SCORES * 2 // dtype.itemsize

        def largest(length: int, fits) -> int:
            sizes = (size for size in (512, 256, 128) if length % size == 0)
            return next((size for size in sizes if fits(size)), LANES)

        query = largest(padded, lambda size: group * size * wide <= MAXIMUM_ROWS)
        keys = largest(padded_keys, lambda size: group * query * size <= scores)
        window, placed = min(window, padded_keys), inputs.start is not None
        static = (window, scale, dtype, query, keys, inputs.packed, placed, interpret)
        return cls(B, padded, padded_keys, K, group, D, *static)

    @property
    def rows(self) -> int:
        """Number of rows in a block of scores."""
        return self.G * self.query

    @property
    def multiplier(self) -> float:
        """Factor from raw products to base-2 exponents."""
        return self.scale * LOG2E

    def group(self, x: jax.Array) -> jax.Array:
        """Reshapes [B, T, H, D] to [B, K, G, padded T, D]."""
        batch, length, heads, dim = x.shape
        x = x.reshape(batch, length, self.K, heads // self.K, dim)
        return pad_axis(jnp.transpose(x, (0, 2, 3, 1, 4)), 3, LANES)

    def ungroup(self, x: jax.Array, length: int) -> jax.Array:
        """Reshapes [B, K, G, padded T, D] to [B, T, H, D]."""
        x = jnp.transpose(x, (0, 3, 1, 2, 4))[:, :length]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Reshapes [B, H, T] to one row per block of queries, [B, K, blocks, 1, G * query]."""
        x = pad_axis(x, 2, LANES).reshape(self.B, self.K, self.G, -1, self.query)
        return jnp.swapaxes(x, 2, 3).reshape(self.B, self.K, -1, 1, self.rows)

    def from_blocks(self, x: jax.Array, length: int) -> jax.Array:
        """Reshapes [B, K, blocks, 1, G * query] to [B, H, T]."""
        x = x.reshape(self.B, self.K, -1, self.G, self.query)
        return jnp.swapaxes(x, 2, 3).reshape(self.B, -1, self.T)[:, :, :length]


def product(problem: Problem, a, b, contract: tuple[int, int]):
    """Multiplies two blocks over axes contract[0] of a and contract[1] of b, in float32."""
    exact = problem.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )


def to_column(row):
    """Transposes a [1, N] row to an [N, 1] column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def to_row(column):
    """Transposes an [N, 1] column to a [1, N] row."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def scalars_of(problem: Problem, references) -> tuple:
    """Returns the index of the first query and the bounds, from references to prefetched scalars.

    They are 0 and None if the problem has none.
    """
    references = list(references)
    start = references.pop(0)[0] if problem.placed else 0
    return start, references.pop(0) if problem.packed else None


def prefetched(problem: Problem, inputs: Inputs, bounds) -> list[jax.Array]:
    """Returns the operands of `scalars_of`."""
    return [inputs.start] * problem.placed + [bounds] * problem.packed


def segment_bounds(
    problem: Problem, own: jax.Array, others: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the first key block of each query block, and the last query block of each key block.

    Blocks outside these ranges share no segment.

    Args:
      problem: the static parameters.
      own: the segments of the queries.
      others: the segments of the keys.
    """

    def interval(segments, size):
        blocks = segments.reshape(problem.B, -1, size)
        return blocks.min(-1), blocks.max(-1)

    (query_low, query_high) = interval(own, problem.query)
    (key_low, key_high) = interval(others, problem.keys)
    meet = query_low[:, :, None] <= key_high[:, None, :]
    meet &= key_low[:, None, :] <= query_high[:, :, None]
    first = jnp.argmax(meet, axis=2)
    last = meet.shape[1] - 1 - jnp.argmax(meet[:, ::-1], axis=1)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def by_zone(problem: Problem, query_block, key_block, visible, body, start=0) -> None:
    """Calls `body(bias=, masked=)` for the zone of one block of scores, if it is visible."""
    q0, k0 = start + query_block * problem.query, key_block * problem.keys
    below = k0 + problem.keys - 1 <= q0
    far = below & (q0 - (k0 + problem.keys - 1) > problem.window)
    near = below & (q0 + problem.query - 1 - k0 <= problem.window)
    if problem.packed:
        pl.when(visible)(lambda: body(bias=True, masked=True))
        return
    pl.when(visible & far)(lambda: body(bias=True, masked=False))
    pl.when(visible & near)(lambda: body(bias=False, masked=False))
    pl.when(visible & ~far & ~near)(lambda: body(bias=True, masked=True))


def distances(problem: Problem, query_block, key_block, start, *, transposed: bool):
    """Returns query - key for every score of a block with the rows of all heads of a group."""
    shape = (problem.keys, problem.rows) if transposed else (problem.rows, problem.keys)
    queries = lax.broadcasted_iota(jnp.int32, shape, 1 if transposed else 0)
    keys = lax.broadcasted_iota(jnp.int32, shape, 0 if transposed else 1)
    # Rows are (head, query): the queries of every head start at the same token.
    queries = lax.rem(queries, jnp.int32(problem.query))
    return (queries - keys) + (start + query_block * problem.query - key_block * problem.keys)


def build(problem: Problem, kernel, grid, in_specs, out_specs, out_shape, scratch, name):
    """Builds a kernel whose last grid axis runs in sequence; `kernel` takes the problem first.

    Prefetched operands come first (`prefetched`).
    """
    return pl.pallas_call(
        functools.partial(kernel, problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=problem.packed + problem.placed,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - 1) + ("arbitrary",)
        ),
        interpret=problem.interpret,
        name=name,
    )
