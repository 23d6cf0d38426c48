"""Even and uneven heads: rows of one total, and a whole tiny run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from experiments.benchmarks import even_heads
from experiments.benchmarks.shapes import model_of


@pytest.mark.nightly
def test_all_forms_hold_the_same_tokens():
    config = even_heads.Config(shapes=("tiny",), context=2048, window=32, batch=3)
    lengths = even_heads.forms(config, model_of("tiny", jnp.float32), 4)
    totals = {form: int(rows.sum()) for form, rows in lengths.items()}
    assert len(set(totals.values())) == 1
    assert abs(np.mean(lengths["even"]) - 2048 / 4) < 2
    assert np.ptp(lengths["even"]) <= 1
    few = lengths["a few near dense"]
    assert few.max() > 0.9 * 2048
    assert (few == 33).mean() >= 0.5
    budgets = [
        policy.budget
        for _, policy in even_heads.cases(config, 4, lengths)
        if isinstance(policy, dms_jax.KVpop)
    ]
    assert budgets == [int(lengths["even"].mean())]


def test_no_row_holds_more_than_the_budget_that_it_is_timed_with():
    """Rows that cannot all be equally long differ by one token."""
    config = even_heads.Config(shapes=("tiny",), context=512, window=8, batch=2)
    lengths = even_heads.forms(config, model_of("tiny", jnp.float32), 4)
    assert {127, 128} == set(lengths["even"].flatten().tolist())
    (kvpop,) = (p for _, p in even_heads.cases(config, 4, lengths) if p.name == "KVpop")
    assert kvpop.budget == 128


@pytest.mark.nightly
def test_the_figures_are_written(tmp_path):
    even_heads.main(
        even_heads.Config(
            out=tmp_path,
            shapes=("tiny",),
            batch=1,
            context=256,
            window=16,
            ratios=(4,),
            chunk=2,
            repeats=1,
            rounds=1,
            dtype="float32",
        )
    )
    rows = json.loads((tmp_path / "even_heads.json").read_text())["rows"]
    assert [(row["rows"], row["policy"]) for row in rows] == [
        ("even", "RandomEviction"),
        ("uneven", "RandomEviction"),
        ("a few near dense", "RandomEviction"),
        ("uneven", "KVzap"),
        ("even", "KVpop"),
    ]
    assert all(row["step_ms"] > 0 for row in rows)
    assert (tmp_path / "even_heads.md").read_text().count("| tiny | 4 |") == 5
