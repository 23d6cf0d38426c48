"""The tensors of low-rank updates in the file of an adapter, under PEFT's names and layout.

model.layers.{i}.self_attn.q_proj.lora_A.weight   [r, E]
model.layers.{i}.self_attn.q_proj.lora_B.weight   [H * D, r]       (k_proj, v_proj, o_proj alike)
"""

from collections.abc import Iterator

import jax
import numpy as np

from dms_jax import processes, sharding
from dms_jax.checkpoint.names import Layout
from dms_jax.checkpoint.weights import Weights
from dms_jax.errors import CheckpointError, plain
from dms_jax.model import low_rank
from dms_jax.model.low_rank import LowRank, Path
from dms_jax.model.transformer import Transformer


def is_low_rank(name: str) -> bool:
    """Whether a tensor of an adapter is a factor of a low-rank update."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def low_rank_tensors(transformer: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the factors of every layer, only in the first process."""
    for path, param in low_rank.factors_of(transformer).items():
        layout = _layout(path)
        layers = processes.parts((param, layer) for layer in range(param.shape[0]))
        for layer, value in enumerate(layers):
            if value is not None:
                yield layout.tensor_name(layer), layout.to_tensor(value)


def attach_factors(
    transformer: Transformer, size: LowRank, weights: Weights, mesh: jax.sharding.Mesh | None
) -> Transformer:
    """Attaches a file's factors to the weights of a transformer, in the file's type.

    Raises:
        CheckpointError: the tensors are not those of such updates of this transformer.
    """
    factors, expected = {}, low_rank.factor_parameters(transformer, size)
    for path, value in read_factors(transformer, size, weights).items():
        place = None
        if mesh is not None:
            axes = expected[path].get_metadata("axes")
            place = sharding.parameter_sharding(mesh, axes, value.shape)
        factors[path] = processes.put(value, place)
    return low_rank.add_factors(transformer, size, factors)


def read_factors(
    transformer: Transformer, size: LowRank, weights: Weights
) -> dict[Path, np.ndarray]:
    """Reads the factors of a file for a transformer, in the file's type.

    Raises:
        CheckpointError: the tensors are not those of such updates of this transformer.
    """
    expected = low_rank.factor_parameters(transformer, size)
    shapes = {
        layout.tensor_name(layer): layout.tensor_shape(param.get_value().shape[1:])
        for path, param in expected.items()
        for layout in [_layout(path)]
        for layer in range(param.get_value().shape[0])
    }
    found = {name: shape for name, shape in weights.shapes.items() if is_low_rank(name)}
    wrong = [
        f"{plain(name)} ({found.get(name, 'missing')}, expected {shapes.get(name, 'nothing')})"
        for name in sorted(shapes.keys() | found.keys())
        if found.get(name) != shapes.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"the low-rank updates do not fit rank {size.rank} and the base: "
            f"{', '.join(wrong[:5])}; copy the adapter again"
        )
    factors = {}
    for path, param in expected.items():
        layout, shape = _layout(path), param.get_value().shape
        factors[path] = np.stack(
            [
                layout.to_parameter(_read(weights, layout.tensor_name(layer)), shape[1:])
                for layer in range(shape[0])
            ]
        )
    return factors


def _read(weights: Weights, name: str) -> np.ndarray:
    tensor = weights.read(name)
    if not np.isfinite(tensor).all():
        raise CheckpointError(
            f"{weights.file_name(name)}: tensor {name} holds NaN or infinite values; copy the "
            "adapter again"
        )
    return tensor


def _layout(path: Path) -> Layout:
    """The layout of a factor's tensor: a matrix [out, in].

    # ("layers", "attention", "qkv_proj", "q", "lora_b"), each layer [r, K, G, D]
    # -> "model.layers.{i}.self_attn.q_proj.lora_B.weight" [K * G * D, r]
    """
    *_, part, factor = path
    name = f"model.layers.{{i}}.self_attn.{part}_proj.lora_{factor[-1].upper()}.weight"
    if factor == "lora_a":
        return Layout(name, ((2,), (0, 1)) if part == "o" else ((1,), (0,)))
    return Layout(name, ((1,), (0,)) if part == "o" else ((1, 2, 3), (0,)))
