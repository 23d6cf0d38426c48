"""The programs of a draw on a GPU: no sort, few passes over the vocabulary, no conditional loop."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from dms_jax.generation.sampling import LanesFilter, Sampling, sample


def inside(equation) -> list:
    """Returns the jaxprs inside an equation; of a choice between platforms, the one for GPUs."""
    branches = equation.params.get("branches_platforms")
    if branches is None:
        return [*jax.extend.core.jaxprs_in_params(equation.params)]
    taken = next(i for i, names in enumerate(branches) if names is None or "cuda" in names)
    return [equation.params["branches"][taken].jaxpr]


def chooses(equation) -> bool:
    """Returns whether an equation is a conditional on the device."""
    return equation.primitive.name == "cond" and "branches_platforms" not in equation.params


def test_sampling_sorts_nothing():
    """Sorting a vocabulary of 152K took more than half of a small model's step on a GPU."""
    rule = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01).filter
    arguments = (jnp.zeros((2, 300)), jax.random.split(jax.random.key(0), 2), jnp.zeros(2, int))
    text = str(jax.make_jaxpr(lambda *given: sample(*given, rule))(*arguments))
    assert "argmax" in text
    assert "sort[" not in text
    assert "top_k[" not in text


def passes_over_the_vocabulary(rule: Sampling, size: int = 300) -> tuple[int, int]:
    """Returns a draw's numbers of sums and maxima over a vocabulary, and of loops."""
    keys = jax.random.split(jax.random.key(0), 2)
    given = (jnp.zeros((2, size)), keys, jnp.zeros(2, int))
    traced = jax.make_jaxpr(lambda *given: sample(*given, rule.filter)[0])(*given)
    reductions = loops = 0
    pending = [traced.jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            pending.extend(inside(equation))
            loops += equation.primitive.name in ("while", "scan") or chooses(equation)
            reduces = equation.primitive.name in ("reduce_sum", "reduce_max", "argmax")
            reductions += reduces and equation.invars[0].aval.shape[-1] == size
    return reductions, loops


@pytest.mark.nightly
def test_common_top_p_needs_no_search():
    """A search reads the vocabulary eight times, with 15 sums each, in every step."""
    plain, _ = passes_over_the_vocabulary(Sampling())
    searched, loops = passes_over_the_vocabulary(Sampling(top_p=0.5))
    assert (searched, loops) == (plain + 1 + 8 * 15, 0)
    reductions, loops = passes_over_the_vocabulary(Sampling(top_p=0.95))
    # Five sums that share a kernel: four trials and the total. If none of the four is kept, also
    # the twelve other trials and the most likely token.
    assert loops == 1
    assert reductions <= plain + 5 + 14


def test_conditional_branches_have_no_loop():
    """Otherwise XLA makes the host wait for each conditional before it launches more."""
    asked = (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(temperature=0))
    rule = LanesFilter(3).of(dict(enumerate(asked)))
    keys = jax.random.split(jax.random.key(0), 3)
    given = (jnp.zeros((3, 300)), keys, jnp.zeros(3, int))
    traced = jax.make_jaxpr(lambda *given: sample(*given, rule))(*given)
    pending, choices = [(traced.jaxpr, False)], 0
    while pending:
        jaxpr, chosen = pending.pop()
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            assert not (chosen and name in ("while", "scan"))
            choices += chooses(equation)
            pending += [(each, chosen or chooses(equation)) for each in inside(equation)]
    assert choices == 2  # for a search, and for more trials
