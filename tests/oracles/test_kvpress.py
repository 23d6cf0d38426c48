"""The oracle's scores equal those of kvpress, the published library (`golden/README.md`).

Two differences are intended: protected tokens score inf here and the largest score there, and
norms are rounded here so that equal tokens tie.
"""

from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracles import rope, scored

GOLDEN = load_file(Path(__file__).resolve().parents[1] / "golden" / "kvpress.safetensors")
Q, K, V = (GOLDEN[name] for name in "qkv")
LENGTH, THETA = len(Q), 100.0
COS, SIN = rope.angles(np.arange(LENGTH), Q.shape[-1], THETA)
ROTATED_Q, ROTATED_K = (rope.rotate_tokens(x, COS, SIN) for x in (Q, K))
EXPECTED = dict(theta=THETA, sinks=4, recent=0, future=16)
WORTH = {
    "knorm": scored.knorm(ROTATED_K),
    "keydiff": scored.keydiff(ROTATED_K),
    "snapkv": scored.snapkv(ROTATED_Q, ROTATED_K, window=8, kernel=5),
    "expected": scored.expected_attention(
        Q, ROTATED_K, V, covariance=True, epsilon=0.01, **EXPECTED
    ),
    "expected_mean": scored.expected_attention(
        Q, ROTATED_K, V, covariance=False, epsilon=0.0, **EXPECTED
    ),
}
EVERYTHING = [list(range(LENGTH))] * K.shape[1]


@pytest.mark.parametrize("name", WORTH)
def test_scores(name):
    want = GOLDEN[f"score.{name}"]
    assert want.std() > 1e-3
    for head, got in enumerate(WORTH[name](LENGTH - 1, EVERYTHING)):
        scored_alike = np.isfinite(got)
        # Protected tokens have the largest score of all heads there.
        assert (want[head][~scored_alike] >= want.max()).all()
        tolerance = 1e-3 if name == "knorm" else 1e-5  # 12 bits; the library's float32 softmax
        chex.assert_trees_all_close(
            got[scored_alike], want[head][scored_alike], rtol=tolerance, atol=1e-7
        )


def test_heads_compete_as_published():
    """Runs the cut on kvpress's scores, where the window has the largest score of all heads."""
    theirs = [row.copy() for row in GOLDEN["score.snapkv"]]
    kept = scored.cut(EVERYTHING, theirs, LENGTH // 2, alpha=0.2)
    assert kept == [np.flatnonzero(row).tolist() for row in GOLDEN["kept.adakv"]]
    assert len(kept[0]) != len(kept[1])
