"""Recorded tokens of rows equal the NumPy oracles, for every policy."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.analysis.retention import NEVER, Retention, retention
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import POLICIES
from dms_jax.sharding import make_mesh
from tests.laws.expected import TOKENS, expected
from tests.laws.rows import OPTIONS, Row, model_for
from tests.laws.simulations import in_tokens
from tests.oracles.trace import Trace

LENGTH = 19  # of the shortest sequence of the laws
PROMPTS = (13, 1, 9)


def kind(row: Row) -> tuple[type, ...]:
    """Returns the policy, and the policy under it; options are those of the laws."""
    return type(row.policy), type(getattr(row.policy, "over", None))


def chosen_rows() -> list[Row]:
    """Returns a row of each kind, with budgets in tokens."""
    policies = [policy for mechanism in OPTIONS.values() for policy in mechanism]
    rows = [Row(in_tokens(policy, LENGTH), 2, 4) for policy in policies]
    return list({kind(row): row for row in reversed(rows)}.values())


def recorded(row: Row) -> Retention:
    model = LanguageModel(model_for(row), policy=row.policy)
    tokens = np.stack([one[:LENGTH] for one in TOKENS])
    return retention(model, tokens, prompt_lengths=np.array(PROMPTS), page_size=row.page_size)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def gone_in(row: Row, trace: Trace, prompt: int, head: int) -> list[int]:
    """Returns the first query that no longer sees each token, from the oracle's lists."""
    gone = []
    for token in range(LENGTH):
        unseen = [t for t in range(token, LENGTH) if token not in trace.live[t][head]]
        kept = token in row.held(trace, LENGTH, prompt)[head]
        gone.append(unseen[0] if unseen else NEVER if kept else LENGTH)
    return gone


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "row",
    [
        # In the gate one policy that overwrites slots stands for all.
        pytest.param(row, marks=[] if row.policy.name == "StreamingLLM" else pytest.mark.nightly)
        for row in chosen_rows()
    ],
    ids=lambda row: row.name,
)
def test_every_policy_equals_its_oracle(row):
    found = recorded(row)
    passes = expected(row, PROMPTS)
    for sequence, one in enumerate(passes):
        prompt = PROMPTS[sequence]
        for layer, trace in enumerate(one.traces):
            for head in range(row.num_kv_heads):
                want = np.array(gone_in(row, trace, prompt, head))
                chex.assert_trees_all_equal(found.gone[layer, sequence, head], want)


def test_rows_cover_every_policy():
    assert {type(row.policy) for row in chosen_rows()} == set(POLICIES.values())


@pytest.mark.nightly
def test_live_tokens_equal_score():
    """Compares the sums with `Usage` of a run without recording."""
    model = dms_jax.load(str(assets.path("stories260k")))
    tokens = np.asarray(model.tokenizer.encode(assets.stories("valid")[0]))[None, :60]
    for policy in (dms_jax.TOVA(budget=9), dms_jax.RandomEviction(window=4, rate=0.7, seed=2)):
        found = retention(model, tokens[:, :-1], policy=policy)
        (score,) = dms_jax.score(model, tokens.tolist(), policy=policy)
        live = found.live()
        chex.assert_shape(live, (5, 1, 4, 59))
        assert score.usage.live_tokens == pytest.approx(live[..., -1].mean())
        assert score.usage.compression_ratio == pytest.approx(59 / live[..., -1].mean())


@pytest.mark.nightly
def test_single_token_is_kept():
    model = dms_jax.load(str(assets.path("stories260k")), untrained=True)
    found = retention(model, np.ones((1, 1), int), policy=dms_jax.DMS(window=2))
    # One token is the whole text; here there is no prompt.
    assert found.gone.shape == (5, 1, 4, 1)
    assert (found.gone == NEVER).all()


def test_bad_recordings_are_refused():
    model = dms_jax.load(str(assets.path("stories260k")))
    tokens = np.ones((2, 8), int)
    with pytest.raises(dms_jax.DataError, match=r"prompt_lengths .* between 0 and 8"):
        retention(model, tokens, prompt_lengths=np.array([3, 9]))
    with pytest.raises(dms_jax.DataError, match=r"shape \[B, T\]"):
        retention(model, tokens[:0])
    with pytest.raises(dms_jax.ConfigError, match="retention: page_size must be"):
        retention(model, tokens, page_size=0)
    on_mesh = dataclasses.replace(model, mesh=make_mesh(data=2))
    with pytest.raises(dms_jax.ConfigError, match="without a mesh"):
        retention(on_mesh, tokens)
