"""Policies in config.json: NVIDIA's fields, our key, malformed fields."""

import pytest

from dms_jax.checkpoint.policy_fields import policy_from_hf, policy_to_hf
from dms_jax.errors import ConfigError
from dms_jax.policies import DMC, DMS, POLICIES, TOVA, StreamingLLM, Vanilla


def test_absent_fields_have_nvidias_defaults():
    policy = policy_from_hf({"dms_window_size": 512, "dms_cr": 8}, has_adapter=False)
    assert policy == DMS(
        window=512,
        source="query_neuron",
        shift=1,
        per="head",
        alpha_scale=100.0,
        alpha_offset=5.0,
        temperature=0.1,
    )


@pytest.mark.parametrize(
    ("fields", "has_adapter", "source"),
    [
        ({}, False, "query_neuron"),
        ({}, True, "adapter"),
        ({"dms_separate_alpha": False}, True, "query_neuron"),
        ({"dms_separate_alpha": True}, False, "adapter"),
    ],
)
def test_source_of_decisions(fields, has_adapter, source):
    policy = policy_from_hf({"dms_window_size": 16} | fields, has_adapter=has_adapter)
    assert policy == DMS(window=16, source=source)


def test_nothing_declared():
    assert policy_from_hf({"model_type": "llama"}, has_adapter=False) is None
    assert policy_to_hf(Vanilla(), has_adapter=False) == {}


@pytest.mark.parametrize(
    "policy",
    [
        DMS(),
        DMS(window=0, shift=0),
        DMS(window=7, source="adapter", per="layer", alpha_scale=3.0, temperature=1.5),
        DMS(decisions="bernoulli", seed=7),
        DMC(window=None, neuron="first", per="layer", importance="uniform"),
        TOVA(budget=9),
        StreamingLLM(budget=33),
    ],
)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_round_trip(policy, has_adapter):
    assert (
        policy_from_hf(policy_to_hf(policy, has_adapter=has_adapter), has_adapter=has_adapter)
        == policy
    )


def test_vanilla_is_declared_beside_an_adapter():
    fields = policy_to_hf(Vanilla(), has_adapter=True)
    assert policy_from_hf(fields, has_adapter=True) == Vanilla()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dms_window_size": "wide"}, "dms_window_size must be a whole number"),
        ({"dms_window_size": 1.5}, "dms_window_size must be a whole number"),
        ({"dms_window_size": True}, "dms_window_size must be a whole number"),
        ({"dms_window_size": -1}, "window"),
        ({"dms_window_size": 8, "dms_tau": "x"}, "dms_tau must be a finite number"),
        ({"dms_window_size": 8, "dms_separate_alpha": "no"}, "dms_separate_alpha"),
        ({"dms_window_size": 8, "dms_disable_eviction": True}, "dms_disable_eviction"),
        ({"cache_policy": "DMS"}, "JSON object"),
        ({"cache_policy": {"name": "Magic"}}, "Magic"),
        ({"cache_policy": {"name": "TOVA", "bugdet": 3}}, "bugdet"),
        ({"cache_policy": {"name": "TOVA", "budget": 8}, "dms_window_size": 8}, "two policies"),
    ],
)
def test_malformed_declaration_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        policy_from_hf(fields, has_adapter=False)


def test_dms_under_our_key_is_understood_too():
    assert "DMS" in POLICIES
    fields = {"cache_policy": DMS(window=5).to_dict()}
    assert policy_from_hf(fields, has_adapter=False) == DMS(window=5)
