"""Save an adapter without its base, after checking that the frozen weights are the base's.

Each process compares the weights on its own devices, so no base weights are sent between processes.
The first process writes the adapter, which is small.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from dms_jax import processes
from dms_jax.checkpoint import names
from dms_jax.checkpoint.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    adapter_config,
    base_identity,
    differing_shape,
)
from dms_jax.checkpoint.atomic_replace import ADAPTER, atomic_replace
from dms_jax.checkpoint.contents import Contents, read_checkpoint
from dms_jax.checkpoint.distributed_save import Saving
from dms_jax.checkpoint.load_parameters import read_tensor
from dms_jax.checkpoint.low_rank import low_rank_tensors
from dms_jax.checkpoint.shard_plan import list_tensors, own_tensors, plan_shards
from dms_jax.checkpoint.tensor_files import check_finite, save_tensors, write_json
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

_WHOLE = "save the whole model (adapter_only=False)"


class AdapterSaving(Saving):
    """The save of a model's adapter and low-rank updates.

    The frozen weights stay on the devices until they have been compared.

    Raises:
        ConfigError: the model has nothing that can be saved without the base.
    """

    def __init__(self, model: LanguageModel, policy: Policy, target: pathlib.Path):
        super().__init__(target)
        self._low_rank = low_rank.low_rank_of(model.transformer)
        if not policy.retrofit.adapter and self._low_rank is None:
            raise ConfigError(f"{policy} has no adapter to save alone; save the whole model")
        if policy.retrofit.borrowed_neurons is not None:
            raise ConfigError(
                f"{policy} decides in neurons of the base, which an adapter does not hold; save "
                "the whole model"
            )
        self._model, self._policy = model, policy
        self._frozen: dict[names.Path, Any] = {}
        self._tensors: dict[str, np.ndarray] = {}
        self._identity: dict[str, Any] = {}

    def _begin(self) -> None:
        transformer = self._model.transformer
        state = nnx.state(low_rank.drop_factors(transformer), nnx.Param)
        adapter = {}
        for path, param in nnx.to_flat_state(state):
            own = names.is_adapter(names.pieces_of(transformer.config)[path])
            (adapter if own else self._frozen)[path] = param.get_value()
        self._tensors = dict(low_rank_tensors(transformer))
        if self._policy.retrofit.adapter:
            one_file = plan_shards(list_tensors(adapter, transformer.config), max_file_bytes=2**62)
            self._tensors |= dict(own_tensors(adapter, one_file))

    def _write(self) -> None:
        base = self._base()
        changed = _changed(base, self._frozen)
        if changed:
            raise CheckpointError(
                f"{self._reason}{len(changed)} of its other tensors were changed ({changed[0]}"
                f"{', ...' if len(changed) > 1 else ''}), by training all weights, by merging "
                f"low-rank updates, or because the files were replaced; {_WHOLE}"
            )
        if processes.is_first():
            self._identity = base_identity(base.config, base.weights)
        for name, value in self._tensors.items():
            check_finite(name, value)

    def _complete(self) -> None:
        with atomic_replace(self._target, ADAPTER) as directory:
            content = adapter_config(self._policy, self._low_rank, self._identity)
            write_json(directory / ADAPTER_CONFIG, content)
            save_tensors(self._tensors, directory / ADAPTER_TENSORS)

    @property
    def _reason(self) -> str:
        return f"the model is not its base {self._model.source} with an adapter: "

    def _base(self) -> Contents:
        """Reads the checkpoint that the model was loaded from.

        Raises:
            CheckpointError: the model was not loaded from a checkpoint, or its base is gone or has
              another shape.
        """
        source = self._model.source
        if source is None:
            raise CheckpointError(
                "this model was not loaded from a checkpoint, so its adapter has no base; "
                f"{_WHOLE}, or save the base first and load that"
            )
        try:
            base = read_checkpoint(pathlib.Path(source))
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(
                f"saving an adapter alone compares the model with its base {source}, which cannot "
                f"be read: {error}"
            ) from error
        different = differing_shape(base.config, self._model.config)
        if different:
            raise CheckpointError(f"{self._reason}{'; '.join(different)}; {_WHOLE}")
        return base


def _changed(base: Contents, frozen: dict[names.Path, Any]) -> list[str]:
    """Lists the tensors whose part on this process differs from the base."""
    found: dict[str, None] = {}
    for path, value in frozen.items():
        pieces = names.pieces_of(base.config)[path]
        for layer, index, part in _own_parts(value, stacked=pieces[0].layout.stacked):
            shape = value.shape[value.ndim - part.ndim :]
            for piece in pieces:
                if (lies := piece.within(index, shape)) is None:
                    continue
                layout, (there, own) = piece.layout, lies
                ours = part[there]
                theirs = read_tensor(
                    base.weights, layout, layer, piece.shape(shape), own, ours.dtype
                )
                if not np.array_equal(theirs, ours):
                    found[layout.tensor_name(layer)] = None
    return list(found)


def _own_parts(
    value: jax.Array, *, stacked: bool
) -> Iterator[tuple[int, tuple[slice, ...], np.ndarray]]:
    """Yields layer, index in the layer and values of each shard on this process's devices.

    Yields only the first of several replicas.
    """
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            host = processes.to_host(shard.data)
            if not stacked:
                yield 0, shard.index, host
                continue
            for layer, part in zip(range(value.shape[0])[shard.index[0]], host, strict=True):
                yield layer, shard.index[1:], part
