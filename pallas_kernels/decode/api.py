"""`decode_attention`: one new token of each sequence against its rows of pages.

A row is the cache of one KV head of one sequence: a list of pages and a length. Its G query heads
attend only to the row's first `length` slots. Rows may differ in length, and no work is spent on
padding.
"""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.decode import gpu, reference
from pallas_kernels.decode.plan import DecodePlan
from pallas_kernels.decode.rows import Rows
from pallas_kernels.dispatch import (
    Implementation,
    Operation,
    deferred,
    target_gpu,
)

_FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn),)

OPERATION = Operation(
    "decode_attention",
    (
        Implementation("mosaic_gpu", "cuda", gpu.mosaic, gpu.why_not_mosaic),
        Implementation("mosaic_mma", "cuda", gpu.mma, gpu.why_not_mma),
        deferred("mosaic_tpu", "tpu", "pallas_kernels.decode.tpu", "decode_attention_tpu"),
        Implementation("xla", None, reference.decode_attention_xla),
    ),
)


def decode_attention(
    q: Float[Array, "R G D"],
    k_pages: Shaped[Array, "N P _"],
    v_pages: Shaped[Array, "NV P _"],
    page_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    *,
    scale: float,
    return_lse: bool = False,
    return_scores: bool = False,
    k_scales: Float[Array, "N P"] | None = None,
    v_scales: Float[Array, "N P"] | None = None,
    plan: DecodePlan | None = None,
    sinks: Float[Array, "R G"] | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Array | tuple[Array, ...]:
    """Computes the attention of single queries over rows of pages.

    Args:
      q: the G query heads of each row.
      k_pages: key pages of the pool; `page_table` assigns them to rows.
      v_pages: value pages of the pool, of the same dtype; must include all pages in live table
        entries.
      page_table: page numbers of each row, integers. Entries from ceil(length / P) on are never
        read and may have any value.
      lengths: number of live slots of each row, integers, 0 to M * P. A row of length 0 gives
        zeros.
      scale: factor on the scores, usually D ** -0.5.
      return_lse: also return the natural log-sum-exp of the scores, to merge partial attentions;
        -inf for a row of length 0.
      return_scores: also return the scaled scores before the softmax, one per logical slot, -inf
        at unread slots. The attention weights are `exp(scores - lse)`.
      k_scales: with float8 (e4m3) pages, the factor of each slot's key. Dequantized numbers must
        lie within q's dtype, to which most implementations round them.
      v_scales: the same for values; positive, and on Hopper at least 2^-100.
      plan: the plan from `decode_plan` for these lengths (index a plan of several layers by layer
        first); None computes it here. Ignored on platforms whose kernel needs no plan.
      sinks: a sink logit of each query head, which takes part in its softmax like one more slot
        with value 0; the log-sum-exp includes it. None for none.
      soft_cap: c, if scores s become c tanh(s / c); None without a cap. Only "xla" supports it, and
        `implementation=None` then chooses it.
      implementation: "mosaic_gpu", "mosaic_mma", "mosaic_tpu" or "xla"; None chooses the best one
        for the platform of the lowering.

    Returns:
      o [R, G, D] in q's dtype; a tuple with lse [R, G] and then scores [R, G, M * P] (float32, or
      float64 for float64 inputs) if requested.

    Raises:
      ValueError: shapes or dtypes disagree, or an implementation is unknown.
      NotImplementedError: the implementation cannot serve the call.
    """
    rows = Rows(k_pages, v_pages, page_table, lengths, k_scales, v_scales)
    _check(q, rows, scale)
    _check_plan(plan, rows=q.shape[0])
    table, lengths = (x.astype(jnp.int32) for x in (page_table, lengths))
    rows = dataclasses.replace(rows, page_table=table, lengths=lengths)
    options: dict[str, Any] = {
        "scale": float(scale),
        "return_lse": return_lse or sinks is not None,
        "return_scores": return_scores,
    }
    if soft_cap is not None:
        options["soft_cap"] = float(soft_cap)
        implementation = OPERATION.xla_alone(implementation, "a soft cap")
    results = OPERATION(implementation, q, rows, plan, **options)
    if sinks is not None:
        if sinks.shape != q.shape[:2]:
            raise ValueError(f"decode_attention: sinks must be {q.shape[:2]}, got {sinks.shape}")
        out, lse, *scores = results
        sinks = sinks.astype(lse.dtype)
        out = (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype)
        results = (out, *[jnp.logaddexp(lse, sinks)] * return_lse, *scores)
    return results if return_lse or return_scores else results[0]


def decode_plan(
    lengths: Int[Array, "*L R"],
    *,
    columns: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    implementation: str | None = None,
) -> DecodePlan:
    """Splits the rows of a decode step among the programs of a GPU, for all calls on these rows.

    Args:
      lengths: number of live slots of each row. Leading axes (layers) are independent steps, and
        indexing the plan's arrays by them gives the plan of each step.
      columns: M, the width of the page table.
      page_size: P, the number of slots in a page.
      head_dim: D, the head dim.
      dtype: dtype of the pages.
      implementation: see `decode_attention`.

    Returns:
      The plan for the `plan` argument of `decode_attention`.
    """
    hopper = target_gpu().capability == (9, 0)
    name = "mosaic_gpu" if hopper and implementation in (None, "mosaic_gpu") else "mosaic_mma"
    shape = gpu.Shape(lengths.shape[-1], head_dim, page_size, columns, dtype)
    return gpu.plan_for(name, shape, lengths)


def _check(q, rows: Rows, scale) -> None:
    def fail(text):
        raise ValueError(f"decode_attention: {text}")

    values = {"q": q} | vars(rows)
    k_pages, v_pages, page_table, lengths = (
        rows.k_pages,
        rows.v_pages,
        rows.page_table,
        rows.lengths,
    )
    ranks = {"q": 3, "k_pages": 3, "v_pages": 3, "page_table": 2, "lengths": 1}
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
        for name in ("k_scales", "v_scales"):
            if (scales := values[name]) is None or scales.shape != k_pages.shape[:2]:
                got = None if scales is None else scales.shape
                fail(f"float8 pages need {name} of shape {k_pages.shape[:2]}, got {got}")
    else:
        if k_pages.dtype != q.dtype:
            fail(f"q {q.dtype} and pages {k_pages.dtype} must have one dtype, or float8 pages")
        if rows.k_scales is not None or rows.v_scales is not None:
            fail(f"scales belong to float8 pages, these are {k_pages.dtype}")
    if not isinstance(scale, numbers.Real):
        fail(f"scale must be a number known while tracing, got {type(scale).__name__}")


def _check_plan(plan: DecodePlan | None, rows: int) -> None:
    """Refuses a plan of several layers, or with too few rows."""
    if plan is None:
        return
    shapes, least = (plan.tile_starts.shape, plan.edge_rows.shape), (rows + 1, 2 * plan.programs)
    for shape, size in zip(shapes, least, strict=True):
        if len(shape) != 1 or shape[0] < size:
            raise ValueError(
                f"decode_attention: the plan's arrays {shapes} are not those of one step of "
                f"{rows} rows"
            )
