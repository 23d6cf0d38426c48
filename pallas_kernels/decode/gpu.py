"""Decode attention on NVIDIA GPUs: what the kernels can serve, and the steps around them."""

import jax.numpy as jnp

from pallas_kernels.decode.combine import combine
from pallas_kernels.decode.mosaic import attend
from pallas_kernels.decode.plan import make_plan
from pallas_kernels.decode.spec import LOG2_E, Spec


def _split(q, operand, parts):
    """Write float32 queries as a sum of operands, [parts, R, G, D]."""
    pieces, rest = [], q
    for _ in range(parts):
        pieces.append(rest.astype(operand))
        rest = rest - pieces[-1].astype(q.dtype)
    return jnp.stack(pieces)


def decode_attention_mosaic(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    k_scales=None,
    v_scales=None,
    plan=None,
    *,
    scale,
    return_lse=False,
    return_scores=False,
    stages=2,
    programs=264,
    interpret=None,
):
    """Serve as the Mosaic GPU form of `decode_attention`; returns a tuple of results."""
    rows, group, head_dim = q.shape
    page_size = k_pages.shape[1]
    tile = max(64, page_size)
    if plan is None:
        plan = make_plan(lengths, tile=tile, programs=programs)
    spec = Spec(
        rows=rows,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        pages_dtype=k_pages.dtype,
        dtype=q.dtype,
        tile=plan.tile,
        stages=stages,
        programs=plan.programs,
        scale=scale,
        return_lse=return_lse,
        return_scores=return_scores,
    )
    heads = _split(q, spec.operand, spec.parts) if spec.parts > 1 else q[None]
    if interpret is not None:
        # The interpreter does not fill boxes that reach outside an array.
        heads = jnp.pad(heads, ((0, 0), (0, 0), (0, spec.columns - group), (0, 0)))
    slots = page_table.shape[1] * page_size
    padded = -(-slots // spec.tile) * spec.tile
    scales = () if k_scales is None else (k_scales, v_scales)
    out, lse, partials, partial_lse, scores = attend(
        spec, plan, lengths, page_table, heads, (k_pages, v_pages), scales, padded, interpret
    )
    out, lse = combine(spec, plan, partials, partial_lse, out, lse, interpret)
    if spec.transposed:
        # Blocks of O^T may overlap: keep of each what the one before it lacks.
        kept, offset, covered = [], 0, 0
        for start, size in spec.blocks:
            kept.append(out[:, offset + covered - start : offset + size, :group])
            offset, covered = offset + size, start + size
        out = jnp.concatenate(kept, axis=1).swapaxes(1, 2)
    results = [out]
    if return_lse:
        results.append(lse[:, :group] / LOG2_E)
    if return_scores:
        valid = jnp.arange(slots) < lengths[:, None]
        scores = scores[:, :slots, :group].swapaxes(1, 2) / LOG2_E
        results.append(jnp.where(valid[:, None, :], scores, -jnp.inf))
    return tuple(results)
