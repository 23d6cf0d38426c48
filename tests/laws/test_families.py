"""Laws on the checkpoints of every family: through the cache, on a mesh, and in training.

`tests/model/test_parity.py` compares one pass without a cache with transformers, for each family.
Here that pass is compared with all other ways to compute the same numbers.
"""

import dataclasses
import functools
import math
import pathlib

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dms_jax
from dms_jax import sharding
from dms_jax.checkpoint import load
from dms_jax.generation import Engine
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from tests.laws.serving import ALMOST_GREEDY, log_softmax
from tests.support.instances import further, nightly_but

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir())
TOLERANCE = 1e-9
PROMPTS = [[5, 17, 42, 8, 30, 11, 9, 3, 27, 50, 14], [33, 2, 9], [7, 28, 28, 44, 19, 6, 51, 12]]
NEW_TOKENS = 9
LENGTH = 20  # of the longest prompt with its answer
OF_WINDOWS = {"mistral_window", "phi3"}  # every layer has a window


@functools.cache
def model_of(family: str, mesh: jax.sharding.Mesh | None = None) -> LanguageModel:
    return load(GOLDEN / family, dtype="float64", mesh=mesh, untrained=True)


def answers(model: LanguageModel, policy: Policy, **options) -> list:
    engine = Engine(
        model, policy, num_lanes=4, max_tokens=32, chunk=4, prefill_chunk=5, page_size=4, **options
    )
    sampling = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=NEW_TOKENS)
    return engine.generate(PROMPTS, sampling=sampling)


def whole(found: list) -> np.ndarray:
    """Returns prompts with their answers, padded at the end."""
    tokens = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt, completion in zip(tokens, PROMPTS, found, strict=True):
        both = [*prompt, *completion.tokens]
        row[: len(both)] = both
    return tokens


def check_answers(model: LanguageModel, policy: Policy, found: list) -> np.ndarray:
    """Compares answers through the cache with one pass without it, and returns its logits."""
    passed = np.asarray(model.logits(whole(found), policy=policy))
    for all_logits, prompt, completion in zip(passed, PROMPTS, found, strict=True):
        logits = all_logits[len(prompt) - 1 :][: len(completion.tokens)]
        assert logits.argmax(-1).tolist() == completion.tokens
        difference = completion.logprobs - log_softmax(logits).max(-1)
        assert np.abs(difference).max() < TOLERANCE
    return passed


# Windows run in `test_windows.py`, and on the mesh below.
@pytest.mark.parametrize("policy", [dms_jax.Vanilla(), *further(dms_jax.DMS(window=3))])
@pytest.mark.parametrize("family", nightly_but({"gpt_oss"}, FAMILIES))
def test_the_cache_equals_one_pass(family, policy):
    if family in OF_WINDOWS and policy != dms_jax.Vanilla():
        pytest.skip("every layer has a window: policies other than Vanilla are refused")
    model = model_of(family)
    check_answers(model, policy, answers(model, policy))


@pytest.mark.parametrize(
    "policy",
    [
        dms_jax.TOVA(budget=64, prefill="evict_past_budget"),
        *further(dms_jax.SnapKV(budget=80), dms_jax.Quest(budget=64), dms_jax.KCache(top=64)),
    ],
    ids=lambda policy: policy.name,
)
@pytest.mark.parametrize("family", nightly_but({"gpt_oss"}, sorted(set(FAMILIES) - OF_WINDOWS)))
def test_policies_without_eviction_equal_vanilla(family, policy):
    """Steps of policies that observe weights or select entries include sinks and soft caps."""
    if policy.name == "KCache":
        policy = dataclasses.replace(policy, values="device")
    model = model_of(family)
    check_answers(model, dms_jax.Vanilla(), answers(model, policy))


WITH_EXPERTS = {family for family in FAMILIES if "gpt_oss" in family or "moe" in family}
MESHES = [
    *((family, dict(data=2, model=2)) for family in FAMILIES),
    *((family, dict(data=2, experts=2)) for family in sorted(WITH_EXPERTS)),
    ("qwen3_moe_unnormalized", dict(data=2, experts=2, model=2)),
]
QUICK_MESHES = [
    ("gemma3", dict(data=2, model=2)),
    ("qwen3_moe_unnormalized", dict(data=2, experts=2)),
]


@pytest.mark.parametrize(("family", "axes"), nightly_but(QUICK_MESHES, MESHES), ids=str)
def test_a_mesh_changes_no_result(family, axes):
    """Answers and logits stay equal; experts that an axis does not divide are split within."""
    mesh = dms_jax.make_mesh(**axes)
    spread = model_of(family, mesh)
    kernel = spread.transformer.layers.mlp.down_proj.kernel
    assert not kernel.get_value().is_fully_replicated
    found = answers(spread, dms_jax.Vanilla())
    alone = check_answers(model_of(family), dms_jax.Vanilla(), found)
    assert np.abs(alone - np.asarray(spread.logits(whole(found)))).max() < TOLERANCE
    assert sharding.mesh_sizes(mesh) == (2, 1, math.prod(axes.values()) // 2)


def test_split_experts_are_saved_as_they_were(tmp_path):
    """Each expert is a separate tensor of a file, on one of the devices along the axis."""
    family = "qwen3_moe_unnormalized"
    spread = model_of(family, dms_jax.make_mesh(data=2, experts=2))
    dms_jax.save(spread, dms_jax.Vanilla(), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    expected = load_file(GOLDEN / family / "model.safetensors")
    chex.assert_trees_all_equal(found, {x: y.astype(np.float64) for x, y in expected.items()})
