"""Budgets: rounding of ratios to tokens, and allocation over heads and layers."""

import fractions
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from dms_jax.policies import AdaKV, Knorm, PyramidKV, RandomSelection, SnapKV
from dms_jax.policies.budget import highest
from dms_jax.policies.values import Chunk, PolicyState
from tests.support.chunks import chunk_of, tokens_of


def token(*, max_lengths=(1,), layer=0, **static) -> Chunk:
    """Returns a chunk of one token per sequence."""
    tokens = tokens_of(np.zeros((len(max_lengths), 1, 1, 2)), layer=layer)
    return chunk_of(tokens, max_lengths=max_lengths, page_size=4, **static)


@pytest.mark.parametrize("ratio", [1, 1.1, 1.6, 2.4, 2.531, 3, 3.3, 4.911, 7.7])
def test_shares_round_down_and_exact_ones_stay(ratio):
    """Compares the budget in a program with that on the host, and with exact fractions."""
    policy = Knorm(compression_ratio=ratio)
    lengths = [*range(1, 4097), *range(2**17 - 500, 2**17 + 1), 2**23]
    want = [max(1, math.floor(h / fractions.Fraction(str(ratio)))) for h in lengths]
    assert policy.budget_of(token(max_lengths=lengths))[:, 0].tolist() == want
    assert [policy.budget_for(h) for h in lengths] == want
    assert [policy.for_length(h).budget for h in lengths[::500]] == want[::500]


class HighestTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_later_of_equal_scores_stays(self):
        choose = self.variant(highest)
        scores = jnp.asarray([[[3.0, 1, 3, 2], [5, 5, 5, 5]]])
        kept = choose(scores, jnp.asarray([[1]]))
        chex.assert_trees_all_equal(kept, np.array([[[0, 0, 1, 0], [0, 0, 0, 1]]]))
        kept = choose(scores, jnp.asarray([[3, 2]]))
        chex.assert_trees_all_equal(kept, np.array([[[1, 0, 1, 1], [0, 0, 1, 1]]]))

    @chex.variants(with_jit=True, without_jit=True)
    def test_agrees_with_a_sort(self):
        """Rows with many equal scores, infinities and no value; counts from none to too many."""
        rng = np.random.default_rng(0)
        scores = rng.integers(-3, 4, (4, 3, 40)).astype(np.float32)
        scores[0, :, :30], scores[1, :, 30:] = -np.inf, np.inf
        scores[2, 1, ::7] = np.nan
        count = np.array([[0, 5, 12], [10, 11, 40], [1, 3, 6], [39, 41, 100]])
        order = np.argsort(np.where(np.isnan(scores), np.inf, scores), axis=-1, kind="stable")
        rank = np.argsort(order, axis=-1)
        kept = self.variant(highest)(jnp.asarray(scores), jnp.asarray(count))
        chex.assert_trees_all_equal(kept, rank >= 40 - count[..., None])


@pytest.mark.parametrize(
    ("alpha", "kept"),
    [
        (0.0, [[1, 1, 1, 1], [0, 0, 0, 0]]),
        (0.5, [[1, 1, 1, 0], [0, 1, 0, 0]]),
        (1.0, [[1, 1, 0, 0], [0, 1, 0, 1]]),
    ],
)
def test_heads_compete_beyond_their_guarantee(alpha, kept):
    """Two tokens per head; all scores of the first head are higher than the second's."""
    scores = jnp.asarray([[[9.0, 8, 7, 6], [1, 5, 2, 3]]])
    found = AdaKV(SnapKV(), alpha=alpha).select(scores, jnp.asarray([[2]]), token())
    chex.assert_trees_all_equal(found[0], np.array(kept))


def budgets(policy, num_layers):
    return [
        int(policy.layer_budget(token(layer=layer, num_layers=num_layers))[0, 0])
        for layer in range(num_layers)
    ]


def test_a_pyramid_by_hand():
    """64 tokens, 8 protected: 110 others in the first layer, 108 / 11 fewer in each next one."""
    policy = PyramidKV(SnapKV(budget=64, window=8, interval=16), beta=20)
    want = [118, 108, 98, 88, 78, 68, 59, 49, 39, 29, 19, 10]
    assert budgets(policy, 12) == want
    assert np.mean(want) <= 64
    footprint = policy.footprint(4096, page_size=4)
    assert footprint.at_most >= want[0] + 16  # the longest row before its cut
    assert footprint.expected == 64 + 16
    # 10 tokens: low 10 // 3 = 3, high 17, and 14 / 3 fewer per layer: 17, 12.33, 7.67, 3.
    assert budgets(PyramidKV(Knorm(budget=10), beta=3), 4) == [17, 12, 7, 3]
    assert budgets(PyramidKV(Knorm(budget=10), beta=3), 1) == [10]


@pytest.mark.parametrize(("last", "due"), [(2, False), (3, True)])
def test_rows_of_a_layer_are_due_together_on_any_mesh(last, due):
    """Lengths 9, 2, 2 and 2 or 3 on four devices: 3.75 or 4 on average, and due at 3 + 1."""
    policy, lengths = Knorm(budget=3, interval=1), jnp.asarray([[9, 2, 2, last]])
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    of_devices = jax.shard_map(
        lambda lengths: policy.due(PolicyState(), lengths, token(head_axis="heads")),
        mesh=mesh,
        in_specs=PartitionSpec(None, "heads"),
        out_specs=PartitionSpec("heads"),
        check_vma=False,
    )
    chex.assert_trees_all_equal(of_devices(lengths), np.array([due] * 4))
    chex.assert_trees_all_equal(policy.due(PolicyState(), lengths, token()), np.array([due]))


def test_random_draws_differ_by_layer_head_and_cut():
    """Independent uniform numbers: mean 1/2, uncorrelated to within 4 / sqrt(n)."""
    policy, slots = RandomSelection(seed=3), 4000

    def draw(policy=policy, layer=0, newest=100):
        drawn = policy.draw(jnp.asarray(layer), jnp.arange(2), jnp.asarray([newest]), slots)
        return np.asarray(drawn[0])

    rows = [*draw(), *draw(layer=1), *draw(newest=101), *draw(RandomSelection(seed=4))]
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 4 / math.sqrt(slots)
    assert np.abs(np.mean(rows, axis=1) - 0.5).max() < 4 * math.sqrt(1 / 12 / slots)
    chex.assert_trees_all_equal(draw(), draw())
