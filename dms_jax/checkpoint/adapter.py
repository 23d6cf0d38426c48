"""Adapter files: the trained parts of a model with otherwise frozen weights.

    dms_adapter.json          the policy, the identity of the model that it was trained on (its
                              base), and the rank and alpha of low-rank updates if there are any
    dms_adapter.safetensors   the tensors of the DMS adapter, under NVIDIA's names; the factors of
                              low-rank updates, under PEFT's names

The identity of a base is its shape and, for each kind of tensor, one SHA-256 of its vectors, or of
three rows of each of its matrices, in float32 over all layers. It depends neither on the file
format nor on the dtype in which the base is loaded.
"""

import collections
import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np

from dms_jax import policies
from dms_jax.checkpoint import names
from dms_jax.checkpoint.files import expanded, find, is_directory, read_json
from dms_jax.checkpoint.weights import Tensors, Weights
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import Policy

ADAPTER_CONFIG = "dms_adapter.json"
ADAPTER_TENSORS = "dms_adapter.safetensors"
_FORMAT = 1

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The contents of an adapter directory.

    Attributes:
        directory: its path.
        policy: the policy that it was trained for.
        low_rank: the size of its low-rank updates; None if it has none.
        shape: the fields of the base's config that define its shape.
        hashes: SHA-256 of the base's tensors, by kind of tensor.
        weights: the adapter's tensors.
    """

    directory: pathlib.Path
    policy: Policy
    low_rank: LowRank | None
    shape: dict[str, Any]
    hashes: dict[str, Any]
    weights: Weights


class _Joined(Tensors):
    """The tensors of a base and of an adapter, which replaces any adapter of the base."""

    def __init__(self, base: Tensors, adapter: Tensors):
        self.config_name = base.config_name
        self._parts = {name: base for name in base.shapes if names.ADAPTER_MARK not in name}
        own = (name for name in adapter.shapes if names.ADAPTER_MARK in name)
        self._parts |= dict.fromkeys(own, adapter)
        self.shapes = {name: part.shapes[name] for name, part in self._parts.items()}
        self.dtypes = {name: part.dtypes[name] for name, part in self._parts.items()}
        self._base = base

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        return self._parts[name].read(name, index, dtype)

    def file_name(self, name: str) -> str:
        return self._parts[name].file_name(name)

    def stored_name(self, name: str) -> str:
        return self._parts.get(name, self._base).stored_name(name)


def base_identity(config: ModelConfig, weights: Tensors) -> dict[str, Any]:
    """Computes the identity of a base, in the form of `dms_adapter.json`."""
    hashes: dict[str, Any] = collections.defaultdict(hashlib.sha256)
    for name in sorted(weights.shapes):
        skipped = names.is_derived(name) or names.ADAPTER_MARK in name
        if skipped or (name == names.LM_HEAD and config.tie_embeddings):
            continue
        shape = weights.shapes[name]
        rows = sorted({0, shape[0] // 2, shape[0] - 1}) if len(shape) > 1 else []
        parts = [(slice(row, row + 1), *(slice(None),) * (len(shape) - 1)) for row in rows]
        digest = hashes[_kind(name)]
        digest.update(f"{name} {list(shape)}\n".encode())
        for part in parts or [()]:
            digest.update(weights.read(name, part, np.float32).astype("<f4").tobytes())
    return {
        "shape": {field: getattr(config, field) for field in _SHAPE},
        "sha256": {kind: digest.hexdigest() for kind, digest in sorted(hashes.items())},
    }


def adapter_config(
    policy: Policy, low_rank: LowRank | None, identity: dict[str, Any]
) -> dict[str, Any]:
    """The contents of `dms_adapter.json`."""
    fields = {"format": _FORMAT, "policy": policy.to_dict(), "base": identity}
    if low_rank is not None:
        fields["low_rank"] = dataclasses.asdict(low_rank)
    return fields


def of_run(directory: pathlib.Path, file: str) -> pathlib.Path | None:
    """Finds the output of a `retrofit` run: the subdirectory that has this file, or None.

    A self-taught run trains in a subdirectory.
    """
    places = (directory / "model", directory / "training" / "model")
    return next((place for place in places if (place / file).exists()), None)


def read_adapter(path: str | pathlib.Path) -> Adapter:
    """Reads the directory of an adapter.

    Raises:
        CheckpointError: the directory holds no adapter, or a damaged one.
    """
    directory = expanded(path, "the path of an adapter must be a directory")
    if not is_directory(directory):
        raise CheckpointError(
            f"there is no directory {directory} of an adapter; one holds {ADAPTER_CONFIG}"
        )
    fields = read_json(directory, ADAPTER_CONFIG)
    if fields is None:
        hint = f"; the directory of an adapter holds {ADAPTER_CONFIG} and {ADAPTER_TENSORS}"
        if find(directory, "config.json"):
            hint = "; it holds a whole model: load that"
        elif find(directory, "adapter_config.json"):
            hint = "; it holds an adapter of PEFT: merge it into its model there, and load that"
        elif below := of_run(directory, ADAPTER_CONFIG):
            hint = f"; the adapter of this run is in {below}"
        raise CheckpointError(f"{directory / ADAPTER_CONFIG} does not exist{hint}")
    if fields.get("format") != _FORMAT:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG} has format {plain(repr(fields.get('format')), 40)}, "
            f"which is not supported (supported: {_FORMAT}); a later version of dms_jax wrote it"
        )
    try:
        base = dict(fields["base"])
        shape, hashes = dict(base["shape"]), dict(base["sha256"])
        policy = policies.from_dict(fields["policy"])
        low_rank = LowRank(**fields["low_rank"]) if "low_rank" in fields else None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG} does not name the adapter's policy and base; copy it "
            "again"
        ) from error
    except ConfigError as error:
        raise CheckpointError(f"{directory / ADAPTER_CONFIG}: {error}") from error
    if not policy.retrofit.adapter and low_rank is None:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG} names {policy}, which has no adapter; copy it again"
        )
    file = find(directory, ADAPTER_TENSORS)
    if file is None:
        raise CheckpointError(f"{directory / ADAPTER_TENSORS} does not exist; copy it again")
    weights = Weights([file])
    others = [
        name
        for name in weights.shapes
        if not (policy.retrofit.adapter and names.ADAPTER_MARK in name)
        and not (low_rank is not None and names.is_low_rank(name))
    ]
    if others:
        raise CheckpointError(
            f"{directory / ADAPTER_TENSORS} holds tensors that are of no adapter: "
            f"{', '.join(plain(name) for name in sorted(others)[:5])}"
        )
    return Adapter(directory, policy, low_rank, shape, hashes, weights)


def attach(
    adapter: Adapter, config: ModelConfig, weights: Tensors, policy: Policy
) -> tuple[Policy, Tensors]:
    """Checks an adapter against a base and joins their tensors.

    Args:
        adapter: the adapter.
        config: the base's config.
        weights: the base's tensors.
        policy: the policy that the base declares.

    Returns:
        the adapter's policy, and the base's tensors with those of its DMS adapter.

    Raises:
        CheckpointError: the adapter was trained on another base.
    """
    if policy.retrofit.borrowed_neurons is not None:
        raise CheckpointError(
            f"the base was made for {policy}, whose decision neurons must take no "
            f"part in attention; the adapter in {adapter.directory} was trained on a plain one"
        )
    found = base_identity(config, weights)
    differences = _differing(found["shape"], adapter.shape)
    if not differences:
        kinds = sorted(found["sha256"].keys() | adapter.hashes.keys())
        other = [k for k in kinds if found["sha256"].get(k) != adapter.hashes.get(k)]
        if other:
            differences = [f"other numbers in {', '.join(plain(kind, 60) for kind in other)}"]
    if differences:
        raise CheckpointError(
            f"the adapter in {adapter.directory} was trained on another base: "
            f"{'; '.join(differences)}. Load it with the checkpoint that it was trained on"
        )
    return adapter.policy, _Joined(weights, adapter.weights)


def differing_shape(config: ModelConfig, other: ModelConfig) -> list[str]:
    """Describes how the shapes of two models differ; an empty list if they are equal."""
    return _differing(*({field: getattr(c, field) for field in _SHAPE} for c in (config, other)))


def _kind(name: str) -> str:
    """Strips the layer from the name of a tensor.

    # model.layers.3.mlp.up_proj.weight  ->  mlp.up_proj.weight
    """
    parts = name.split(".")
    return ".".join(parts[3:] if parts[:2] == ["model", "layers"] else parts)


def _differing(base: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Describes the fields of a base's shape that differ from those an adapter requires."""
    return [
        f"{field} is {base[field]} in the base, and {plain(there.get(field), 40)} for the adapter"
        for field in _SHAPE
        if base[field] != there.get(field)
    ]
