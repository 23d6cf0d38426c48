"""Inputs and the NumPy oracle of training attention, from the paper's equations."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from pallas_kernels import retrofit_attention
from pallas_kernels.training.inputs import Inputs
from tests.pallas_kernels.support import TOLERANCE, sinks_of

RESULTS = ("output", "dq", "dk", "dv", "dbias", "dsinks")


def draw(case, seed=0, dtype=None):
    """Draws q, k, v, bias, do (NumPy, rounded to the case's dtype) and segment ids or None."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = dtype or case.dtype

    def normal(*shape):
        return rng.standard_normal(shape)

    logits = 2.0 * normal(case.B, case.K, case.T)
    bias = {
        "soft": -np.log1p(np.exp(logits)),
        "hard": np.where(logits > 0, -0.01, -40.0),
        "evicted": np.where(logits > 0, 0.0, -np.inf),
    }[case.bias]
    inputs = {
        "q": case.query_scale * normal(case.B, case.T, case.H, case.D),
        "k": normal(case.B, case.T, case.K, case.D),
        "v": normal(case.B, case.T, case.K, case.D),
        "do": normal(case.B, case.T, case.H, case.D),
    }
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    inputs["bias"] = bias.astype("float64" if dtype == "float64" else "float32")
    segments = None
    if case.segments:
        starts = rng.random((case.B, case.T)) < 1.0 / case.segments
        segments = np.cumsum(starts, axis=1).astype(np.int32)
    return inputs, segments


def operands(inputs, segments):
    """Converts a case's arguments to those of the kernels."""
    arrays = (jnp.asarray(inputs[name]) for name in ("q", "k", "v", "bias"))
    return Inputs(*arrays, None if segments is None else jnp.asarray(segments))


def structs(case, *, queries=None):
    """Shapes of q, k, v, bias, do and, if given, segment ids and the place of the queries."""
    q, kv = (case.B, queries or case.T, case.H, case.D), (case.B, case.T, case.K, case.D)
    shapes = {"q": q, "k": kv, "v": kv, "do": q}
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.dtype(case.dtype)) for n, s in shapes.items()}
    arrays["bias"] = jax.ShapeDtypeStruct((case.B, case.K, case.T), jnp.float32)
    if case.segments:
        arrays["segments"] = jax.ShapeDtypeStruct((case.B, case.T), jnp.int32)
    if queries:
        arrays["start"] = jax.ShapeDtypeStruct((), jnp.int32)
    return arrays


def both(case, implementation):
    """Forward and backward as one function of the arrays of `structs`: output and gradients."""

    def run(q, k, v, bias, do, segments=None, start=None, sinks=None):
        def forward(q, k, v, bias, sinks):
            return retrofit_attention(
                q,
                k,
                v,
                bias,
                window=case.window,
                scale=case.D**-0.5,
                segment_ids=segments,
                start=start,
                sinks=sinks,
                soft_cap=case.soft_cap,
                implementation=implementation,
            )

        output, pullback = jax.vjp(forward, q, k, v, bias, sinks)
        return output, *jax.tree.leaves(pullback(do))

    return run


def in_pieces(inputs, do, run, cuts):
    """Output and gradients of a row whose queries attend in pieces, each at its place.

    `run(inputs, do)` returns those of one piece; gradients of keys add up.
    """
    ends = [*cuts, inputs.q.shape[1]]
    results = []
    for start, end in zip([0, *cuts], ends, strict=True):
        own = None if inputs.segments is None else inputs.segments[:, start:end]
        piece = dataclasses.replace(
            inputs, q=inputs.q[:, start:end], start=jnp.int32(start), query_segments=own
        )
        results.append(run(piece, do[:, start:end]))
    output, dq, *of_keys = zip(*results, strict=True)
    sums = (
        sum(jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)) for x in each)
        for each in of_keys
    )
    return jnp.concatenate(output, 1), jnp.concatenate(dq, 1), *sums


def oracle(inputs, segments, window, scale, *, sinks=None, soft_cap=None):
    """Output and gradients in float64, one sequence and one head at a time.

    The gradient of sinks, if any, is the last.
    """
    q, k, v, do, bias = (inputs[n].astype(np.float64) for n in ("q", "k", "v", "do", "bias"))
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out, dq, dk, dv, dbias = map(np.zeros_like, (q, q, k, v, bias))
    dsinks = np.zeros(heads)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    far = i - j > window
    for b in range(batch):
        seen = j <= i
        if segments is not None:
            seen = seen & (segments[b][:, None] == segments[b][None, :])
        for h in range(heads):
            n = h // group
            scores, slope = scale * q[b, :, h] @ k[b, :, n].T, 1.0
            if soft_cap is not None:
                slope = 1 / np.cosh(scores / soft_cap) ** 2
                scores = soft_cap * np.tanh(scores / soft_cap)
            scores = np.where(far, scores + bias[b, n], scores)
            scores = np.where(seen, scores, -np.inf)
            if sinks is not None:  # one more key, whose value is 0
                scores = np.concatenate([scores, np.full((length, 1), sinks[h])], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            of_sink, weights = weights[:, length:], weights[:, :length]
            out[b, :, h] = weights @ v[b, :, n]
            dp = do[b, :, h] @ v[b, :, n].T
            mean = (weights * dp).sum(axis=1, keepdims=True)
            ds = weights * (dp - mean)
            dsinks[h] -= (of_sink * mean).sum()
            dbias[b, n] += np.where(far, ds, 0).sum(axis=0)
            ds *= slope
            dq[b, :, h] = scale * ds @ k[b, :, n]
            dk[b, :, n] += scale * ds.T @ q[b, :, h]
            dv[b, :, n] += weights.T @ do[b, :, h]
    return out, dq, dk, dv, dbias, *([] if sinks is None else [dsinks])


def check(case, got, inputs, segments, tolerance=None):
    """Assert that output and gradients agree with the oracle, norm-wise."""
    tolerance = tolerance or TOLERANCE[case.dtype]
    more = dict(sinks=sinks_of(case), soft_cap=case.soft_cap)
    want = oracle(inputs, segments, case.window, case.D**-0.5, **more)
    for name, mine, true in zip(RESULTS[: len(want)], got, want, strict=True):
        mine = np.asarray(mine, np.float64)
        chex.assert_shape(mine, true.shape, custom_message=name)
        chex.assert_tree_all_finite(mine, custom_message=f"{case.name}: {name}")
        # A gradient that is zero (one token) is compared with the size of its terms.
        norm = max(np.linalg.norm(true), 1e-2 * np.sqrt(true.size))
        error = np.linalg.norm(mine - true) / norm
        assert error <= tolerance, f"{case.name}: {name} is off by {error:.2e}"
