"""What a training step computes: model operations a token, and their share of the device's peak.

A token of a document takes, forward,

    2 (parameters of the layers) + 2 E V + 4 L H D (keys it sees)

operations: its products with the matrices, with the output matrix (tied or not; the lookup is
free), and with keys and values. The backward pass takes twice that; once where the matrices are
frozen, for then only the gradients of the activations are formed. A teacher takes one forward pass
more. Padding, recomputation and norms do not count: this is what the model needs, not what the
program happens to do.
"""

import math

import jax

from dms_jax.config import ModelConfig
from dms_jax.devices import data_sheet
from dms_jax.model.transformer import Transformer
from dms_jax.training.parameters import is_adapter, parameters


def layer_parameters(transformer: Transformer) -> int:
    """Parameters of the layers' matrices: of what a token is multiplied with, not looked up in."""
    return sum(
        math.prod(x.shape)
        for name, x in parameters(transformer).items()
        if name.startswith("layers.") and name.endswith(".kernel") and not is_adapter(name)
    )


def token_operations(
    config: ModelConfig,
    layer_parameters: int,
    keys: float,
    *,
    frozen: bool = False,
    teacher: bool = False,
) -> float:
    """Model operations of one token of a training step.

    Args:
      config: of the model.
      layer_parameters: of its layers.
      keys: that a token sees, itself included, on average.
      frozen: whether the matrices are not trained.
      teacher: whether a second model is run forward.
    """
    forward = (
        2 * layer_parameters
        + 2 * config.hidden_size * config.vocab_size
        + 4 * config.num_layers * config.num_heads * config.head_dim * keys
    )
    return ((2 if frozen else 3) + teacher) * forward


def peak_operations(mesh: jax.sharding.Mesh | None) -> float | None:
    """Bfloat16 operations a second of all devices of a run; None where they are not known."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    known = [data_sheet(device.device_kind) for device in devices]
    return None if None in known else float(sum(each.peak for each in known if each is not None))
