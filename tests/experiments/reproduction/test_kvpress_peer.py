"""The comparison of kept tokens; kvpress itself runs by hand, as the script says."""

import pathlib
import sys

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.policies import H2O, AdaKV, Knorm, SnapKV
from experiments.reproduction import kvpress_peer, kvpress_side

SCORES = np.array([9.0, 1, 8, 4, 7, 5])[None, None, None]  # [L, B, K, T]
KEPT = SCORES > 4.5


@pytest.mark.parametrize(
    ("swapped", "same", "rows", "furthest"),
    [
        ((), 1, 1, 0),
        ((3, 4), 0.75, 0, 3 / 4),  # 4 is kept instead of 7; the score of 4 is the threshold
    ],
)
def test_agreement_measures_from_the_highest_dropped_score(swapped, same, rows, furthest):
    mine = KEPT.copy()
    mine[..., list(swapped)] ^= True
    found = kvpress_peer.agreement(mine, KEPT, SCORES, pooled=False)
    assert found == {"same": same, "rows": rows, "furthest": pytest.approx(furthest)}


def test_competing_heads_share_one_threshold():
    scores = np.concatenate([SCORES, SCORES / 100], axis=2)
    kept = np.concatenate([SCORES > 0, SCORES < 0], axis=2)
    mine = kept.copy()
    mine[0, 0, 0, 1] = False  # scores 1, and the other head drops 0.09 at most
    assert kvpress_peer.agreement(mine, kept, scores, pooled=True) == {
        "same": pytest.approx(5 / 6),
        "rows": 0.5,
        "furthest": pytest.approx(0.91 / 0.09),
    }


def test_our_rules_applied_to_kvpress_scores():
    """H2O keeps the larger half by recency; norms equal in 12 bits tie, and the latest stays."""
    norms = -np.array([1 + 2**-14, 1.0, 1 + 2**-11, 1 - 2**-10])[None, None, None]
    for rule, scores, budget, want in (
        (kvpress_peer.h2o, SCORES, 3, [0, 4, 5]),
        (kvpress_peer.knorm, norms, 2, [1, 3]),
        (kvpress_peer.knorm, norms[..., [1, 0]], 1, [1]),
    ):
        assert np.flatnonzero(rule(scores, budget)[0, 0, 0]).tolist() == want


def test_failing_side_names_its_option(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match=r"--kvpress .*nothing: No such file"):
        kvpress_peer.run_side(tmp_path / "nothing", tmp_path)
    with pytest.raises(dms_jax.ConfigError, match=r"--kvpress .*it failed"):
        kvpress_peer.run_side(pathlib.Path(sys.executable), tmp_path)


def test_kept_keys_and_answers_are_read():
    keys = np.arange(10.0).reshape(5, 2)
    assert kvpress_side.find(keys, keys[[4, 1]]).tolist() == [False, True, False, False, True]
    with pytest.raises(KeyError):
        kvpress_side.find(keys, keys[:1] + 0.5)
    assert kvpress_side.until([5, 6, 2, 7], [1, 2]) == [5, 6]
    assert kvpress_side.until([5, 6], [1, 2]) == [5, 6]


@pytest.mark.nightly
def test_our_side_records_scores_and_mask(monkeypatch):
    policies = {
        "Knorm": lambda kept, _: Knorm(budget=kept, interval=None),
        "AdaKV": lambda kept, _: AdaKV(SnapKV(budget=kept, window=4, interval=None)),
        "H2O": lambda kept, _: H2O(budget=kept),
    }
    monkeypatch.setattr(kvpress_peer, "POLICIES", policies)
    model = dms_jax.load(assets.path("stories260k"), dtype="float32")
    texts = np.random.default_rng(0).integers(3, 500, (2, 24)).tolist()
    config = kvpress_peer.Config("-", tokens=24, ratios=(0.5, 0.75), new_tokens=3)
    side = kvpress_peer.ours_of(model, texts, config)
    shape = (model.config.num_layers, 2, model.config.num_kv_heads, 24)
    for name in policies:
        for ratio in config.ratios:
            kept, scores = side.kept[f"{name}/{ratio}"], side.scores[f"{name}/{ratio}"]
            assert kept.shape == scores.shape == shape
            budget = config.kept(ratio)
            assert (kept.sum(-1).mean(2) == budget).all()
            if name != "AdaKV":
                lowest = np.where(kept, scores, np.inf).min(-1)
                assert (lowest >= np.where(kept, -np.inf, scores).max(-1)).all()
    plain = dms_jax.generate(
        model,
        texts,
        policy=Knorm(budget=12, interval=None),
        sampling=dms_jax.Sampling(temperature=0, max_new_tokens=3),
    )
    assert side.answers["Knorm"] == [each.tokens for each in plain.completions]
    assert set(side.answers) == {"Knorm", "AdaKV"}
