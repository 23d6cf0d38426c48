"""GRPO of tunix on rollouts from a small cache; `make clients` fetches tunix."""

import dataclasses
import inspect
import json
import sys

import pytest

from tests.experiments.examples import stand_in
from tests.support.tree import CLIENTS


@pytest.fixture
def tunix(monkeypatch):
    """After the installed packages on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CLIENTS / "tunix")])
    return pytest.importorskip(
        "tunix.rl.rollout.base_rollout", reason="tunix is not there: `make clients`"
    )


@pytest.mark.nightly
def test_stand_in_matches_tunix(tunix):
    assert tunix.BaseRollout.__abstractmethods__ == stand_in.BaseRollout.__abstractmethods__
    for name in stand_in.BaseRollout.__abstractmethods__ - {"__init__"}:
        own, other = (
            list(inspect.signature(getattr(each, name)).parameters)
            for each in (stand_in.BaseRollout, tunix.BaseRollout)
        )
        assert own == other
    for kind in ("RolloutConfig", "RolloutOutput"):
        fields = {each.name: each.default for each in dataclasses.fields(getattr(tunix, kind))}
        for each in dataclasses.fields(getattr(stand_in, kind)):
            assert fields[each.name] is each.default or fields[each.name] == each.default


@pytest.mark.nightly
def test_grpo_learns_from_a_small_cache(tunix, tmp_path):
    from experiments.examples import grpo

    grpo.main(grpo.Config(steps=6, generations=8, new_tokens=64, out=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    rewards = [step["reward"] for step in figures["steps"]]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2
    assert min(step["compression_ratio"] for step in figures["steps"]) > 1.3
    assert [step["compiled"] for step in figures["steps"]][2:] == [0] * 4
    assert figures["logprobs_apart"] < 1e-4 < figures["logprobs_apart_without_evictions"]
