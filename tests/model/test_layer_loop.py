"""The loop over layers: however many layers a turn has, each is given its own."""

import chex
import jax
import jax.numpy as jnp
import pytest

from dms_jax.model.layer_loop import scan_layers
from dms_jax.policies import Vanilla
from dms_jax.policies.base import LayerGroup

LAYERS = 6
KEY = jax.random.key(0)
PARAMETERS = {
    "matrix": jax.random.normal(KEY, (LAYERS, 3, 3)),
    "vector": jax.random.normal(KEY, (LAYERS, 3)),
}
OWN = {"numbers": jnp.arange(2 * LAYERS).reshape(LAYERS, 2), "none": None}
OWN |= {"empty": jnp.zeros((LAYERS, 2, 0))}  # as DMC's sums with a window of 1


def body(x, layer, index, group, own):
    x = jnp.tanh(x @ layer["matrix"]) * layer["vector"]
    return x, {
        "index": index,
        "start": group.start,
        "sum": own["numbers"].sum(),
        "none": None,
        "empty": own["empty"],
    }


def groups(*ends):
    starts = (0, *ends)
    return tuple(
        LayerGroup(start, end, Vanilla()) for start, end in zip(starts, ends, strict=False)
    )


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("ends", [(6,), (2, 6), (1, 3, 6)])
def test_layers_in_turns_of_any_length(ends, block):
    x = jnp.ones(3)
    got, results = jax.jit(
        lambda x: scan_layers(body, x, PARAMETERS, groups(*ends), OWN, block=block)
    )(x)
    for layer in range(LAYERS):
        x = jnp.tanh(x @ PARAMETERS["matrix"][layer]) * PARAMETERS["vector"][layer]
    chex.assert_trees_all_close(got, x, atol=1e-6)
    assert results["index"].tolist() == list(range(LAYERS))
    assert results["sum"].tolist() == [4 * layer + 1 for layer in range(LAYERS)]
    starts = [max(s for s in (0, *ends) if s <= layer) for layer in range(LAYERS)]
    assert results["start"].tolist() == starts
    assert results["none"] is None
    assert results["empty"].shape == (LAYERS, 2, 0)


@pytest.mark.parametrize(("block", "turns"), [(1, 6), (2, 3), (3, 2), (4, 2), (5, 2)])
def test_turns_are_as_long_as_divides_the_layers(block, turns):
    jaxpr = jax.make_jaxpr(lambda x: scan_layers(body, x, PARAMETERS, groups(6), OWN, block=block))(
        jnp.ones(3)
    )
    (loop,) = (each for each in jaxpr.eqns if each.primitive.name == "scan")
    assert loop.params["length"] == turns
