"""The fingerprint of weights that checkpoints leave out."""

import dataclasses

import jax
import jax.numpy as jnp

from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Vanilla
from dms_jax.sharding import TRAINING_RULES, make_mesh
from dms_jax.training import api
from dms_jax.training.parameters import add_adapter, parameters, rebuilder, shardings
from tests.training.tiny import ADAPTER, language_model, recipe


def test_the_fingerprint_covers_every_weight_on_any_mesh():
    transformer = add_adapter(language_model().transformer)
    places = shardings(transformer, make_mesh(4, 2), TRAINING_RULES)
    rebuild, arrays = rebuilder(transformer), parameters(transformer)

    def digest(arrays):
        return api._frozen_weights(LanguageModel(rebuild(arrays)), ADAPTER, recipe())

    split = {name: jax.device_put(x, places[name]) for name, x in arrays.items()}
    name = "layers.mlp.down_proj.kernel"
    assert not split[name].is_fully_replicated
    assert digest(split) == digest(arrays)
    changed = split | {name: split[name].at[1, 2, 3].multiply(1.001)}
    assert digest(changed) != digest(arrays)
    half = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    assert digest(half) != digest(arrays)
    # Adapters are trained, and in the checkpoint.
    trained = {name: x + 1 if ".adapter." in name else x for name, x in arrays.items()}
    assert digest(trained) == digest(arrays)


def test_no_fingerprint_if_checkpoints_hold_all_weights():
    plain = recipe(loss="language_modeling", trainable="all")
    assert api._frozen_weights(language_model(), Vanilla(), plain) is None
    frozen = dataclasses.replace(plain, trainable="low_rank")
    assert api._frozen_weights(language_model(), Vanilla(), frozen) is not None
