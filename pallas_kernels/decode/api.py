"""`decode_attention`: one new token of each sequence against its rows of pages.

A row is what one KV head of one sequence remembers: a list of pages and a length. Its G query heads
attend to the row's first `length` slots and to nothing else. Rows differ in length, and no work is
spent on the difference.
"""

import numbers

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.debug import check_pages
from pallas_kernels.decode import gpu, reference
from pallas_kernels.decode.plan import DecodePlan
from pallas_kernels.dispatch import (
    Implementation,
    ImplementationChoice,
    Operation,
    deferred,
    target_gpu,
)

_FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn),)

OPERATION = Operation(
    "decode_attention",
    (
        Implementation("mosaic_gpu", "cuda", gpu.mosaic, gpu.why_not_mosaic),
        Implementation("triton", "cuda", gpu.triton, gpu.why_not_triton),
        Implementation(
            "mosaic_tpu",
            "tpu",
            deferred("pallas_kernels.decode.tpu", "decode_attention_tpu"),
            deferred("pallas_kernels.decode.tpu", "why_not"),
        ),
        Implementation("xla", None, reference.decode_attention_xla),
    ),
)


def decode_attention(
    q: Float[Array, "R G D"],
    k_pages: Float[Array, "N P D"],
    v_pages: Float[Array, "NV P D"],
    page_table: Int[Array, "R M"],
    lengths: Int[Array, "R"],
    *,
    scale: float,
    return_lse: bool = False,
    return_scores: bool = False,
    k_scales: Float[Array, "N P"] | None = None,
    v_scales: Float[Array, "N P"] | None = None,
    plan: DecodePlan | None = None,
    debug: bool = False,
    implementation: ImplementationChoice = None,
) -> Array | tuple[Array, ...]:
    """Attention of single queries over rows of pages.

    Args:
      q: the G query heads of each row.
      k_pages: key pages of the pool; page_table picks a row's.
      v_pages: value pages of the pool, of the same dtype; as many as the table names, at least.
      page_table: page numbers of each row, int32. Entries beyond ceil(length / P) are never read
        and may hold any value.
      lengths: live slots of each row, 0 to M * P, int32. A row of length 0 gives zeros.
      scale: factor of the scores, usually D ** -0.5.
      return_lse: also return the natural log-sum-exp of the scores, to merge partial attentions;
        -inf for a row of length 0.
      return_scores: also return the scaled scores before the softmax, one per logical slot, -inf
        at unread slots. `exp(scores - lse)` are the attention weights.
      k_scales: with float8 (e4m3) pages, the factor of each slot's key.
      v_scales: with float8 pages, the factor of each slot's value.
      plan: the split of the work from `decode_plan` for these lengths (a plan of layers indexed
        by the layer); None makes it here. On
        platforms whose kernel needs none it has no effect.
      debug: check that every live table entry is a page of the pool and that lengths fit the
        table. On concrete arrays this raises before anything is launched; under `jax.jit` it is a
        `checkify.check`, so wrap the function in `checkify.checkify`.
      implementation: None picks by the platform the call is lowered for; a name ("mosaic_gpu",
        "triton", "mosaic_tpu", "xla") forces one; a sequence of names is tried in order.

    Returns:
      o [R, G, D] in q's dtype; a tuple with lse [R, G] and then scores [R, G, M * P] (float32, or
      float64 for float64 inputs) where asked.

    Raises:
      ValueError: shapes or dtypes that disagree, or an unknown implementation; in debug mode a page
        index or a length out of range.
      NotImplementedError: the implementations asked for cannot serve the call.
    """
    _check(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales, scale)
    _check_plan(plan, rows=q.shape[0])
    if debug:
        pages = min(k_pages.shape[0], v_pages.shape[0])
        check_pages("decode_attention", page_table, lengths, pages, k_pages.shape[1])
    results = OPERATION(
        implementation,
        q,
        k_pages,
        v_pages,
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        k_scales,
        v_scales,
        plan,
        scale=float(scale),
        return_lse=return_lse,
        return_scores=return_scores,
    )
    return results if return_lse or return_scores else results[0]


def decode_plan(
    lengths: Int[Array, "*L R"],
    *,
    columns: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    implementation: ImplementationChoice = None,
) -> DecodePlan:
    """Split the rows of a decode step among the programs of a GPU, once for all calls on them.

    Args:
      lengths: live slots of each row; leading axes (layers) are independent steps, and indexing
        the plan's arrays by them gives the plan of each.
      columns: M of the page table.
      page_size: P.
      head_dim: D.
      dtype: dtype of the pages.
      implementation: as for `decode_attention`.

    Returns:
      What `decode_attention` takes as `plan`.
    """
    allowed = [candidate.name for candidate in OPERATION.candidates(implementation)]
    hopper = target_gpu().capability == (9, 0)
    name = "mosaic_gpu" if "mosaic_gpu" in allowed and hopper else "triton"
    rows = lengths.shape[-1]
    return gpu.plan_for(name, rows, head_dim, page_size, columns, dtype, lengths)


def _check(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales, scale) -> None:
    def fail(text):
        raise ValueError(f"decode_attention: {text}")

    ranks = {"q": 3, "k_pages": 3, "v_pages": 3, "page_table": 2, "lengths": 1}
    values = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "lengths": lengths,
    }
    for name, rank in ranks.items():
        if values[name].ndim != rank:
            fail(f"{name} must have {rank} axes, has shape {values[name].shape}")
    if k_pages.shape[1:] != v_pages.shape[1:]:
        fail(f"pages of k_pages {k_pages.shape} and v_pages {v_pages.shape} must have one shape")
    if k_pages.dtype != v_pages.dtype:
        fail(f"k_pages {k_pages.dtype} and v_pages {v_pages.dtype} must have one dtype")
    if q.shape[2] != k_pages.shape[2]:
        fail(f"head dim of q {q.shape} and of k_pages {k_pages.shape} must be the same")
    if not q.shape[0] == page_table.shape[0] == lengths.shape[0]:
        fail(
            f"q {q.shape}, page_table {page_table.shape} and lengths {lengths.shape} must have "
            "the same number of rows"
        )
    if 0 in (*q.shape, *k_pages.shape, *page_table.shape):
        fail(f"empty axis: q {q.shape}, k_pages {k_pages.shape}, page_table {page_table.shape}")
    for name in ("page_table", "lengths"):
        if not jnp.issubdtype(values[name].dtype, jnp.integer):
            fail(f"{name} must hold integers, has dtype {values[name].dtype}")
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype in _FLOAT8:
        fail(f"q must be bfloat16, float16, float32 or float64, has dtype {q.dtype}")
    if k_pages.dtype in _FLOAT8:
        for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
            if scales is None or scales.shape != k_pages.shape[:2]:
                got = None if scales is None else scales.shape
                fail(f"float8 pages need {name} of shape {k_pages.shape[:2]}, got {got}")
    else:
        if k_pages.dtype != q.dtype:
            fail(f"q {q.dtype} and pages {k_pages.dtype} must have one dtype, or float8 pages")
        if k_scales is not None or v_scales is not None:
            fail(f"scales belong to float8 pages, these are {k_pages.dtype}")
    if not isinstance(scale, numbers.Real):
        fail(f"scale must be a number known while tracing, got {type(scale).__name__}")


def _check_plan(plan: DecodePlan | None, rows: int) -> None:
    """Refuse a plan of several layers, or of fewer rows."""
    if plan is None:
        return
    shapes, least = (plan.tile_starts.shape, plan.edge_rows.shape), (rows + 1, 2 * plan.programs)
    for shape, size in zip(shapes, least, strict=True):
        if len(shape) != 1 or shape[0] < size:
            raise ValueError(
                f"decode_attention: the plan's arrays {shapes} are not those of one step of "
                f"{rows} rows"
            )
