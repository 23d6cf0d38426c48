"""Model FLOPs utilisation: model operations per token, and their share of the device's peak.

A token of a document takes, forward,

    2 (parameters of the layers) + 2 E V + 4 L H D (keys it sees)

operations: its products with the layers' matrices, with the output matrix (tied or not; the lookup
is free), and with keys and values. The backward pass takes twice as many, or as many if the
matrices are frozen, because then only gradients of activations are computed. A teacher takes one
more forward pass. In a stage "supervise" the layers run forward once, and nothing after them does.
Padding, recomputation and norms do not count: the figure is what the model
needs, not what the program executes.
"""

import math
from collections.abc import Mapping

import jax

from dms_jax.config import ModelConfig
from dms_jax.devices import data_sheet
from dms_jax.model.transformer import Transformer
from dms_jax.training.parameters import is_adapter, parameters


def matrix_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of parameters in the layers' matrices, without adapters."""
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith("layers.") and name.endswith(".kernel") and not is_adapter(name)
    )


def layer_parameters(transformer: Transformer) -> int:
    """Returns the number of parameters in the layers' matrices, without adapters."""
    return matrix_parameters({name: x.shape for name, x in parameters(transformer).items()})


def token_operations(
    config: ModelConfig,
    layer_parameters: int,
    keys: float,
    *,
    frozen: bool = False,
    teacher: bool = False,
    stage: str = "ramp",
) -> float:
    """Returns the model operations of one token in a training step.

    Args:
      config: configuration of the model.
      layer_parameters: number of parameters in the layers' matrices.
      keys: mean number of keys that a token sees, itself included.
      frozen: whether the matrices are frozen.
      teacher: whether a teacher runs forward too.
      stage: kind of the stage. In "supervise" only adapters learn, each from its layer's input.
    """
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * keys
    if stage == "supervise":
        return 2 * layer_parameters + attention
    forward = 2 * layer_parameters + 2 * config.hidden_size * config.vocab_size + attention
    return ((2 if frozen else 3) + teacher) * forward


def peak_operations(mesh: jax.sharding.Mesh | None) -> float | None:
    """Returns the peak bfloat16 operations per second of all devices; None if one is unknown."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    known = [data_sheet(device.device_kind) for device in devices]
    return None if None in known else float(sum(each.peak for each in known if each is not None))
