"""The bytes that layers keep for the backward pass, and what else memory allows.

Outputs of matrix products are kept (`remat="auto"`) if they and the training state take little of a
device's memory. That saves a pass through the layers' matrices, 12% of a step with 8B frozen
weights on an H200. If even then memory is left, parameters that no step changes are whole on every
device (`holds_constants`). The remaining memory is for the loss, the current layer and gathered
matrices.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from dms_jax.checks import Number
from dms_jax.config import ModelConfig
from dms_jax.model.rematerialisation import Remat
from dms_jax.training.recipe import Recipe

SHARE_OF_MEMORY = 0.6
LESS_MEMORY = (
    "These take less memory: `micro_batch_size=1`; `remat='everything'`; `trainable='adapter'` or "
    "'low_rank', without moments of frozen weights; a shorter `sequence_length`; more devices, "
    "along 'data', or along 'sequence' (make_mesh(..., sequence=2), --sequence-shards 2) for "
    "long sequences."
)


def kept_bytes(
    config: ModelConfig,
    recipe: Recipe,
    remat: Remat,
    sequences: int,
    *,
    model: int,
    sequence: int = 1,
) -> float:
    """Returns the bytes that all layers keep on a device; 0 for "nothing" (unknown).

    Devices along `model` split heads and feed-forward; each keeps hidden states whole.

    Args:
      config: the model's shape.
      recipe: the recipe, for the length of a sequence and the type of the passes.
      remat: the setting of recomputation.
      sequences: sequences of a pass on a device.
      model: size of the axis `model`.
      sequence: size of the axis `sequence`, which splits the tokens of sequences.
    """
    width, attended = config.hidden_size, config.num_heads * config.head_dim
    projected = attended + 2 * config.num_kv_heads * config.head_dim
    # The products of experts are always recomputed.
    gates = 2 * config.intermediate_size if config.experts is None else 0
    values = {
        "nothing": 0,
        "all_but_products": 2 * width + (attended + projected + gates) / model,
        "all_but_attention": width + attended / model,
        "everything": width,
    }
    tokens = sequences * recipe.sequence_length / sequence
    size = jnp.dtype(recipe.compute_dtype or jnp.float32).itemsize
    return float(config.num_layers * tokens * values[remat] * size)


class Room(NamedTuple):
    """What decides whether a setting fits a device.

    Attributes:
      config: the model's shape.
      parameters: number of all parameters.
      trained: number of trained parameters.
      shards: sizes of the axes `data`, `sequence` and `model`.
      memory: bytes of a device; None if unknown, and then nothing fits.
    """

    config: ModelConfig
    parameters: int
    trained: int
    shards: tuple[int, int, int]
    memory: Number | None

    def holds(self, recipe: Recipe, remat: Remat, more: Number = 0) -> bool:
        """Whether kept activations, the training state and `more` bytes take little of a device."""
        data, sequence, model = self.shards
        sequences = recipe.pass_size(data) // data
        kept = kept_bytes(self.config, recipe, remat, sequences, model=model, sequence=sequence)
        # Trained parameters in float32 with two moments and a gradient; all parameters in the
        # passes' type.
        state = (16 * self.trained + 2 * self.parameters) / math.prod(self.shards)
        return self.memory is not None and kept + state + more < SHARE_OF_MEMORY * self.memory


def choose_remat(recipe: Recipe, room: Room) -> Recipe:
    """Returns the recipe with "auto" in `remat` resolved."""
    if recipe.remat != "auto":
        return recipe
    fits = room.holds(recipe, "all_but_products")
    return dataclasses.replace(recipe, remat="all_but_products" if fits else "all_but_attention")


def holds_constants(recipe: Recipe, room: Room, constants: Number) -> bool:
    """Whether every device holds the parameters that no step changes, instead of its shard.

    Args:
      recipe: the recipe, with "auto" in `remat` resolved.
      room: the model and the devices.
      constants: bytes of these parameters, over all devices along `model`.
    """
    if recipe.remat in ("auto", "nothing"):
        return False
    return room.holds(recipe, recipe.remat, constants / room.shards[-1])
