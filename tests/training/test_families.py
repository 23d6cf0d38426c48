"""Training of every family: gradients against finite differences, and steps under a policy."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.checkpoint import load
from dms_jax.errors import ConfigError
from dms_jax.model.attention import Relaxation
from dms_jax.policies import DMS, KVzap, Vanilla
from dms_jax.training import recipes
from dms_jax.training.parameters import add_adapter, parameters, rebuilder
from dms_jax.training.recipe import Stage
from tests.support.instances import nightly_but
from tests.training.tiny import recipe

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir())
WINDOWS_ALONE = {"mistral_window", "phi3"}
TRAINED = sorted(set(FAMILIES) - WINDOWS_ALONE - {"gemma2"})  # its logits have a cap
KVZAP = KVzap(threshold=-5.0)
SOFT = DMS(window=3, source="adapter", alpha_scale=2.0, alpha_offset=0.5)


@functools.cache
def model_of(family: str, dtype: str):
    return load(GOLDEN / family, dtype=dtype, untrained=True)


@pytest.mark.parametrize("family", nightly_but({"gemma3", "gpt_oss"}, FAMILIES))
def test_gradients_equal_finite_differences(family):
    """In float64, along a random direction of all parameters at once."""
    with jax.enable_x64(True):
        policy = Vanilla() if family in WINDOWS_ALONE else SOFT
        transformer = add_adapter(model_of(family, "float64").transformer)
        relaxation = None if family in WINDOWS_ALONE else Relaxation()
        rebuild, random = rebuilder(transformer), np.random.default_rng(0)
        tokens = jnp.asarray(random.integers(3, 61, (2, 20)))
        arrays = parameters(transformer)
        weights = jnp.asarray(random.normal(size=(2, 20, transformer.config.vocab_size)))

        @jax.jit
        def value(arrays):
            model = rebuild(arrays)
            passed = model(tokens, policy, relaxation=relaxation, remat="all_but_attention")
            return (model.unembed(passed.hidden) * weights).mean() + passed.decisions.sum() / 100

        gradient = jax.jit(jax.grad(value))(arrays)
        for name, own in gradient.items():
            # An adapter starts at zero, so only its output matrix has a gradient.
            learns = "adapter" not in name or (policy is SOFT and "proj" in name)
            assert bool(jnp.any(own)) == learns, name
        direction = {name: jnp.asarray(random.normal(size=x.shape)) for name, x in arrays.items()}
        # Decisions are straight-through, so they have no finite difference.
        soft = {name: x * (not name.startswith("layers.adapter")) for name, x in direction.items()}
        step = 1e-6

        def at(scale):
            return value({name: x + scale * soft[name] for name, x in arrays.items()})

        difference = (at(step) - at(-step)) / (2 * step)
        along = sum(jnp.vdot(gradient[name], soft[name]) for name in arrays)
        assert float(along) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("loss", ["language_modeling", "distillation"])
def test_steps_under_decisions_lower_the_loss(family, loss):
    """The model learns to work without evicted tokens: the distance to the teacher falls."""
    model = model_of(family, "float32")
    documents = [np.random.default_rng(0).integers(3, 61, 24).tolist()] * 8
    # A student that differs from its teacher only by evictions needs smaller steps.
    steps, rate, weight = (24, 5e-4, 0.0) if loss == "distillation" else (10, 3e-3, 1.0)
    options = recipe(
        Stage("ramp", steps, rate, 2.0, adapter_learning_rate=1e-2),
        loss=loss,
        compression_weight=weight,
    )
    name, losses = {"distillation": "distillation_loss"}.get(loss, "lm_loss"), []
    trained = dms_jax.train(
        model,
        policy=SOFT,
        recipe=options,
        data=documents,
        on_step=lambda record: losses.append(record[name]),
        progress=False,
    )
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])  # decisions are drawn with noise
    before, after = parameters(model.transformer), parameters(trained.transformer)
    assert all(np.any(np.asarray(after[name]) != np.asarray(x)) for name, x in before.items())


def test_untrainable_families_are_refused():
    options = dict(data=[[3, 4, 5]] * 4)
    with pytest.raises(ConfigError, match="have a soft cap"):
        dms_jax.retrofit(model_of("gemma2", "float32"), SOFT, recipe=recipe(), **options)
    with pytest.raises(ConfigError, match="there is nothing for DMS to compress"):
        dms_jax.retrofit(model_of("phi3", "float32"), SOFT, recipe=recipe(), **options)
    taught = recipes.kvzap()
    with pytest.raises(ConfigError, match="sinks or a soft cap in it"):
        dms_jax.retrofit(model_of("gpt_oss", "float32"), KVZAP, recipe=taught, **options)
