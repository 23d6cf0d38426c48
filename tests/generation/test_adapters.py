"""An engine's adapters: policy, programs and refusals."""

import dataclasses

import jax
import pytest

import dms_jax
from dms_jax.errors import BusyError, CheckpointError, ConfigError
from dms_jax.generation import Engine
from dms_jax.generation.adapters import choose
from dms_jax.model import low_rank
from dms_jax.model.adapters import Slots
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMS, KVzap, Policy, Vanilla
from tests.generation.support import (
    GREEDY,
    ROWS_OF,
    adapted,
    adapted_engine,
    answer,
    prompts,
    stories,
)
from tests.support.models import random_model, tiny_config

HEAD = DMS(window=4, source="adapter")
SHORT = dataclasses.replace(GREEDY, max_new_tokens=6)
BASE = LanguageModel(random_model(tiny_config(), dtype="float32"))


def tiny(policy: Policy = HEAD, size: LowRank | None = None, **config) -> LanguageModel:
    """A tiny model with the policy's parameters and low-rank updates."""
    shape = policy.retrofit.adapter
    transformer = random_model(tiny_config(**config), adapter=shape, dtype="float32")
    if size is not None:
        factors = low_rank.initial_factors(transformer, size, jax.random.key(0))
        transformer = low_rank.add_factors(transformer, size, factors)
    return LanguageModel(transformer, policy=policy)


def slots_of(model: LanguageModel, policy: Policy | None, **adapters) -> tuple[Policy, Slots]:
    policy, slots = choose(model, policy, adapters)
    assert slots is not None
    return policy, slots


def test_engine_takes_policy_of_adapters():
    policy, slots = slots_of(BASE, None, a=tiny(), b=tiny(size=LowRank(3)))
    assert (policy, slots.names, slots.ranks) == (HEAD, (None, "a", "b"), (0, 0, 3))
    own = tiny(size=LowRank(2))
    assert slots_of(own, None, a=tiny())[1].ranks == (2, 0)  # the model already has an adapter


def test_base_is_not_served_under_evicting_policy():
    """A head of zeros can stand for no adapter only if it evicts nothing."""
    for policy in (
        dataclasses.replace(HEAD, alpha_offset=-1.0),
        dataclasses.replace(HEAD, decisions="bernoulli"),
        KVzap(),
    ):
        assert slots_of(BASE, None, a=tiny(policy))[1].names == ("a",)


def test_given_policy_drops_unused_heads():
    window = dataclasses.replace(HEAD, window=9)
    assert slots_of(BASE, window, a=tiny(), b=tiny(window))[0] == window
    tova = dms_jax.TOVA(budget=8)
    policy, slots = slots_of(BASE, tova, a=tiny(), b=tiny(KVzap(), LowRank(2)))
    assert (policy, slots.names) == (tova, (None, "a", "b"))
    transformer = slots.join(BASE)
    assert transformer.adapter_shape is None
    assert low_rank.low_rank_of(transformer) == LowRank(2, alpha=2.0)


@pytest.mark.parametrize(
    ("error", "adapters", "said"),
    [
        (ConfigError, {"": tiny()}, "name of an adapter must be a text, got ''"),
        (ConfigError, {"a": tiny(num_layers=3)}, "Adapter 'a' is of another model: num_layers"),
        (ConfigError, {"a": BASE}, "Adapter 'a': this model has neither a decision head nor"),
        (CheckpointError, {"a": "x"}, "adapter 'a': its base is not known"),
        (
            ConfigError,
            {"a": tiny(), "b": tiny(dataclasses.replace(HEAD, window=9))},
            r"one policy: adapter 'a' was trained for DMS\(window=4.*, and adapter 'b' for DMS\(",
        ),
    ],
)
def test_mismatched_adapters_are_refused(error, adapters, said):
    with pytest.raises(error, match=said) as raised:
        choose(BASE, None, adapters)
    assert "\n" not in str(raised.value)


def test_adapter_of_another_checkpoint_is_refused(tmp_path):
    shipped = dms_jax.assets.path("smollm2-135m-instruct-dms")
    for place, said in ((shipped, "trained on another base"), (tmp_path / "x", "no directory")):
        with pytest.raises(CheckpointError, match=f"adapter 'a': .*{said}"):
            choose(stories(), None, {"a": place})


def test_adapter_with_another_head_is_refused():
    with pytest.raises(ConfigError, match=r"Adapter 'a': .*was trained for another policy"):
        choose(BASE, HEAD, {"a": tiny(KVzap())})


def test_engine_without_adapters_runs_plain_model():
    """Its programs take the arrays of the model, and a cache without an adapter slot."""
    engine = Engine(stories(), num_lanes=1, max_tokens=32, page_size=16, chunk=8)
    assert engine.adapters == (None,)
    assert engine.runner.model is engine.model
    assert engine.runner.cache.adapters is None
    with pytest.raises(ConfigError, match="There is no adapter 'a': this engine has none"):
        engine.generate(["Once"], adapter="a")


@pytest.mark.usefixtures("fakes")
def test_unknown_adapter_is_refused(pytestconfig):
    engine, (prompt,) = adapted_engine(), prompts((5,))
    for adapter, said in (
        ("c", "There is no adapter 'c': there are a, b"),
        (["a", "c"], "There is no adapter 'c'"),
        (["a", ["a"]], r"There is no adapter \['a'\]"),
        (["a"], "a list of one for each of 2 prompts, got"),
    ):
        if adapter == ["a", ["a"]] and pytestconfig.getoption("--jaxtyping-packages"):
            continue  # jaxtyping refuses this type first
        with pytest.raises(ConfigError, match=said):
            engine.generate([prompt] * 2, sampling=SHORT, adapter=adapter)
    assert engine.adapters == (None, "a", "b")


@pytest.mark.usefixtures("fakes")
def test_adapters_share_no_copies():
    """Each draws like the first request of its adapter."""
    engine, (prompt,) = adapted_engine(), prompts((5,))
    sampling = dataclasses.replace(SHORT, temperature=1.0)
    found = engine.generate([prompt] * 4, sampling=sampling, adapter=["a", "b", "a", "b"])
    for one, copy, slot in zip(found, (0, 0, 1, 1), (1, 2, 1, 2), strict=True):
        answer(prompt, sampling, copy=copy, slot=slot).check(one)


@pytest.mark.usefixtures("fakes")
def test_mismatched_update_changes_nothing(pytestconfig):
    engine, (prompt,) = adapted_engine(), prompts((5,))
    model, joined = engine.model, engine.runner.model
    small = random_model(tiny_config(), dtype="float32")
    other = jax.tree.map(lambda x: x.astype("bfloat16"), stories().transformer)
    large = low_rank.initial_factors(stories().transformer, LowRank(5), jax.random.key(0))
    large = low_rank.add_factors(stories().transformer, LowRank(5), large)
    large = dataclasses.replace(stories(), transformer=large)
    for given, adapters, said in (
        (stories(), None, r"Parameters are those of a transformer \(model.transformer\)"),
        (small, None, r"embedding is float32\[31, 16\], and float32\[512, 64\] in this model"),
        (other, None, r"embedding is bfloat16\[512, 64\], and float32\[512, 64\]"),
        (adapted("a").transformer, None, "lora_a is not a parameter of this model"),
        (None, {"c": adapted("a")}, "There is no adapter 'c'"),
        (
            None,
            {"b": adapted("b"), "a": large},
            "'a' has low-rank updates of rank 5, and the engine was made for rank 2",
        ),
        (None, {"a": dataclasses.replace(adapted("a"), policy=HEAD)}, "trained for DMS"),
    ):
        if isinstance(given, LanguageModel) and pytestconfig.getoption("--jaxtyping-packages"):
            continue  # jaxtyping refuses this type first
        with pytest.raises(ConfigError, match=said):
            engine.update(given, adapters=adapters)
        assert engine.model is model
        assert engine.runner.model is joined

    def update(_) -> None:
        engine.update(stories().transformer)

    with pytest.raises(BusyError, match="The engine is busy"):
        engine.generate([prompt], sampling=SHORT, on_tokens=update)
    assert engine.model is model


def test_low_rank_adapter_is_read_without_base_weights(tmp_path):
    """An adapter read from its directory equals that of the saved model."""
    path = dms_jax.assets.path("stories260k")
    base = dms_jax.load(path)
    trained = dataclasses.replace(adapted("a"), source=base.source)
    dms_jax.save(trained, Vanilla(), tmp_path / "a", adapter_only=True)
    slots = {
        name: slots_of(base, ROWS_OF["evicts"], a=each)[1]
        for name, each in (("disk", tmp_path / "a"), ("model", trained))
    }
    assert slots["disk"].ranks == slots["model"].ranks == (0, 2)
    joined = [jax.tree.leaves(each.join(base)) for each in slots.values()]
    assert all((a == b).all() for a, b in zip(*joined, strict=True))
