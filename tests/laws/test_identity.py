"""Law 1, second half: a checkpoint does not silently run with a policy it was not made for.

Rows of the other laws test that policies with nothing to evict equal vanilla attention.
"""

import dataclasses
import warnings

import numpy as np
import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Sampling, generate, score
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMC, DMS, POLICIES, TOVA, KVpop, KVzap, Quest, Vanilla
from tests.laws.rows import model_of

TOKENS = np.arange(5)[None]
BORROWERS = [DMS(), DMC(), DMC(neuron="first")]


@pytest.mark.parametrize("declared", BORROWERS, ids=repr)
def test_a_borrowed_neuron_excludes_other_policies(declared):
    model = LanguageModel(model_of(2, True), policy=declared)
    others = [policy() for policy in POLICIES.values()] + [DMS(source="adapter"), *BORROWERS]
    for policy in others:
        if policy.retrofit.borrowed_neurons == declared.retrofit.borrowed_neurons:
            assert model.resolve_policy(policy) == policy
            continue
        with pytest.raises(ConfigError, match=r"made for|trained for"):
            model.resolve_policy(policy)
    assert model.resolve_policy(None) == declared


def test_every_entry_point_refuses():
    model = LanguageModel(model_of(2, False), policy=DMS(window=4))
    with pytest.raises(ConfigError, match="made for"):
        model.logits(TOKENS, policy=Vanilla())
    with pytest.raises(ConfigError, match="made for"):
        generate(model, [[1, 2]], policy=Vanilla(), sampling=Sampling(max_new_tokens=2))
    with pytest.raises(ConfigError, match="made for"):
        score(model, [[1, 2, 3]], policy=TOVA())


def test_other_options_of_same_neurons_do_not_warn():
    model = LanguageModel(model_of(2, False), policy=DMS(window=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wider = DMS(window=64, alpha_offset=3.0, decisions="bernoulli")
        assert model.resolve_policy(wider) == wider
        selected = Quest(budget=16, over=DMS(window=2))
        assert model.resolve_policy(selected) == selected


@pytest.mark.parametrize(
    ("declared", "asked"),
    [
        (DMS(source="adapter", shift=0), DMS(source="adapter", shift=1)),
        (DMS(source="adapter"), DMS(source="adapter", per="layer")),
        (DMS(source="adapter"), DMS()),
        (DMS(source="adapter"), DMC()),
        (DMS(source="adapter"), Quest(budget=16, over=DMS(source="adapter", shift=0))),
        (DMC(), DMC(importance="uniform")),
    ],
    ids=repr,
)
def test_decisions_with_another_meaning_are_refused(declared, asked):
    model = LanguageModel(model_of(2, True), policy=declared)
    with pytest.raises(ConfigError, match=r"trained for .* Give its own policy"):
        model.resolve_policy(asked)


@pytest.mark.parametrize("policy", BORROWERS, ids=repr)
def test_borrowing_from_an_untrained_model_is_refused(policy):
    model = LanguageModel(model_of(2, False), untrained=False)
    with pytest.raises(ConfigError, match=rf"^{policy.name} .*dms-jax retrofit takes .* TOVA"):
        model.logits(TOKENS, policy=policy)
    assert dataclasses.replace(model, untrained=True).resolve_policy(policy) == policy


def test_policies_without_parameters_run_on_any_base():
    model = LanguageModel(model_of(2, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in POLICIES.values():
            if policy().retrofit.borrowed_neurons is None and policy().retrofit.adapter is None:
                assert model.resolve_policy(policy()) == policy()


def test_missing_adapter_is_refused():
    for policy in (DMS(source="adapter"), KVzap(), KVpop()):
        with pytest.raises(ConfigError, match="which this model does not have"):
            LanguageModel(model_of(2, False)).resolve_policy(policy)
    with pytest.raises(ConfigError, match=r"for another policy, and KVzap cannot"):
        LanguageModel(model_of(2, True)).resolve_policy(KVzap())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LanguageModel(model_of(2, True)).resolve_policy(DMS(source="adapter"))
