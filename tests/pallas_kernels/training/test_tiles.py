"""The plans of the training kernels, score by score: zones, visited blocks, memory."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.training import gpu_key_gradient, gpu_tiles, tpu_blocks
from pallas_kernels.training.inputs import Inputs

DTYPES = ("bfloat16", "float32")
WINDOWS = [0, 1, 63, 64, 65, 100, 191, 300, 10**6]


def distances(q0, rows, k0, keys):
    return (q0 + np.arange(rows))[:, None] - (k0 + np.arange(keys))


def all_zones(zones, starts):
    """The zones of tiles that start at these places, as lists of integers."""
    found = jax.vmap(zones)(starts)
    return np.stack([np.broadcast_to(each, starts.shape) for each in found], axis=1).tolist()


@pytest.mark.parametrize(
    ("rows", "block"), [(64, 16), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128)]
)
def test_gpu_zones_match_token_distances(rows, block):
    starts = np.arange(0, 512, rows, dtype=np.int32)
    for window, first in itertools.product(WINDOWS, (0, 1)):
        zones = all_zones(
            lambda q0, window=window, first=first: gpu_tiles.key_zones(
                q0, rows, window, block, jnp.int32(first)
            ),
            starts,
        )
        for q0, (far, boundary, near, end) in zip(starts.tolist(), zones, strict=True):
            assert first <= far <= boundary <= near <= max(end, first)
            for tile in range(first, 2 * 512 // block):
                away = distances(q0, rows, tile * block, block)
                if tile < far:
                    assert (away > window).all()
                elif tile < near:
                    assert (away >= 0).all()
                    if tile >= boundary:
                        assert (away <= window).all()
                # Exactly the visible tiles are visited.
                assert (away >= 0).any() == (tile < end)


@pytest.mark.parametrize(("keys", "block"), [(64, 16), (64, 32), (64, 64), (128, 64)])
def test_query_zones_match_token_distances(keys, block):
    count = 512 // block
    starts = np.arange(-280, 768, 7, dtype=np.int32)  # keys before, among and after the queries
    for window in (*WINDOWS, 77, 125):
        zones = all_zones(
            lambda k0, window=window: gpu_key_gradient.query_zones(
                keys, window, block, k0, jnp.int32(count)
            ),
            starts,
        )
        kinds = gpu_key_gradient.query_kinds(keys, window, block)
        for k0, (first, *ends) in zip(starts.tolist(), zones, strict=True):
            assert 0 <= first <= ends[0] <= ends[1] <= ends[2] <= ends[3] == count
            for tile in range(count):
                away = distances(tile * block, block, k0, keys)
                if tile < first:
                    assert (away < 0).all()
                    continue
                bias, causal = kinds[sum(tile >= end for end in ends[:3])]
                assert causal or (away >= 0).all()
                assert bias == "select" or ((away > window) == (bias == "all")).all()


def sorted_segments(random, batch, length):
    """Documents in order, as packed: 1, 1, 1, 2, 2, 3, ..."""
    return np.cumsum(random.random((batch, length)) < 0.015, axis=1) + 1


def meeting(segments, rows, columns):
    """Whether two blocks have tokens of one document, [B, R, C]."""
    batch, length = segments.shape
    shared = np.zeros((batch, length // rows, length // columns), bool)
    for b, i, j in np.ndindex(shared.shape):
        own = segments[b, i * rows : (i + 1) * rows]
        other = segments[b, j * columns : (j + 1) * columns]
        shared[b, i, j] = bool(set(own.tolist()) & set(other.tolist()))
    return shared


@pytest.mark.parametrize(("rows", "columns"), [(64, 16), (64, 64), (64, 128), (128, 64)])
def test_blocks_of_one_document_are_visited(rows, columns):
    random = np.random.default_rng(rows + 2 * columns)
    segments = sorted_segments(random, 3, 1024)
    found = gpu_tiles.segment_overlap(*[jnp.asarray(segments, jnp.int32)] * 2, rows, columns)
    chex.assert_trees_all_equal(found, meeting(segments, rows, columns))
    # With padding (0) at the end, blocks may be visited needlessly, but none is missed.
    segments[:, 900:] = 0
    found = gpu_tiles.segment_overlap(*[jnp.asarray(segments, jnp.int32)] * 2, rows, columns)
    assert (np.asarray(found) >= meeting(segments, rows, columns)).all()


def tpu_problem(T=1024, H=8, K=2, D=128, window=100, dtype="bfloat16", packed=False):
    q, k = (jax.ShapeDtypeStruct((1, T, heads, D), jnp.dtype(dtype)) for heads in (H, K))
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32) if packed else None
    return tpu_blocks.Problem.make(Inputs(q, k, k, None, segments), window, 1.0, False)


def zone_of(problem, query, key, monkeypatch):
    """The options with which a visible block's body is called, exactly once."""
    calls = []
    monkeypatch.setattr(tpu_blocks.pl, "when", lambda holds: lambda body: body() if holds else None)
    block = np.int32(query), np.int32(key)
    tpu_blocks.by_zone(problem, *block, np.True_, lambda **kind: calls.append(kind))
    (kind,) = calls
    return kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_tpu_zones_match_token_distances(dtype, monkeypatch):
    """Except for mixed zones, whose body masks every score."""
    for window in WINDOWS:
        problem = tpu_problem(window=window, dtype=dtype)
        kinds = set()
        for query, key in np.ndindex(problem.T // problem.query, problem.T // problem.keys):
            kind = zone_of(problem, query, key, monkeypatch)
            away = distances(query * problem.query, problem.query, key * problem.keys, problem.keys)
            if not kind["masked"]:
                assert (away >= 0).all()
                assert (away > problem.window if kind["bias"] else away <= problem.window).all()
            kinds.add(tuple(kind.values()))
        assert (True, True) in kinds  # the diagonal
        assert ((True, False) in kinds) == (window <= 300)
        assert ((False, False) in kinds) == (window >= 10**6)
