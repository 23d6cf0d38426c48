"""Decode attention on NVIDIA GPUs: supported calls and settings of kernels, and their callers.

The kernels' modules are imported when a call is traced, because Pallas for GPUs takes as long to
import as jax.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import tuned
from pallas_kernels.decode.plan import DecodePlan, make_plan
from pallas_kernels.decode.rows import Rows
from pallas_kernels.decode.spec import LOG2_E, MOST_COLUMNS, QUERY_STEP, Spec, mma_bytes
from pallas_kernels.dispatch import mosaic_lacks, not_hopper, target_gpu
from pallas_kernels.padding import pad_axis

# Rows of the matrix unit; several smaller pages make one tile.
_TILE = 64
# For long rows of float8 pages an H200 is faster with one program per core, with tiles twice as
# large. Shorter rows were not timed that way.
_LONG_TILE, _LONG_ROW, _LONG_HEAD_DIM = 128, 4096, 128
_HEAD_DIMS = (64, 96, 128, 256, 512)
_PAGE_SIZES = (16, 32, 64, 128)
_SHARED_BYTES = 227 * 1024
_COPY_ALIGNMENT = 128  # bytes; alignment of the copy engine's targets in shared memory
# Bytes in flight per core that saturate the memory; more than twice as many slow it down.
_BYTES_IN_FLIGHT = 64 * 1024
# Below this many bytes of rows per core latency counts, not throughput.
_SMALL_BYTES = 1 << 20


class Shape(NamedTuple):
    """The parameters that determine a kernel's settings: R, D, P, M and the dtype of the pages."""

    rows: int
    head_dim: int
    page_size: int
    columns: int
    dtype: DTypeLike

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def copies_scales(self) -> bool:
        """Whether the copy engine can copy the scales of a page."""
        return 4 * self.page_size % _COPY_ALIGNMENT == 0

    @property
    def small(self) -> bool:
        """Whether the table is so small that latency counts."""
        slots = self.rows * self.columns * self.page_size
        return 2 * slots * self.head_dim * self.itemsize < _SMALL_BYTES * target_gpu().cores


def _shape(q, rows: Rows) -> Shape:
    columns = rows.page_table.shape[1]
    return Shape(q.shape[0], q.shape[2], rows.page_size, columns, rows.k_pages.dtype)


def tile_of(implementation: str, shape: Shape) -> int:
    """Returns the number of slots a kernel processes at a time: one page, or several small ones."""
    large = (
        implementation == "mosaic_gpu"
        and shape.itemsize == 1
        and shape.head_dim == _LONG_HEAD_DIM
        and shape.copies_scales
        and shape.columns * shape.page_size >= _LONG_ROW
        and not shape.small
    )
    return max(_LONG_TILE if large else _TILE, shape.page_size)


def settings_of(implementation: str, shape: Shape) -> dict[str, int]:
    """Returns the programs per core and their parameters: measured, or else by heuristic."""
    head_dim, page_size, size = shape.head_dim, shape.page_size, shape.itemsize
    tile = tile_of(implementation, shape)
    found = tuned.lookup(
        target_gpu().measured_as,
        f"decode_attention/{implementation}",
        head_dim=head_dim,
        page_size=page_size,
        bytes=size,
        tile=tile,
        small=shape.small,
    )
    if found is not None:
        return found
    if implementation == "mosaic_mma":
        # More programs would have too few registers. The largest group takes the most.
        wanted = 4 if head_dim <= 128 else 2
        fit = target_gpu().programs_a_core(mma_bytes(tile, head_dim, MOST_COLUMNS))
        return {"programs_per_core": max(1, min(wanted, fit)), "stages": 1}
    if tile > max(_TILE, page_size):
        return {"programs_per_core": 1, "stages": 3}
    stage = 2 * tile * head_dim * size
    if head_dim <= 128 and 2 * stage <= _BYTES_IN_FLIGHT:
        # One of two programs computes while the other waits for its pages or its barriers.
        return {"programs_per_core": 2, "stages": _BYTES_IN_FLIGHT // (2 * stage)}
    wanted = max(2, _BYTES_IN_FLIGHT // stage)
    spare = _SHARED_BYTES - 32 * 1024
    return {"programs_per_core": 1, "stages": max(1, min(wanted, 8, spare // stage))}


def plan_for(implementation: str, shape: Shape, lengths, make=make_plan) -> DecodePlan:
    """Computes the plan of an implementation for rows of these lengths."""
    programs = target_gpu().cores * settings_of(implementation, shape)["programs_per_core"]
    return make(lengths, tile=tile_of(implementation, shape), programs=programs)


def spec_of(q, k_pages, settings, **fields) -> Spec:
    """Returns the static parameters of the kernel for a call with these settings."""
    return Spec(
        rows=q.shape[0],
        group=q.shape[1],
        head_dim=q.shape[2],
        page_size=k_pages.shape[1],
        pages_dtype=jnp.dtype(k_pages.dtype),
        dtype=jnp.dtype(q.dtype),
        stages=settings["stages"],
        **fields,
    )


def _why_no_kernel(q, rows: Rows, plan) -> str | None:
    """Returns why no GPU kernel can serve a call, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies 16-bit numbers, not {q.dtype}"
    if other := [x.dtype for x in rows.scales if x.dtype != jnp.float32]:
        return f"reads scales in float32, not {other[0]}"
    if q.shape[1] > 16:
        return f"serves groups of at most 16 query heads, not {q.shape[1]}"
    if q.shape[2] not in _HEAD_DIMS:
        return f"serves head dims {_HEAD_DIMS}, not {q.shape[2]}"
    if rows.page_size not in _PAGE_SIZES:
        return f"serves page sizes {_PAGE_SIZES}, not {rows.page_size}"
    if plan is not None and (plan.tile % _TILE or plan.tile % rows.page_size):
        return f"the plan was made for another page size (tile {plan.tile})"
    return None


def _why_too_large(name: str, q, rows: Rows, plan, most: int, **fields) -> str | None:
    """Returns why a program's shared memory is too small, or None."""
    shape = _shape(q, rows)
    tile = tile_of(name, shape) if plan is None else plan.tile
    unknown = {"programs": 1, "scale": 1.0, "return_lse": True, "return_scores": True}
    spec = spec_of(q, rows.k_pages, settings_of(name, shape), tile=tile, **unknown, **fields)
    if spec.shared_bytes <= most:
        return None
    return (
        f"needs {spec.shared_bytes} bytes of shared memory for pages of {spec.page_size} x "
        f"{spec.head_dim} x {spec.pages_dtype}, there are {most}"
    )


def why_not_mosaic(q, rows: Rows, plan, **static):
    """Returns why the Hopper kernel cannot serve a call, or None."""
    del static
    if reason := not_hopper() or _why_no_kernel(q, rows, plan):
        return reason
    shape = _shape(q, rows)
    if shape.itemsize == 1 and not shape.copies_scales:
        least = _COPY_ALIGNMENT // 4
        return f"copies scales for float8 pages of at least {least} tokens, not {rows.page_size}"
    return _why_too_large("mosaic_gpu", q, rows, plan, _SHARED_BYTES)


def why_not_mma(q, rows: Rows, plan, **static):
    """Returns why the kernel with Ampere's products cannot serve a call, or None."""
    del static
    gpu = target_gpu()
    if reason := mosaic_lacks(gpu) or _why_no_kernel(q, rows, plan):
        return reason
    if rows.k_pages.dtype.itemsize == 1 and gpu.capability < (8, 9):
        return f"float8 needs compute capability 8.9 (Ada), {gpu.kind} has {gpu.capability}"
    return _why_too_large("mosaic_mma", q, rows, plan, gpu.shared_bytes, copies=False)


def mosaic(q, rows: Rows, plan, *, settings=None, interpret=None, **static):
    """Computes `decode_attention` on Hopper GPUs; returns a tuple of results."""
    from pallas_kernels.decode.mosaic import attend
    from pallas_kernels.decode.mosaic_plan import MOST_ROWS, make_plan_on_gpu

    row_count, group, _ = q.shape
    if group > 8:  # the copy engine copies heads in tiles of eight
        q = pad_axis(q, 1, 8)
    shape = _shape(q, rows)
    if plan is None:
        make = make_plan_on_gpu if row_count <= MOST_ROWS else make_plan
        plan = plan_for("mosaic_gpu", shape, rows.lengths, make)
    spec = spec_of(
        q,
        rows.k_pages,
        settings or settings_of("mosaic_gpu", shape),
        tile=plan.tile,
        programs=plan.programs,
        **static,
    )
    heads = query_operands(q, spec)
    if interpret is not None:
        # The interpreter does not zero-fill boxes that extend outside an array.
        heads = pad_axis(heads, 2, spec.columns)
    results = _results(spec, plan, rows, attend(spec, plan, heads, rows, interpret), interpret)
    return tuple(x[:, :group] for x in results)


def mma(q, rows: Rows, plan, *, interpret=None, **static):
    """Computes `decode_attention` with Ampere's products; returns a tuple of results."""
    from pallas_kernels.decode.mma import attend

    shape = _shape(q, rows)
    if plan is None:
        plan = plan_for("mosaic_mma", shape, rows.lengths)
    spec = spec_of(
        q,
        rows.k_pages,
        settings_of("mosaic_mma", shape),
        tile=plan.tile,
        programs=plan.programs,
        copies=False,
        **static,
    )
    heads = jnp.pad(q, ((0, 0), (0, spec.columns - spec.group), (0, 0)))
    return _results(spec, plan, rows, attend(spec, plan, heads, rows, interpret), interpret)


def _results(spec: Spec, plan, rows: Rows, attended, interpret):
    """Merges what programs wrote; returns the requested results, in natural logarithms."""
    from pallas_kernels.decode.combine import combine

    out, lse, partials, partial_lse, scores = attended
    out, lse = combine(spec, plan, partials, partial_lse, out, lse, interpret)
    results = [_transpose(out, spec) if spec.transposed else out]
    if spec.return_lse:
        results.append(lse[:, : spec.group] / LOG2_E)
    if spec.return_scores:
        scores = scores[:, : rows.slots, : spec.group].swapaxes(1, 2) / LOG2_E
        results.append(_mask_unread(scores, rows.lengths))
    return tuple(results)


def _round(x, finfo):
    """Rounds float32 to a dtype of fewer bits; XLA may drop a plain conversion there and back."""
    rounded = lax.reduce_precision(x, exponent_bits=finfo.nexp, mantissa_bits=finfo.nmant)
    # It turns subnormal numbers into zeros.
    unit = float(finfo.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(finfo.tiny), jnp.round(x / unit) * unit, rounded)


def query_operands(q, spec: Spec):
    """Writes queries as operands of the matrix unit (see `operands`), [parts, R, G, D].

    float8 operands clamp values out of their range; together they reach 65408.
    """
    if not spec.scaled:
        return q.astype(spec.query)[None]
    finfo = jnp.finfo(spec.query)

    def within(x):
        return jnp.clip(x, float(finfo.min), float(finfo.max))

    rest, pieces = q.astype(jnp.float32), []
    for _ in range(spec.query_parts - 1):
        rounded = _round(within(rest), finfo)
        pieces.append(rounded)
        rest = (rest - rounded) / QUERY_STEP
    rest = within(rest)
    # One kernel, which writes each operand to its place.
    part = lax.broadcasted_iota(jnp.int32, (spec.query_parts, 1, 1, 1), 0)
    return functools.reduce(
        lambda later, at: jnp.where(part == at, pieces[at], later),
        reversed(range(spec.query_parts - 1)),
        jnp.broadcast_to(rest, (spec.query_parts, *q.shape)),
    ).astype(spec.query)


def _transpose(out, spec: Spec):
    """Transposes results written as blocks of O^T, [R, out_rows, N], to [R, G, D]."""
    # Blocks may overlap; keep the rows of each that the previous one lacks.
    kept, offset, covered = [], 0, 0
    for start, size in spec.blocks:
        kept.append(out[:, offset + covered - start : offset + size, : spec.group])
        offset, covered = offset + size, start + size
    return jnp.concatenate(kept, axis=1).swapaxes(1, 2)


def _mask_unread(scores, lengths):
    """Sets scores of unread slots to -inf; the kernels leave them unwritten."""
    slot = jnp.arange(scores.shape[-1])
    return jnp.where(slot < lengths[:, None, None], scores, -jnp.inf)
