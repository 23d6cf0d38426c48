"""Common behaviour of all policies: names, JSON, hashing, refusals."""

import dataclasses
import inspect
import json

import pytest

import dms_jax
from dms_jax import policies
from dms_jax.errors import ConfigError
from dms_jax.generation.prefill import tokens_in_one_pass
from dms_jax.policies import (
    DMC,
    DMS,
    H2O,
    POLICIES,
    TOVA,
    AdaKV,
    ExpectedAttention,
    FixedPooling,
    KCache,
    KeyDiff,
    Knorm,
    KVpop,
    KVzap,
    PyramidKV,
    Quest,
    RandomEviction,
    RandomSelection,
    SnapKV,
    StreamingLLM,
    TriAttention,
    Vanilla,
    as_policy,
    from_dict,
)
from tests.laws.rows import OPTIONS

# The options of the laws, and fields that the laws leave at defaults.
EXAMPLES = [policy for mechanism in OPTIONS.values() for policy in mechanism] + [
    DMS(temperature=0.5, seed=11),
    DMC(epsilon=0.0, temperature=0.3),
    KVzap(hidden=0, temperature=0.5),
    KVpop(hidden=8),
    AdaKV(PyramidKV(Knorm(budget=7))),
    TriAttention(statistics="runs/queries.safetensors"),
]
OF_EACH = {type(policy): policy for policy in EXAMPLES}


@pytest.mark.parametrize("policy", EXAMPLES, ids=repr)
def test_policies_round_trip_as_json(policy):
    assert POLICIES[policy.name] is type(policy)
    data = json.loads(json.dumps(policy.to_dict()))
    again = from_dict(data)
    assert again == policy
    assert hash(again) == hash(policy)
    assert type(policy)() == from_dict({"name": policy.name})


def test_the_examples_change_every_field_of_every_policy():
    """An inherited field is changed for one of the policies that have it."""
    assert set(OF_EACH) == set(POLICIES.values())
    changed = {
        (type(policy), field.name)
        for policy in EXAMPLES
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != getattr(type(policy)(), field.name)
    }
    own = {(kind, name) for kind in OF_EACH for name in inspect.get_annotations(kind)}
    assert own <= changed


def test_policies_defined_elsewhere_are_not_registered():
    """Policies of tests and users have names that are not registered."""

    @dataclasses.dataclass(frozen=True)
    class TOVA(Knorm):
        pass

    assert TOVA().name == "TOVA"
    assert as_policy("TOVA") == dms_jax.TOVA()
    assert {"TOVA", "Policy"} <= set(policies.__all__) <= set(dms_jax.__all__)
    assert {"Policy", *POLICIES} == set(policies.__all__)
    with pytest.raises(ConfigError, match="'Scorer'"):
        as_policy("Scorer")


def test_unknown_names_and_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="'DMZ'"):
        from_dict({"name": "DMZ"})
    with pytest.raises(ConfigError, match="None"):
        from_dict({"window": 3})
    with pytest.raises(ConfigError, match="windw"):
        from_dict({"name": "DMS", "windw": 3})


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        (DMS(), "window", -1),
        (DMS(), "window", 2.0),
        (DMS(window=4), "shift", 6),
        (DMS(), "shift", -1),
        (DMS(), "source", "neuron"),
        (DMS(), "per", "token"),
        (DMS(), "temperature", 0.0),
        (DMS(), "decisions", "always"),
        (DMS(), "seed", 2**32),
        (DMC(), "neuron", "middle"),
        (DMC(), "window", 0),
        (DMC(), "importance", "fixed"),
        (DMC(), "temperature", 0.0),
        (FixedPooling(), "every", 0),
        (TOVA(), "budget", 0),
        (TOVA(), "per", "token"),
        (TOVA(), "prefill", "dense"),
        (TOVA(), "compression_ratio", 0.5),
        (H2O(), "budget", 2.5),
        (Quest(), "budget", 0),
        (Quest(), "dense_layers", -1),
        (Quest(), "over", TOVA()),
        (KCache(), "top", 0),
        (KCache(), "over", KCache()),
        (Quest(), "per", "head"),
        (StreamingLLM(sinks=4), "budget", 4),
        (SnapKV(), "budget", 64),
        (SnapKV(), "window", 0),
        (SnapKV(), "kernel", 4),
        (SnapKV(), "kernel", 257),
        (Knorm(), "interval", 0),
        (KeyDiff(), "compression_ratio", "4"),
        (ExpectedAttention(), "future", 0),
        (ExpectedAttention(), "future", 2**17 + 1),
        (ExpectedAttention(), "sinks", 2048),
        (ExpectedAttention(), "epsilon", -1.0),
        (ExpectedAttention(), "covariance", 1),
        (RandomSelection(), "seed", -1),
        (KVzap(), "hidden", -1),
        (KVzap(), "threshold", float("nan")),
        (KVzap(), "temperature", 0.0),
        (KVpop(), "budget", 128),
        (KVpop(), "window", 1024),
        (AdaKV(), "alpha", 1.5),
        (AdaKV(), "scorer", Vanilla()),
        (PyramidKV(), "beta", 0),
        (StreamingLLM(), "sinks", -1),
        (RandomEviction(), "rate", 1.5),
        (RandomEviction(), "spread", -0.1),
    ],
)
def test_invalid_options_are_refused(policy, field, value):
    # Bypasses the types that only the tests check at run time.
    object.__setattr__(policy, field, value)
    with pytest.raises(ConfigError, match=f"{policy.name}: .*{field}"):
        policy.__post_init__()


PROMPT = dict(prompt=4096, max_length=8192)


@pytest.mark.parametrize(
    "policy",
    [
        TOVA(budget=64),
        H2O(compression_ratio=8),
        KVpop(budget=200),
        StreamingLLM(compression_ratio=8),
    ],
    ids=repr,
)
def test_prefill_of_each_policy(policy):
    """In one pass with a cut at the end, unless tokens run one by one."""
    assert (policy.parallel, policy.shrinks) == ("prompts", True)
    assert tokens_in_one_pass(policy, **PROMPT) == 4096
    by_token = dataclasses.replace(policy, prefill="evict_past_budget")
    assert (by_token.parallel, by_token.shrinks) == ("never", False)
    assert tokens_in_one_pass(by_token, **PROMPT) == policy.kept_whole(8192) < 4096


@pytest.mark.parametrize("prefill", ["dense_then_evict", "evict_past_budget"])
def test_token_window_prefills_in_one_pass_without_cut(prefill):
    policy = StreamingLLM(budget=64, prefill=prefill)
    assert (policy.parallel, policy.shrinks) == ("always", False)
    assert policy.footprint(8192, page_size=16).at_most == 64
