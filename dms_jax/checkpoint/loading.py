"""Load models (Hugging Face directories, hub models, GGUF files) and adapters for them."""

import contextlib
import importlib
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import jax

from dms_jax import executables, sharding
from dms_jax.checkpoint.adapter import attach, read_adapter
from dms_jax.checkpoint.contents import Contents, find_checkpoint, read_checkpoint
from dms_jax.checkpoint.load_parameters import load_head, load_parameters, read_factors
from dms_jax.checks import check
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model import low_rank
from dms_jax.model.adapters import AdapterWeights
from dms_jax.model.initialization import parameter_dtype
from dms_jax.model.language_model import LanguageModel


def load(
    path: str | pathlib.Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    adapter: str | pathlib.Path | None = None,
    merge: bool = False,
    for_training: bool = False,
    untrained: bool = False,
) -> LanguageModel:
    """Loads a checkpoint.

    Args:
        path: a Hugging Face directory, a hub id ("owner/name" or "owner/name@revision"), or a GGUF
            file (any part of a split model).
        dtype: type of the parameters; None keeps the files' type, or float32 if they are quantised.
        mesh: devices for the parameters; None for the default device.
        adapter: directory of an adapter that was trained on this checkpoint with its weights frozen
            (`save(..., adapter_only=True)`). Its tensors keep their type, because decisions compare
            its output with a threshold; its policy becomes the model's.
        merge: whether to add the adapter's low-rank updates to the weights. False keeps them
            beside the weights, as PEFT does: the model can then be trained further, and its adapter
            saved again. True is like PEFT's `merge_and_unload`, and saves eight small products per
            layer; it has no effect without low-rank updates.
        for_training: whether the mesh's `data` axis splits the parameters too, as in training, so
            that no device holds the whole model. `model.place()` places them for decoding.
        untrained: whether to allow policies that the model was not trained for (DMS and DMC with an
            attention neuron); for tests and benchmarks.

    Returns:
        the model, with its tokenizer (or None) and the policy that its config declares (`Vanilla()`
        if none).

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit its config; or the adapter
            was trained on another checkpoint.
        ConfigError: the config is malformed, or describes a model that is not supported exactly.
    """
    dtype = None if dtype is None else parameter_dtype(dtype)
    merge = check("load: merge", merge, bool)
    for_training = check("load: for_training", for_training, bool)
    untrained = check("load: untrained", untrained, bool)
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ConfigError(f"mesh must come from dms_jax.make_mesh, got {mesh!r:.80}")
    place = find_checkpoint(path)
    threading.Thread(target=_start_device, name="dms_jax device").start()
    contents = read_checkpoint(place)
    policy = contents.policy
    weights, shape = contents.weights, contents.adapter
    found = None if adapter is None else read_adapter(adapter)
    if found is not None:
        policy, weights = attach(found, contents.config, weights, policy)
        shape = policy.retrofit.adapter
    transformer = load_parameters(
        contents.config,
        weights,
        adapter=shape,
        dtype=dtype,
        adapter_dtype=dtype if adapter is None else None,
        mesh=mesh,
        rules=sharding.TRAINING_RULES if for_training else sharding.DECODING_RULES,
    )
    source = os.path.abspath(place)
    if found is not None and found.low_rank is not None:
        factors = read_factors(transformer, found.low_rank, found.weights, mesh)
        transformer = low_rank.add_factors(transformer, found.low_rank, factors)
        if merge:
            transformer, source = low_rank.merge(transformer), None
    return LanguageModel(
        transformer=transformer,
        tokenizer=contents.tokenizer,
        policy=policy,
        generation=contents.generation,
        mesh=mesh,
        source=source,
        untrained=untrained,
    )


def load_adapters(
    model: LanguageModel, paths: Mapping[str, str | pathlib.Path]
) -> dict[str, AdapterWeights]:
    """Loads adapters that were trained on a model's checkpoint.

    Raises:
        CheckpointError: an adapter cannot be read, or was trained on another checkpoint.
    """
    found, base = {}, None
    for name, path in paths.items():
        try:
            if model.source is None:
                raise CheckpointError(
                    "its base is not known: this model has the weights of no checkpoint. Give a "
                    "model that has the adapter"
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
        arrays |= read_factors(model.transformer, adapter.low_rank, adapter.weights, None)
    return AdapterWeights(policy, shape, adapter.low_rank, jax.device_get(arrays))


def _start_device() -> None:
    """Starts the device and imports the modules of its programs, while files are read.

    A GPU takes a second or two. Errors are raised again when the device is used.
    """
    with contextlib.suppress(Exception):
        executables.import_runtime(jax.default_backend())
        importlib.import_module("jax.experimental.pallas.tpu")  # see `compilation.prepare`
