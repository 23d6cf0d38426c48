"""The programs of a draw on a GPU: no sort, few passes over the vocabulary, no conditional loop."""

import jax
import jax.extend
import jax.numpy as jnp

from dms_jax.generation.sampling import Sampling, sample


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
