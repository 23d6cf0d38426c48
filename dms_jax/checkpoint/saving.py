"""Save a model and its policy as a Hugging Face directory that transformers opens.

If only an adapter or low-rank updates were trained, they can be saved by themselves (`adapter.py`);
otherwise low-rank updates are written as part of the weights.

Everything is written into a directory beside the target, which replaces it at the end
(`replacing.py`), so that a full disk or an interrupt leaves the old checkpoint and never part of
a new one.

Of several processes, which all call `save`, the first writes. Arrays that are spread over them are
gathered one layer at a time.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dms_jax import processes
from dms_jax.checkpoint import names
from dms_jax.checkpoint.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    adapter_config,
    base_identity,
    differing_shape,
)
from dms_jax.checkpoint.contents import read_checkpoint
from dms_jax.checkpoint.files import MAX_CONFIG_BYTES, expanded, read_json
from dms_jax.checkpoint.low_rank import low_rank_tensors
from dms_jax.checkpoint.policy_fields import policy_to_hf
from dms_jax.checkpoint.replacing import ADAPTER, CHECKPOINT, replacement
from dms_jax.checkpoint.weights import INDEX, SINGLE
from dms_jax.checks import check
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.policies.base import check_adapter, check_policy

MAX_SHARD_BYTES = 5 * 10**9

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(
    model: LanguageModel,
    policy: Policy,
    path: str | pathlib.Path,
    *,
    adapter_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config, tensors, tokenizer and generation defaults; the policy goes into the config.

    Args:
        model: the model to write; tensors keep the dtype of its parameters.
        policy: the cache policy that the model is meant to run with.
        path: directory to write, following a link. If it already contains a checkpoint, its config,
            tensors and tokenizer are replaced; documents beside them (README, licence) are kept,
            and so are the sampling fields of its generation_config.json.
        adapter_only: write only the adapter's tensors and low-rank updates, the policy and the
            identity of the base (a few hundred kilobytes, with low-rank updates megabytes), for
            `load(base, adapter=path)`. The base's files are read again to check that the model
            still has their weights. Otherwise low-rank updates are added to the weights.
        max_shard_bytes: size of a file of tensors, beyond which another one is begun.

    Raises:
        CheckpointError: the path cannot be written, or contains files that do not belong to a
            checkpoint (such as tensors that its index does not name); or a tensor contains NaN; or
            `adapter_only` is set and the other weights are not those of the checkpoint that the
            model was loaded from.
        ConfigError: the policy needs an adapter that the model does not have, would use neurons
            that carry decisions, or gives decisions another meaning than they were trained for; or
            the model's family cannot express its switches.
    """
    check_model(model)
    check_policy(policy)
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(
            f"the path to write a checkpoint to must be a directory: {plain(repr(path))}"
        )
    target = pathlib.Path(os.path.realpath(expanded(path)))
    check_adapter(policy, model.transformer.adapter_shape)
    if model.policy.retrofit.borrowed_neurons not in (None, policy.retrofit.borrowed_neurons):
        raise ConfigError(
            f"this model was made for {model.policy}, whose decisions live in neurons that must "
            f"take no part in attention; saved for {policy} it would use them. Save it with its "
            "own policy"
        )
    trained, asked = model.policy.retrofit.decisions, policy.retrofit.decisions
    if trained is not None and asked is not None and trained != asked:
        raise ConfigError(
            f"this model was made for {model.policy}: its decisions mean {trained}; saved for "
            f"{policy} they would be read as {asked}. Save it with its own policy"
        )
    write = _save_adapter if check("adapter_only", adapter_only, bool) else _save_model
    together, error = processes.Agreement(), None
    try:
        write(model, policy, target, max_shard_bytes)
    except OSError as caught:
        error = CheckpointError(f"the checkpoint cannot be written to {target}: {caught}")
        error.__cause__ = caught
    except (CheckpointError, ConfigError) as caught:
        error = caught
    together.first_done(error)
    if error is not None:
        raise error


def _save_model(
    model: LanguageModel, policy: Policy, target: pathlib.Path, max_shard_bytes: int
) -> None:
    config = _config(model, policy)
    with _gathered(low_rank.merge(model.transformer)) as tensors:
        if not processes.is_first():
            return
        with replacement(target, CHECKPOINT) as directory:
            _write_json(directory / "config.json", config)
            before = read_json(target, "generation_config.json", max_bytes=MAX_CONFIG_BYTES)
            _write_json(
                directory / "generation_config.json", _sampling(before or {}) | _generation(model)
            )
            if model.tokenizer is not None:
                model.tokenizer.save(directory)
            _write_tensors(tensors, directory, max_shard_bytes)


def _save_adapter(model: LanguageModel, policy: Policy, target: pathlib.Path, _: int) -> None:
    size = low_rank.low_rank_of(model.transformer)
    if not policy.retrofit.adapter and size is None:
        raise ConfigError(
            f"{policy} reads no adapter that could be saved alone; save the whole model"
        )
    if policy.retrofit.borrowed_neurons is not None:
        raise ConfigError(
            f"{policy} decides in neurons of the base, which an adapter does not hold; save the "
            "whole model"
        )
    tensors = dict(low_rank_tensors(model.transformer))
    with _gathered(low_rank.drop_factors(model.transformer)) as others:
        if not processes.is_first():
            return
        identity = _unchanged_base(model, others, tensors if policy.retrofit.adapter else {})
    for name, value in tensors.items():
        _check_finite(name, value)
    with replacement(target, ADAPTER) as directory:
        _write_json(directory / ADAPTER_CONFIG, adapter_config(policy, size, identity))
        _save_file(tensors, directory / ADAPTER_TENSORS, _mode(directory / ADAPTER_CONFIG))


def _unchanged_base(
    model: LanguageModel, tensors: Iterator[tuple[str, np.ndarray]], adapter: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Compute the identity of a model's base, after checking that its weights are unchanged.

    Args:
        model: the model with its adapter.
        tensors: its tensors, without low-rank updates.
        adapter: takes those of its adapter.

    Raises:
        CheckpointError: the model was not loaded, or its base is gone or has other weights.
    """
    whole = "save the whole model (adapter_only=False)"
    if model.source is None:
        raise CheckpointError(
            "this model was not loaded from a checkpoint, so that there is no base which an "
            f"adapter could be saved beside; {whole}, or save the base first and load that"
        )
    try:
        base = read_checkpoint(pathlib.Path(model.source))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"the base {model.source}, with which the model must be compared before its adapter "
            f"is saved alone, cannot be read any more: {error}"
        ) from error
    reason = f"the model is not its base {model.source} with an adapter: "
    different = differing_shape(base.config, model.config)
    if different:
        raise CheckpointError(f"{reason}{'; '.join(different)}; {whole}")
    changed = []
    for name, value in tensors:
        if names.ADAPTER_MARK in name:
            adapter[name] = value
        elif not np.array_equal(base.weights.read(name, (), value.dtype), value):
            changed.append(name)
    if changed:
        raise CheckpointError(
            f"{reason}{len(changed)} of its other tensors were changed ({changed[0]}"
            f"{', ...' if len(changed) > 1 else ''}), by training all weights, by merging low-rank "
            f"updates, or because the files were replaced; {whole}"
        )
    return base_identity(base.config, base.weights)


def _config(model: LanguageModel, policy: Policy) -> dict[str, Any]:
    transformer = model.transformer
    fields = transformer.config.to_hf()
    fields["torch_dtype"] = np.dtype(model.dtype).name
    ends = _generation(model)
    fields |= {name: ends[name] for name in _SPECIAL_IDS if name in ends}
    return fields | policy_to_hf(policy, has_adapter=transformer.has_adapter)


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a generation_config.json other than the special tokens."""
    return {name: value for name, value in fields.items() if name not in _SPECIAL_IDS}


def _generation(model: LanguageModel) -> dict[str, Any]:
    defaults = model.generation
    ends = list(defaults.eos_token_ids)
    fields = {
        "bos_token_id": defaults.bos_token_id,
        "eos_token_id": (ends[0] if len(ends) == 1 else ends) if ends else None,
        "pad_token_id": defaults.pad_token_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def _gathered(transformer: Transformer) -> Iterator[Iterator[tuple[str, np.ndarray]]]:
    """Yield the tensors, and go through those that are left: other processes take part in each."""
    tensors = _tensors(transformer)
    try:
        yield tensors
    finally:
        if processes.several():
            for _ in tensors:
                pass


def _tensors(transformer: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor with its Hugging Face name, one at a time; in the first process alone."""
    for path, param in nnx.to_flat_state(nnx.state(transformer, nnx.Param)):
        value = param.get_value()
        pieces = names.PIECES[path]
        stacked = pieces[0].layout.stacked
        for layer, part in enumerate(processes.slices(value, along_first=stacked)):
            if part is None:
                continue
            for piece in pieces:
                layout = piece.layout
                name = layout.tensor_name(layer) if stacked else layout.name
                yield name, layout.to_tensor(part[piece.index(part.ndim)])


def _write_tensors(
    tensors: Iterator[tuple[str, np.ndarray]], directory: pathlib.Path, max_shard_bytes: int
) -> None:
    """Write `model.safetensors`, or numbered shards and their index."""
    mode = _mode(directory / "config.json")
    written: list[tuple[pathlib.Path, list[str]]] = []
    shard: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        nonlocal shard, size
        file = directory / f"shard-{len(written)}"
        _save_file(shard, file, mode)
        written.append((file, list(shard)))
        shard, size = {}, 0

    for name, tensor in tensors:
        _check_finite(name, tensor)
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(directory / SINGLE)
        return
    weight_map = {}
    for number, (file, tensor_names) in enumerate(written, start=1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        file.rename(directory / final)
        weight_map |= dict.fromkeys(tensor_names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX, index)


def _check_finite(name: str, tensor: np.ndarray) -> None:
    if not np.isfinite(tensor).all():
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values; nothing was written, for it could not be "
            "loaded again"
        )


def _mode(file: pathlib.Path) -> int:
    """The permissions of a new file."""
    return file.stat().st_mode & 0o777


def _save_file(tensors: dict[str, np.ndarray], file: pathlib.Path, mode: int) -> None:
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:  # also raised when a system call fails
        raise OSError(str(error)) from error
    file.chmod(mode)  # the library makes files private


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
