"""What tells the weights that a run began with from others: a digest of every one of them.

Frozen weights and a teacher's are in no checkpoint: a run that is resumed takes them again from the
model that it is given, which must be the same. Adapters and low-rank updates do not count, nor does
anything where all weights are trained without a teacher: the checkpoint holds those.

The bits of the numbers are summed as whole numbers, in rows of a parameter, so that the digest is
the same however parameters are split over devices, and what is sent is small.
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


def base_digest(model: LanguageModel, policy: Policy, recipe: Recipe) -> str | None:
    """Returns the digest of the weights that a checkpoint of the run lacks; None if it has all."""
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
    """Returns the compiled sums of rows, which every device then has."""
    return jax.jit(_sums, out_shardings=everywhere)


def _sums(arrays: Parameters) -> Parameters:
    """Returns the sum of the bits of each row [rows, ...] of each parameter."""

    def rows(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        wide = jnp.promote_types(bits.dtype, jnp.uint32)
        return bits.reshape(len(x), math.prod(x.shape[1:])).sum(1, dtype=wide)

    return {name: rows(x) for name, x in arrays.items()}
