"""Fingerprint of the weights that a run starts from: a digest of all weights.

Checkpoints hold neither frozen weights nor the teacher's, so a resumed run takes them from the
given model, which must be the same. Adapters and low-rank updates are not part of the fingerprint.
It is None if all weights are trained without a teacher, as checkpoints then hold everything.

The bits of the numbers are summed as integers, per row of each parameter, so the result does not
depend on sharding and little is transferred.
"""

import functools
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training.parameters import Parameters, is_adapter, is_low_rank, parameters
from dms_jax.training.recipe import Recipe


def weights_fingerprint(model: LanguageModel, policy: Policy, recipe: Recipe) -> str | None:
    """Returns the fingerprint of the weights that checkpoints lack; None if they lack none."""
    if recipe.loss != "distillation" and recipe.trained_for(policy) == "all":
        return None
    arrays = {
        name: x
        for name, x in parameters(model.transformer).items()
        if not is_adapter(name) and not is_low_rank(name)
    }
    place = arrays["embedding"].sharding
    everywhere = None
    if isinstance(place, NamedSharding):
        everywhere = NamedSharding(place.mesh, PartitionSpec())
    digest = hashlib.sha256()
    for name, sums in sorted(_summing(everywhere)(arrays).items()):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}\n".encode())
        digest.update(np.asarray(sums.addressable_data(0)).tobytes())
    return digest.hexdigest()


@functools.cache
def _summing(everywhere: NamedSharding | None) -> Any:
    """Returns the jitted `_sums`, replicated on every device."""
    return jax.jit(_sums, out_shardings=everywhere)


def _sums(arrays: Parameters) -> Parameters:
    """Returns the sum of the bits of each row [rows, ...] of each parameter."""

    def rows(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        wide = jnp.promote_types(bits.dtype, jnp.uint32)
        return bits.reshape(len(x), math.prod(x.shape[1:])).sum(1, dtype=wide)

    return {name: rows(x) for name, x in arrays.items()}
