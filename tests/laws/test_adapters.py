"""Law: in a batch of several adapters each request answers as in an engine with only its adapter.

The adapters differ in decisions and projections: heads, low-rank updates of several ranks and
scales, or only one of the two. Lanes are few and the pool is small, so that lanes pass between
adapters and requests are preempted and recomputed.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dms_jax.generation import Engine, Sampling
from dms_jax.model import low_rank
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMS, Policy, Vanilla
from tests.generation.support import squeezed
from tests.support.compilations import Compilations
from tests.support.models import random_model, random_tokens, tiny_config

POLICY = DMS(window=3, source="adapter", alpha_scale=1.0, alpha_offset=0.5)
SIZES = {"a": LowRank(2, alpha=3.0), "b": LowRank(3, alpha=7.0), "c": None}
SHAPE = dict(num_lanes=3, max_tokens=64, page_size=4, chunk=4, prefill_chunk=8)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=12, logprobs=True, seed=5)


def with_adapter(
    model: LanguageModel, policy: Policy, seed: int, size: LowRank | None
) -> LanguageModel:
    """The model with a random head and random updates."""
    own = random_model(model.config, adapter=policy.retrofit.adapter, seed=seed)
    transformer = LanguageModel(own).with_parameters(model.transformer).transformer
    random = np.random.default_rng(seed)
    if size is not None:
        factors = {
            path: jnp.asarray(random.normal(size=param.get_value().shape) / 3)
            for path, param in low_rank.factor_parameters(transformer, size).items()
        }
        transformer = low_rank.add_factors(transformer, size, factors)
    return dataclasses.replace(model, transformer=transformer, policy=policy)


@functools.cache
def engines() -> tuple[LanguageModel, Engine, dict[str | None, Engine]]:
    """The base, an engine with all adapters, and one for each; None is the base alone."""
    base = LanguageModel(random_model(tiny_config(biases=True)), generation=GenerationDefaults())
    adapters = {
        name: with_adapter(base, POLICY, seed, size)
        for seed, (name, size) in enumerate(SIZES.items(), 1)
    }
    engine = Engine(base, adapters=adapters, prefix_cache=1e6, **SHAPE)
    assert engine.policy == POLICY
    alone = {name: Engine(model, **SHAPE) for name, model in adapters.items()}
    return base, engine, alone | {None: Engine(base, Vanilla(), **SHAPE)}


def check_each_as_alone(pages: int | None = None) -> None:
    """Compares all answers to prompts, some of which are equal but have different adapters."""
    _, engine, alone = engines()
    lengths, names = (9, 14, 3, 17, 9, 6, 12), list(alone)
    prompts = [random_tokens(seed, n).tolist() for seed, n in enumerate(lengths)]
    prompts += prompts[:4]
    each = [names[(i + 2 * (i // len(lengths))) % len(names)] for i in range(len(prompts))]
    before = engine.runner.reservation.epochs.sum()
    if pages is None:
        found = engine.generate(prompts, sampling=SAMPLING, adapter=each)
    else:
        engine.runner.prefixes.clear()
        with squeezed(engine, pages):
            found = engine.generate(prompts, sampling=SAMPLING, adapter=each)
            engine.runner.prefixes.clear()
        left = engine.runner.reservation.epochs.sum() - before
        assert left > len(prompts)  # some were preempted
    answers = set()
    for name, own in alone.items():
        places = [place for place, other in enumerate(each) if other == name]
        expected = own.generate([prompts[place] for place in places], sampling=SAMPLING)
        for place, one in zip(places, expected, strict=True):
            assert found[place].tokens == one.tokens, (name, place)
            chex.assert_trees_all_close(found[place].logprobs, one.logprobs, atol=1e-9)
            assert found[place].usage.live_tokens == one.usage.live_tokens
            answers.add(tuple(one.tokens))
    assert len(answers) >= len(prompts) - 2  # so an answer from another adapter is detected


def test_batched_adapters_answer_as_each_alone():
    """With preemptions, and again from each adapter's cached prefixes."""
    _, engine, _ = engines()
    check_each_as_alone(pages=36)
    check_each_as_alone()
    assert engine.runner.prefixes.counts.states > 0
    check_each_as_alone()


def test_replaced_weights_answer_as_a_new_engine():
    """Replaces adapters, one by a smaller rank, then the base; nothing is compiled."""
    base, engine, alone = engines()
    for pages in (36, None, None):  # some go to the host, then all come from cached prefixes
        check_each_as_alone(pages)
    seeds = {"a": (21, SIZES["a"]), "b": (22, SIZES["b"]), "c": (23, SIZES["c"])}
    new = {name: with_adapter(base, POLICY, *own) for name, own in seeds.items()}
    placed = jax.device_put(random_model(base.config, seed=24), jax.devices()[0])

    def update_adapters() -> None:
        for name, model in new.items():
            alone[name].update(model.transformer)
        engine.update(adapters={"c": new["c"]})
        engine.update(adapters={"a": new["a"], "b": new["b"]})
        check_each_as_alone()

    def update_base() -> None:
        engine.update(placed)
        for own in alone.values():
            own.update(nnx.state(placed))
        check_each_as_alone()

    assert Compilations().of(update_adapters) == 0
    assert Compilations().of(update_base) == 0
    smaller = with_adapter(engine.model, POLICY, 25, LowRank(1, alpha=9.0))
    prompt = [random_tokens(30, 9).tolist()]
    engine.generate(prompt, sampling=SAMPLING, adapter="b")  # in the same lane, with other scales
    engine.update(adapters={"b": smaller})
    (found,) = engine.generate(prompt, sampling=SAMPLING, adapter="b")
    (expected,) = Engine(smaller, **SHAPE).generate(prompt, sampling=SAMPLING)
    assert found.tokens == expected.tokens
