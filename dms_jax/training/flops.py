"""Model FLOPs utilisation: model operations per token, and their share of the device's peak.

The forward pass of a token takes

    2 (parameters of the layers) + 2 E V + 4 H D (keys it sees, summed over the layers)

operations: its products with the layers' matrices (only those of its experts), with the output
matrix (tied or not; the lookup is free), and with keys and values. The backward pass takes twice as
many, or the same number if the matrices are frozen and only activations need gradients. A teacher
takes one more forward pass. A stage "supervise" runs the layers forward once, and nothing after
them. Padding, recomputation and norms do not count: the figure is the work of the model, not of the
program.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from dms_jax.config import Experts, ModelConfig
from dms_jax.devices import data_sheet
from dms_jax.training.parameters import is_adapter


def layer_parameters(shapes: Mapping[str, Any], experts: Experts | None) -> int:
    """Returns the number of parameters in the layers' matrices used per token, without adapters.

    Args:
      shapes: the parameters of a transformer by name, or their shapes.
      experts: the expert configuration of its layers; None without experts.
    """
    found = 0
    for name, x in shapes.items():
        if name.startswith("layers.") and name.endswith(".kernel") and not is_adapter(name):
            size = math.prod(x.shape)
            if experts is not None and name.startswith(("layers.mlp.gate_up", "layers.mlp.down")):
                size = size // experts.count * experts.per_token
            found += size
    return found


def attention_operations(config: ModelConfig, keys: float) -> float:
    """Returns the operations of a token's attention in all layers, forward.

    Args:
      config: configuration of the model.
      keys: mean number of keys that a token attends to, itself included, in layers without a
        window.
    """
    full = config.num_full_layers
    seen = full * keys
    if config.window is not None:
        seen += (config.num_layers - full) * min(keys, config.window)
    return 4 * config.num_heads * config.head_dim * seen


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
      layer_parameters: parameters in the layers' matrices used per token.
      keys: see `attention_operations`.
      frozen: whether the matrices are frozen.
      teacher: whether a teacher runs forward too.
      stage: kind of the stage. In "supervise" only adapters learn, each from its layer's input.
    """
    attention = attention_operations(config, keys)
    if stage == "supervise":
        return 2 * layer_parameters + attention
    forward = 2 * layer_parameters + 2 * config.hidden_size * config.vocab_size + attention
    return ((2 if frozen else 3) + teacher) * forward


def peak_operations(mesh: jax.sharding.Mesh | None) -> float | None:
    """Returns the peak bfloat16 operations per second of all devices; None if one is unknown."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    known = [data_sheet(device.device_kind) for device in devices]
    return None if None in known else float(sum(each.peak for each in known if each is not None))
