"""Numbers of a policy are program arguments; fields that size arrays or select code are static.

The laws test the effect of traced numbers; their rows of one form share a program.
"""

import copy
import dataclasses
import itertools
import pickle

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import (
    DMC,
    DMS,
    H2O,
    POLICIES,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KVpop,
    KVzap,
    PyramidKV,
    Quest,
    RandomEviction,
    RandomSelection,
    SnapKV,
)
from dms_jax.policies.budget import LONGEST, share, shares
from tests.laws.rows import model_of
from tests.support.chunks import chunk_of
from tests.support.compilations import Compilations
from tests.support.models import random_tokens

SCORER = {"budget", "compression_ratio", "interval"}
# Written by hand: every other field is static. Policies not named here rank tokens and have no
# further numbers.
TRACED = {
    "Vanilla": set(),
    "DMS": {"alpha_scale", "alpha_offset", "temperature", "seed"},
    "DMC": {"offset", "epsilon", "temperature"},
    "KVzap": {"threshold", "temperature", "sinks"},
    "KVpop": {"budget", "compression_ratio"},
    "FixedPooling": set(),
    "TOVA": {"budget", "compression_ratio"},
    "H2O": {"budget", "compression_ratio"},
    "Quest": {"budget", "compression_ratio", "over"},
    "KCache": {"compression_ratio", "over"},
    "StreamingLLM": {"compression_ratio"},
    "RandomEviction": {"rate", "spread", "seed"},
    "ExpectedAttention": SCORER | {"sinks", "recent", "epsilon"},
    "RKV": SCORER | {"mix"},
    "TriAttention": SCORER | {"statistics"},
    "RandomSelection": SCORER | {"seed"},
    "AdaKV": {"scorer", "alpha"},
    "PyramidKV": {"scorer", "beta"},
}


@pytest.mark.parametrize("name", POLICIES)
def test_leaves_are_the_numbers(name):
    """A policy with an inner policy has its own fields and those of the inner one."""
    over = {"over"} & {field.name for field in dataclasses.fields(POLICIES[name])}
    policy = POLICIES[name](**dict.fromkeys(over, DMS()))
    paths, _ = jax.tree_util.tree_flatten_with_path(policy, is_leaf=lambda x: x is None)
    assert {path[0].name for path, _ in paths} == TRACED.get(name, SCORER)


EXAMPLES = [policy() for policy in POLICIES.values()] + [
    DMS(window=3, seed=2**32 - 1, alpha_offset=-7.0),
    TOVA(compression_ratio=2.7),
    SnapKV(interval=None),
    AdaKV(PyramidKV(SnapKV(budget=80), beta=7), alpha=0.5),
    Quest(budget=600, over=DMS(alpha_offset=3.5)),
]


@pytest.mark.parametrize("policy", EXAMPLES, ids=repr)
def test_policy_survives_flattening(policy):
    """It stays a frozen dataclass of plain numbers: equal, hashable, with the same JSON."""
    leaves, structure = jax.tree.flatten(policy)
    again = jax.tree.unflatten(structure, leaves)
    for other in (again, copy.deepcopy(policy), pickle.loads(pickle.dumps(again))):
        assert other == policy
        assert hash(other) == hash(policy)
        assert repr(other) == repr(policy)
        assert other.to_dict() == policy.to_dict()
    assert jax.tree.structure(again) == structure


def test_options_selecting_code_are_static():
    structure = jax.tree.structure
    assert structure(TOVA(budget=5)) == structure(TOVA(budget=900))
    assert structure(TOVA()) != structure(TOVA(per="head"))
    assert structure(TOVA()) != structure(TOVA(compression_ratio=4))
    assert structure(SnapKV()) != structure(SnapKV(interval=None))
    assert structure(DMS(window=3)) != structure(DMS(window=4))
    assert structure(Quest(over=DMS())) != structure(Quest(over=DMS(shift=0)))
    # A page table has a size: budgets share a program up to the next of 512, 768, 1024, 1536, ...
    assert structure(Quest(budget=769)) == structure(Quest(budget=1024))
    assert structure(Quest(budget=768)) != structure(Quest(budget=769))


def test_bounds_follow_their_fields():
    leaves, structure = jax.tree.flatten(Quest(budget=600))
    inside = jax.tree.unflatten(structure, leaves)
    assert inside.bound("budget") == 768
    assert inside.replaced(budget=LONGEST).bound("budget") == LONGEST
    assert dataclasses.replace(inside, budget=64).bound("budget") == 64
    with pytest.raises(KeyError, match="budget"):  # no number, and no bound for it
        inside.replaced(budget=np.array(900)).bound("budget")


@given(ratio=st.floats(1, 2**20), tokens=st.integers(0, 2**24))
def test_programs_and_host_round_shares_equally(ratio, tokens):
    got = share_of(TOVA(compression_ratio=ratio), np.array([tokens], np.int32))
    assert int(got[0, 0]) == share(tokens, ratio)


@jax.jit
def share_of(policy, max_lengths):
    chunk = chunk_of(np.zeros((1, 1, 1, 2), np.float32), max_lengths=max_lengths)
    return shares(chunk, policy.compression_ratio)


BASE = ExpectedAttention(budget=6, interval=3, sinks=1)
SWEEPS = {
    "TOVA": [TOVA(budget=budget) for budget in (4, 9, 15)],
    "TOVA by ratio": [TOVA(compression_ratio=ratio) for ratio in (2.7, 4, 9.5)],
    "H2O": [H2O(budget=budget) for budget in (4, 9, 14)],
    "DMS": [
        DMS(window=2, alpha_scale=2.0, decisions="bernoulli"),
        DMS(window=2, alpha_scale=2.0, decisions="bernoulli", alpha_offset=0.0),
        DMS(window=2, alpha_scale=4.0, decisions="bernoulli", alpha_offset=0.0),
        DMS(window=2, alpha_scale=4.0, decisions="bernoulli", alpha_offset=0.0, seed=2**32 - 1),
    ],
    "DMC": [DMC(offset=offset) for offset in (-1.0, 0.0, 0.5)] + [DMC(offset=0.5, epsilon=0.5)],
    "KVzap": [
        KVzap(window=2, threshold=-6, sinks=0),
        KVzap(window=2, threshold=-2.5, sinks=0),
        KVzap(window=2, threshold=-2.5, sinks=9),
    ],
    "KVpop": [KVpop(window=3, budget=budget) for budget in (5, 9)],
    "Random": [
        RandomEviction(window=1, rate=0.3),
        RandomEviction(window=1, rate=0.8),
        RandomEviction(window=1, rate=0.8, spread=0.5),
        RandomEviction(window=1, rate=0.8, spread=0.5, seed=9),
    ],
    "Selection": [
        RandomSelection(budget=6, interval=3),
        RandomSelection(budget=6, interval=3, seed=5),
        RandomSelection(budget=6, interval=7, seed=5),
        RandomSelection(budget=9, interval=7, seed=5),
    ],
    "Expected": [
        BASE,
        dataclasses.replace(BASE, sinks=3),
        dataclasses.replace(BASE, epsilon=4.0),
        dataclasses.replace(BASE, budget=9),
    ],
    "Pyramid": [
        AdaKV(PyramidKV(SnapKV(budget=9, window=2), beta=1), alpha=0.2),
        AdaKV(PyramidKV(SnapKV(budget=9, window=2), beta=7), alpha=0.2),
        AdaKV(PyramidKV(SnapKV(budget=9, window=2), beta=7), alpha=1),
    ],
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_compiles_once(name):
    """Every number changes the logits, and none compiles a program."""
    with jax.enable_x64(True):
        sweep(*SWEEPS[name])


def sweep(first, *others):
    model = LanguageModel(model_of(2, first.retrofit.adapter), policy=first)
    tokens, prompts = random_tokens(7, 2, 24), np.array([12, 16])
    found = [np.asarray(model.logits(tokens, prompt_lengths=prompts))]
    compiled = Compilations()
    for policy in others:
        call = lambda policy=policy: found.append(  # noqa: E731
            np.asarray(model.logits(tokens, policy=policy, prompt_lengths=prompts))
        )
        assert compiled.of(call) == 0, policy
    for one, another in itertools.pairwise(found):
        assert np.isfinite(another).all()
        assert np.abs(one - another).max() > 1e-6
    chex.assert_shape(found, (2, 24, model.config.vocab_size))


LARGEST = [
    *(policy(seed=2**32 - 1) for policy in (DMS, RandomEviction, RandomSelection)),
    ExpectedAttention(budget=LONGEST, interval=LONGEST, sinks=LONGEST - 1),
    PyramidKV(SnapKV(), beta=2**31 - 1),
    TOVA(compression_ratio=1),
    TOVA(compression_ratio=1e30),
]


@pytest.mark.parametrize("policy", LARGEST, ids=repr)
def test_the_largest_numbers_fit_in_32_bits(policy):
    on_device = jax.tree.leaves(jax.device_put(policy))
    for number, want in zip(on_device, jax.tree.leaves(policy), strict=True):
        assert number.dtype.itemsize == 4
        is_whole = np.issubdtype(number.dtype, np.integer)
        assert int(number) == want if is_whole else float(number) == pytest.approx(want, rel=1e-7)
