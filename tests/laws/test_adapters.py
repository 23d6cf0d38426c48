"""Law: in a batch of several adapters each request is answered as by an engine with its own alone.

The adapters decide and project differently: heads, low-rank updates of several ranks and scales,
or one of the two. Lanes are few and the pool is small, so that lanes change hands between adapters
and requests are preempted and recomputed.
"""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np

from dms_jax.generation import Engine, Sampling
from dms_jax.model import low_rank
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMS, Policy, Vanilla
from tests.generation.support import squeezed
from tests.support.models import random_model, random_tokens, tiny_config

POLICY = DMS(window=3, source="adapter", alpha_scale=1.0, alpha_offset=0.5)
SIZES = {"a": LowRank(2, alpha=3.0), "b": LowRank(3, alpha=7.0), "c": None}
SHAPE = dict(num_lanes=3, max_tokens=64, page_size=4, chunk=4, prefill_chunk=8)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=12, logprobs=True, seed=5)


def with_adapter(
    model: LanguageModel, policy: Policy, seed: int, size: LowRank | None
) -> LanguageModel:
    """The model with a head and updates of random numbers."""
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


def models(policy: Policy = POLICY, **config) -> tuple[LanguageModel, dict[str, LanguageModel]]:
    base = LanguageModel(random_model(tiny_config(**config)), generation=GenerationDefaults())
    return base, {
        name: with_adapter(base, policy, seed, size)
        for seed, (name, size) in enumerate(SIZES.items(), 1)
    }


def check_each_alone(engine: Engine, alone: dict[str | None, Engine], pages: int) -> None:
    lengths = (9, 14, 3, 17, 9, 6, 12)
    prompts = [random_tokens(seed, n).tolist() for seed, n in enumerate(lengths)]
    prompts += prompts[:4]  # equal ones, that other adapters read
    names = list(alone)
    each = [names[(i + 2 * (i // len(lengths))) % len(names)] for i in range(len(prompts))]
    before = engine.runner.reservation.epochs.sum()
    with squeezed(engine, pages):
        found = engine.generate(prompts, sampling=SAMPLING, adapter=each)
    assert engine.runner.reservation.epochs.sum() - before > len(prompts)  # some were preempted
    answers = set()
    for name, own in alone.items():
        places = [place for place, other in enumerate(each) if other == name]
        expected = own.generate([prompts[place] for place in places], sampling=SAMPLING)
        for place, one in zip(places, expected, strict=True):
            assert found[place].tokens == one.tokens, (name, place)
            chex.assert_trees_all_close(found[place].logprobs, one.logprobs, atol=1e-9)
            assert found[place].usage.live_tokens == one.usage.live_tokens
            answers.add(tuple(one.tokens))
    assert len(answers) == len(prompts)  # whoever took another's adapter would be seen


def test_a_batch_of_adapters_answers_each_request_as_its_own_alone():
    base, adapters = models(biases=True)
    engine = Engine(base, adapters=adapters, **SHAPE)
    assert engine.policy == POLICY
    alone = {name: Engine(model, **SHAPE) for name, model in adapters.items()}
    plain = Engine(base, Vanilla(), **SHAPE)
    check_each_alone(engine, alone | {None: plain}, pages=36)
