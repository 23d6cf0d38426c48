"""Save an adapter without its base.

All processes gather the tensors, which are few and small; the first one writes them.
"""

import pathlib
from typing import Any

import numpy as np
from flax import nnx

from dms_jax.checkpoint import names
from dms_jax.checkpoint.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    adapter_config,
    base_identity,
)
from dms_jax.checkpoint.atomic_replace import ADAPTER, atomic_replace
from dms_jax.checkpoint.contents import read_checkpoint
from dms_jax.checkpoint.distributed_save import Saving
from dms_jax.checkpoint.low_rank import low_rank_tensors
from dms_jax.checkpoint.shard_plan import list_tensors, own_tensors, plan_shards
from dms_jax.checkpoint.tensor_files import check_finite, save_tensors, write_json
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy


class AdapterSaving(Saving):
    """The save of a model's adapter and low-rank updates.

    Raises:
        CheckpointError: the model's other weights are not those of a checkpoint.
        ConfigError: the model has nothing that can be saved without the base.
    """

    def __init__(self, model: LanguageModel, policy: Policy, target: pathlib.Path):
        super().__init__(target)
        self._low_rank = low_rank.low_rank_of(model.transformer)
        if not policy.retrofit.adapter and self._low_rank is None:
            raise ConfigError(
                f"{policy} reads no adapter that could be saved alone; save the whole model"
            )
        if policy.retrofit.borrowed_neurons is not None:
            raise ConfigError(
                f"{policy} decides in neurons of the base, which an adapter does not hold; save "
                "the whole model"
            )
        if model.source is None:
            raise CheckpointError(
                "the other weights of this model are not those of a checkpoint: it was not loaded "
                "from one, all its weights were trained, or low-rank updates were merged into "
                "them. Save the whole model (adapter_only=False), or save the base first and load "
                "that"
            )
        self._model, self._policy, self._base = model, policy, pathlib.Path(model.source)
        self._tensors: dict[str, np.ndarray] = {}

    def _begin(self) -> None:
        transformer = self._model.transformer
        self._tensors = dict(low_rank_tensors(transformer))
        if self._policy.retrofit.adapter:
            state = nnx.state(low_rank.drop_factors(transformer), nnx.Param)
            adapter: dict[names.Path, Any] = {
                path: param.get_value()
                for path, param in nnx.to_flat_state(state)
                if names.is_adapter(names.pieces_of(transformer.config)[path])
            }
            one_file = plan_shards(list_tensors(adapter, transformer.config), max_file_bytes=2**62)
            self._tensors |= dict(own_tensors(adapter, one_file))

    def _write(self) -> None:
        for name, value in self._tensors.items():
            check_finite(name, value)

    def _complete(self) -> None:
        base = read_checkpoint(self._base)
        identity = base_identity(base.config, base.weights)
        with atomic_replace(self._target, ADAPTER) as directory:
            content = adapter_config(self._policy, self._low_rank, identity)
            write_json(directory / ADAPTER_CONFIG, content)
            save_tensors(self._tensors, directory / ADAPTER_TENSORS)
