"""TriAttention's scores with calibrated centres, and files of centres."""

import dataclasses
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dms_jax
from dms_jax.errors import ConfigError
from dms_jax.policies.values import Chunk, Decisions, Extended, PolicyState, Rows, Static, Tokens
from dms_jax.training import calibrate_queries
from tests.generation.support import stories
from tests.oracles import rope, scored

LAYERS, GROUP, HEADS, DIM, THETA = 3, 2, 2, 8, 100.0
PROMPT, SEEN, LAYER = 4, 21, 1


@pytest.fixture
def centres(tmp_path):
    """A file of random centres, and its arrays."""
    random = np.random.default_rng(5)
    planes = random.normal(size=(LAYERS, GROUP * HEADS, 30, DIM)) + 0.7
    low, high = np.split(planes, 2, axis=-1)
    arrays = {"mean": planes.mean(2), "norm": np.hypot(low, high).mean(2)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    save_file(arrays, tmp_path / "centres.safetensors")
    return str(tmp_path / "centres.safetensors"), arrays


def chunk_at(position, factor=1.0) -> Chunk:
    """A decode step of one sequence in which the token at a position attends."""
    cos, sin = (factor * x for x in rope.angles([position], DIM, THETA))
    zeros = jnp.zeros((1, 1, HEADS, DIM))
    tokens = Tokens(
        q=jnp.zeros((1, 1, GROUP * HEADS, DIM)),
        k=zeros,
        v=zeros,
        positions=jnp.array([[position]]),
        layer=jnp.array(LAYER),
    )
    frequencies = THETA ** (-np.arange(0, DIM, 2) / DIM)
    return Chunk(
        tokens=tokens,
        decisions=Decisions(),
        rotation=(jnp.asarray(cos[None]), jnp.asarray(sin[None])),
        count=jnp.array([1]),
        page_table=jnp.zeros((1, HEADS, 1), jnp.int32),
        lengths=jnp.full((1, HEADS), position),
        static=Static(num_layers=LAYERS, frequencies=tuple(frequencies)),
    )


def scores_of(policy, k, factor=1.0):
    """Scores of all tokens of a row, with keys k [S, K, D] rotated with a factor."""
    keys = jnp.asarray(np.moveaxis(factor * k, 0, 1)[None])
    state = PolicyState(rows=Extended(jnp.full((1, HEADS), PROMPT)))
    rows = Rows(k=keys, v=keys, lengths=jnp.full((1, HEADS), SEEN))
    return np.asarray(policy.scores(state, chunk_at(SEEN - 1, factor), rows))[0]


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_calibrated_scores_equal_the_published_sum(centres, factor):
    """Yarn's rotation factor applies to queries and keys, so it is squared."""
    path, arrays = centres
    k = np.random.default_rng(6).normal(size=(SEEN, HEADS, DIM))
    mean, norm = (arrays[name][LAYER].astype(np.float64) for name in ("mean", "norm"))
    worth = scored.triattention(
        np.zeros((SEEN, GROUP * HEADS, DIM)),
        k,
        prompt_length=PROMPT,
        theta=THETA,
        furthest=2**16,
        centres=lambda head, seen: (mean[head, :4] + 1j * mean[head, 4:], norm[head]),
    )
    want = np.stack(worth(SEEN - 1, [list(range(SEEN))] * HEADS))
    policy = dms_jax.TriAttention(statistics=path)
    got = scores_of(policy, k, factor)
    assert (got[:, :PROMPT] == np.inf).all()
    chex.assert_trees_all_close(got[:, PROMPT:], factor**2 * want[:, PROMPT:], rtol=1e-4, atol=1e-4)


def test_centres_are_arguments_of_programs(centres, tmp_path):
    """A rewritten file is reread, also by a program stored on disk."""
    path, arrays = centres
    policy = dms_jax.TriAttention(statistics=path)
    leaves, tree = jax.tree.flatten(policy)
    assert {leaf.shape for leaf in leaves if np.ndim(leaf)} == {x.shape for x in arrays.values()}
    assert jax.tree.unflatten(tree, leaves) == policy
    on_device = jax.device_put(policy)
    assert jax.tree.structure(on_device) == tree
    k = np.random.default_rng(6).normal(size=(SEEN, HEADS, DIM))
    before = scores_of(policy, k)
    chex.assert_trees_all_equal(scores_of(on_device, k), before)
    save_file({name: 2 * array for name, array in arrays.items()}, path)
    os.utime(path, (0, 0))
    chex.assert_trees_all_close(scores_of(policy, k), 2 * before, rtol=1e-6)
    chex.assert_trees_all_equal(jax.tree.leaves(policy)[-1], 2 * jax.tree.leaves(on_device)[-1])


def test_wrong_files_are_refused(centres, tmp_path):
    _, arrays = centres
    (tmp_path / "no.safetensors").write_bytes(b"{}")
    save_file({"mean": arrays["mean"]}, tmp_path / "half.safetensors")
    for name, said in (
        ("nowhere", r"no file .*nowhere.*calibrate_queries"),
        ("no", "is not a safetensors file"),
        ("half", r"not mean \[L, H, D\] and norm"),
    ):
        policy = dms_jax.TriAttention(statistics=str(tmp_path / f"{name}.safetensors"))
        with pytest.raises(ConfigError, match=said):
            jax.tree.leaves(policy)
    other = {name: array[:2] for name, array in arrays.items()}
    save_file(other, tmp_path / "other.safetensors")
    policy = dms_jax.TriAttention(statistics=str(tmp_path / "other.safetensors"))
    with pytest.raises(ConfigError, match="has centres of 2 layers with 4 heads of 8"):
        scores_of(policy, np.ones((SEEN, HEADS, DIM)))


@pytest.mark.nightly
def test_centres_equal_those_of_the_models_queries(tmp_path):
    """The policy gathers the same centres when it reads the same text."""
    model = stories()
    tokens = np.random.default_rng(0).integers(3, 500, (2, 40))
    policy = calibrate_queries(model, tokens, tmp_path / "deep" / "queries.safetensors")
    assert policy == dms_jax.TriAttention(statistics=str(tmp_path / "deep/queries.safetensors"))
    first = calibrate_queries(model, tokens[:1], tmp_path / "first.safetensors")
    second = calibrate_queries(model, tokens[1:], tmp_path / "second.safetensors")
    both, one, other = (load_file(each.statistics) for each in (policy, first, second))
    for name in both:
        chex.assert_trees_all_close(both[name], (one[name] + other[name]) / 2, rtol=1e-5, atol=1e-6)
    config = model.config
    assert both["mean"].shape == (config.num_layers, config.num_heads, config.head_dim)
    low, high = np.split(one["mean"], 2, axis=-1)
    assert (one["norm"] >= np.hypot(low, high) - 1e-6).all()
    # With these centres the policy runs and cuts.
    small = dataclasses.replace(policy, budget=12, interval=8)
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=40)
    out = dms_jax.generate(model, [[1, 5, 9]], policy=small, sampling=sampling)
    assert 12 <= out.usage.live_tokens < 43
    assert out.usage.peak_tokens <= 12 + 3 + 8


@pytest.mark.parametrize(
    ("prompt", "seen", "held", "counts_prompt", "due"),
    [
        (4, 16, 16, False, True),  # 12 beside the prompt fill the budget of 12
        (4, 15, 16, False, False),  # no multiple of the interval
        (4, 16, 15, False, False),
        (4, 16, 12, True, True),
        (4, 16, 11, True, False),
        (12, 40, 40, False, False),  # the prompt alone fills the budget; no cut
    ],
)
def test_rows_are_cut_at_multiples_of_the_interval(prompt, seen, held, counts_prompt, due):
    policy = dms_jax.TriAttention(budget=12, interval=4, counts_prompt=counts_prompt)
    state = PolicyState(rows=Extended(jnp.full((1, HEADS), prompt)))
    chunk = chunk_at(seen - 1)
    assert policy.due(state, jnp.full((1, HEADS), held), chunk).tolist() == [due]
