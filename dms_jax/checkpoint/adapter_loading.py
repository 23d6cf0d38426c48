"""Load adapters without their base, for a model that was loaded from it."""

import pathlib
from collections.abc import Mapping

from dms_jax.checkpoint.adapter import attach, read_adapter
from dms_jax.checkpoint.contents import Contents, read_checkpoint
from dms_jax.checkpoint.load_parameters import load_head
from dms_jax.checkpoint.low_rank import read_factors
from dms_jax.errors import CheckpointError
from dms_jax.model.adapters import AdapterWeights
from dms_jax.model.language_model import LanguageModel


def load_adapters(
    model: LanguageModel, paths: Mapping[str, str | pathlib.Path]
) -> dict[str, AdapterWeights]:
    """Load adapters that were trained on the checkpoint that a model was loaded from.

    Raises:
        CheckpointError: one cannot be read, or was trained on another checkpoint; its name is said.
    """
    found, base = {}, None
    for name, path in paths.items():
        try:
            if model.source is None:
                raise CheckpointError(
                    "its base is not known: this model was loaded from no checkpoint. Give a model "
                    "that has the adapter"
                )
            base = read_checkpoint(pathlib.Path(model.source)) if base is None else base
            found[name] = _load_adapter(model, base, path)
        except CheckpointError as error:
            raise CheckpointError(f"adapter {name!r}: {error}") from error
    return found


def _load_adapter(model: LanguageModel, base: Contents, path: str | pathlib.Path) -> AdapterWeights:
    adapter = read_adapter(path)
    policy, weights = attach(adapter, base.config, base.weights, base.policy)
    shape, arrays = policy.retrofit.adapter, {}
    if shape is not None:
        arrays |= load_head(base.config, weights, shape)
    if adapter.low_rank is not None:
        arrays |= read_factors(model.transformer, adapter.low_rank, adapter.weights)
    return AdapterWeights(policy, shape, adapter.low_rank, arrays)
