"""Drawing tokens: the filters against NumPy, and draws that do not depend on the batch."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import sampling
from dms_jax.generation.grammar import Grammar
from dms_jax.generation.sampling import (
    LanesFilter,
    Sampling,
    filter_logits,
    sample,
)
from tests.generation.support import (
    GREEDY,
    answer,
    engine_for,
    host_engine,
    log_softmax,
    prompts,
)
from tests.support.instances import further, nightly_but

RULES = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=1.7),
    "top-k": Sampling(top_k=3),
    "top-k of more than there are": Sampling(top_k=99),
    "top-p": Sampling(top_p=0.6),
    "top-p of most": Sampling(top_p=0.8),
    "top-p of most, and min-p": Sampling(temperature=1.5, top_p=0.8, min_p=0.15),
    "top-p of next to nothing": Sampling(top_p=1e-6),
    "top-p below the normal numbers of float32": Sampling(top_p=1e-40),
    "top-p that float32 makes zero": Sampling(top_p=1e-300),
    "top-p that float32 makes one": Sampling(top_p=1 - 1e-10),
    "min-p": Sampling(min_p=0.2),
    "min-p of one": Sampling(min_p=1.0),
    "min-p that float32 makes one": Sampling(min_p=1 - 1e-10),
    "min-p that float32 makes zero": Sampling(min_p=1e-300),
    "hotter than float32": Sampling(temperature=1e300),
    "all": Sampling(temperature=1.3, top_k=6, top_p=0.85, min_p=0.05),
}
# Jitted as in programs: otherwise its operations would be a hundred small programs.
draw_one = jax.jit(sample)
# Bound on the chi-square of 20,000 draws: at 11 degrees of freedom it is exceeded by one in 10,000
# seeds; seeds are fixed.
CHI_SQUARE = 37.4


def oracle(logits: np.ndarray, rule: Sampling) -> np.ndarray:
    """Returns the probabilities of one row in float64, adding tokens in order of likelihood."""
    logits = np.asarray(logits, np.float64) / rule.temperature
    order = np.argsort(-logits, kind="stable")
    kept = list(order)
    if rule.top_k:
        kept = [token for token in kept if logits[token] >= logits[order][: rule.top_k][-1]]
    if rule.top_p < 1:
        weights = np.exp(logits[kept] - logits.max())
        weights /= weights.sum()
        nucleus, mass = [], 0.0
        for token, weight in zip(kept, weights, strict=True):
            if mass >= rule.top_p:
                break
            nucleus.append(token)
            mass += weight
        kept = nucleus
    if rule.min_p:
        kept = [t for t in kept if np.exp(logits[t] - logits.max()) >= rule.min_p * (1 - 1e-12)]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = np.exp(logits[kept] - logits.max())
    return probabilities / probabilities.sum()


def example(seed: int, size: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=1.5, size=size).astype(np.float32)


@pytest.mark.parametrize("name", RULES)
def test_filters_equal_the_oracle(name):
    rule = RULES[name]
    logits = np.stack([example(seed) for seed in range(64)])
    cooled = jnp.asarray((logits / np.float64(rule.temperature)).astype(np.float32))
    filtered = np.asarray(filter_logits(cooled, rule.filter), np.float64)
    expected = np.stack([oracle(row, rule) for row in logits])
    chex.assert_trees_all_equal(np.isfinite(filtered), expected > 0)
    chex.assert_trees_all_close(np.exp(log_softmax(filtered)), expected, rtol=1e-7, atol=1e-6)


class SmallExamplesTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_equally_likely_tokens_are_kept_together(self):
        filtered = self.variant(filter_logits)
        logits = jnp.log(jnp.array([[0.3, 0.2, 0.2, 0.2, 0.1]]))
        for rule in (Sampling(top_k=2).filter, Sampling(top_p=0.4).filter):
            kept = np.isfinite(filtered(logits, rule))
            chex.assert_trees_all_equal(kept, np.array([[True] * 4 + [False]]))

    @chex.variants(with_jit=True)
    def test_no_temperature_is_too_small(self):
        draw = self.variant(sample)
        logits = jnp.array([[3.0, 80.0, 79.9, -1e30]])
        for temperature in (1e-3, 1e-30, 1e-39, 1e-45, 1e-46, 1e-300):
            for extra in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
                rule = Sampling(temperature=temperature, **extra).filter
                tokens, _ = draw(
                    logits, jax.random.split(jax.random.key(0), 1), jnp.zeros(1, int), rule
                )
                chex.assert_trees_all_equal(tokens, np.array([1]))


@pytest.mark.parametrize(
    "name",
    nightly_but({"plain", "cold", "hot", "top-k", "top-p", "top-p of most", "min-p", "all"}, RULES),
)
def test_draws_follow_the_filtered_distribution(name):
    rule, draws = RULES[name], 20_000
    logits = example(3)
    keys = jnp.broadcast_to(jax.random.key(7), (draws,))
    tokens, logprobs = draw_one(
        jnp.broadcast_to(logits, (draws, len(logits))), keys, jnp.arange(draws), rule.filter
    )
    counts = np.bincount(np.asarray(tokens), minlength=len(logits))
    expected = draws * oracle(logits, rule)
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < CHI_SQUARE
    # Log-probabilities are those of the model, before temperature and filters.
    chex.assert_trees_all_close(
        logprobs, log_softmax(logits)[np.asarray(tokens)], rtol=1e-7, atol=1e-5
    )


@pytest.mark.parametrize(
    "searched", [True, *further(False)], ids=["some searched", "none searched"]
)
def test_lanes_with_different_rules_draw_as_alone(searched):
    samplings = {
        0: Sampling(temperature=0),
        1: Sampling(temperature=0.7, top_k=5),
        2: Sampling(top_p=0.6, min_p=0.05),
        3: Sampling(temperature=1.5, top_p=0.8, min_p=0.05),
        4: Sampling(),
        5: Sampling(temperature=1e-30, top_k=10**9, top_p=1.0),
    }
    if not searched:
        samplings |= {lane: Sampling(top_p=0.9) for lane in (1, 2)}
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 300)) * 3, jnp.float32)
    logits = logits.at[0, 7].set(logits[0].max())  # the first of equal ones
    steps, lanes = 20, len(samplings)
    logits = jnp.tile(logits, (steps, 1))
    keys = jnp.tile(jax.random.split(jax.random.key(3), lanes), steps)
    positions = jnp.repeat(jnp.arange(steps), lanes)
    each = {lane + lanes * step: samplings[lane] for step in range(steps) for lane in samplings}
    tokens, _ = draw_one(logits, keys, positions, LanesFilter(len(each)).of(each))
    for lane, own_sampling in samplings.items():
        own = slice(lane, None, lanes)
        alone, _ = draw_one(logits[own], keys[own], positions[own], own_sampling.filter)
        chex.assert_trees_all_equal(tokens[own], alone)


def test_lanes_filter_follows_changes():
    """It equals a newly built filter; arrays passed to earlier programs do not change."""
    rng, num_lanes = np.random.default_rng(0), 5
    pool = [
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_k=5, top_p=0.9),
        Sampling(top_p=0.6, min_p=0.05),
    ]
    kept, samplings, given = LanesFilter(num_lanes), {}, []
    for _ in range(30):
        for lane in rng.choice(num_lanes, 2, replace=False).tolist():
            samplings.pop(lane, None)
            if rng.random() < 0.7:
                samplings[lane] = pool[rng.integers(len(pool))]
        found, expected = kept.of(samplings), LanesFilter(num_lanes).of(samplings)
        chex.assert_trees_all_equal(found, expected)
        assert kept.of(dict(samplings)) is found  # nothing is rebuilt without a change
        given.append((found, expected))
    for found, expected in given:
        chex.assert_trees_all_equal(found, expected)


def test_half_precision_logits_are_sampled_in_float32():
    """With 4000 tokens in bfloat16 the mass is not 1, and a log-probability has two digits."""
    draws, rule = 400, Sampling(top_p=0.9)
    logits = jnp.asarray(example(4, size=4000), jnp.bfloat16)
    wide = np.asarray(logits, np.float64)
    keys = jnp.broadcast_to(jax.random.key(1), (draws,))
    tokens, logprobs = draw_one(
        jnp.broadcast_to(logits, (draws, 4000)), keys, jnp.arange(draws), rule.filter
    )
    chex.assert_trees_all_close(
        logprobs, log_softmax(wide)[np.asarray(tokens)], rtol=1e-7, atol=1e-4
    )
    # Equal logits are kept or excluded together: nothing below the nucleus is drawn.
    least = wide[oracle(wide, rule) > 0].min()
    assert (wide[np.asarray(tokens)] >= least - 1e-9).all()


SAMPLED = dms_jax.Sampling(temperature=1.2, top_p=0.95, max_new_tokens=12, seed=5, logprobs=True)


@pytest.mark.usefixtures("fakes")
def test_copies_differ_and_seeds_decide():
    """Copies are counted among prompts with one seed; a single prompt is copy 0."""
    (prompt,) = prompts([13])

    def drawn(*seeds):
        sampling = dataclasses.replace(SAMPLED, seed=[*seeds])
        return host_engine().generate([prompt] * len(seeds), sampling=sampling)

    for seeds, copies in (((5, 5, 5), (0, 1, 2)), ((9, 5, 9), (0, 0, 1)), ((9,), (0,))):
        for seed, copy, one in zip(seeds, copies, drawn(*seeds), strict=True):
            answer(prompt, dataclasses.replace(SAMPLED, seed=seed), copy=copy).check(one)
    (one,) = host_engine().generate([prompt], sampling=dataclasses.replace(GREEDY, logprobs=False))
    assert one.logprobs is None


def test_draws_depend_on_position():
    """A request that continues from its own first tokens draws the same tokens after them."""
    (prompt,), plain = prompts([13]), dataclasses.replace(SAMPLED, top_p=1.0)
    engine = engine_for("vanilla")
    (whole,) = engine.generate([prompt], sampling=plain)
    (rest,) = engine.generate([prompt + whole.tokens[:4]], sampling=plain)
    assert rest.tokens[:8] == whole.tokens[4:]
    # The log-probability of the drawn token under the model's own logits.
    logits = engine.model.logits(np.array([prompt + whole.tokens]))
    steps = log_softmax(logits)[0, len(prompt) - 1 :][:12]
    chex.assert_trees_all_close(
        np.array(whole.logprobs), steps[np.arange(12), whole.tokens], rtol=1e-7, atol=1e-4
    )


def test_ignore_eos_with_grammar_is_refused():
    with pytest.raises(dms_jax.ConfigError, match="ignore_eos"):
        Sampling(ignore_eos=True, grammar=Grammar.lark('start: "a"'))


def test_sampling_sorts_nothing():
    """Sorting a vocabulary of 152K took more than half of a small model's step on a GPU."""
    rule = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01).filter
    arguments = (jnp.zeros((2, 300)), jax.random.split(jax.random.key(0), 2), jnp.zeros(2, int))
    text = str(jax.make_jaxpr(lambda *given: sample(*given, rule))(*arguments))
    assert "argmax" in text
    assert "sort[" not in text
    assert "top_k[" not in text


def test_zero_weight_is_never_chosen_despite_rounding(monkeypatch):
    """A GPU adds in a tree, so the sum up to a weight of 0 may exceed the preceding sum."""
    random = np.random.default_rng(0)
    weights = random.exponential(size=(50, 1, 128)).astype(np.float32)
    weights[random.random(weights.shape) < 0.5] = 0
    exact = np.cumsum(weights, -1)
    # One border between every two indices; random numbers are below 1.
    borders = exact[:, 0] / exact[:, 0, -1:]
    uniform = np.minimum(borders, 1 - 2**-23)
    rounded = exact * np.where(np.arange(128) % 2, 1 + 2**-23, 1)
    monkeypatch.setattr(sampling.jnp, "cumsum", lambda x, axis: jnp.asarray(rounded, x.dtype))
    chosen = sampling._choose(jnp.asarray(weights), jnp.asarray(uniform, jnp.float32))
    assert (np.take_along_axis(weights[:, 0], np.asarray(chosen), -1) > 0).all()
