"""Save a model and its policy as a Hugging Face directory that transformers opens.

Everything is written into a directory beside the target, which takes its place at the end
(`replacing.py`), so that a full disk or an interrupt leaves the old checkpoint, never half of one.
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dms_jax.checkpoint import names
from dms_jax.checkpoint.files import MAX_CONFIG_BYTES, expanded, read_json
from dms_jax.checkpoint.policy_fields import policy_to_hf
from dms_jax.checkpoint.replacing import replacement
from dms_jax.checkpoint.weights import INDEX, SINGLE
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy
from dms_jax.policies.base import check_adapter, check_policy

MAX_SHARD_BYTES = 5 * 10**9

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(
    model: LanguageModel,
    policy: Policy,
    path: str | pathlib.Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config, tensors, tokenizer and generation defaults; the policy goes into the config.

    Args:
        model: what to write; tensors keep the dtype of its parameters.
        policy: the cache policy that the model is meant to run with.
        path: directory to make; where it is a link, what it leads to. A checkpoint that is already
            there is replaced: its config, tensors and tokenizer. What stands beside them stays
            (README, licence), and so do the fields of its generation_config.json that say how to
            sample.
        max_shard_bytes: tensors beyond this many bytes are split over several files.

    Raises:
        CheckpointError: the path cannot be written, or holds something that is of no checkpoint
            (tensors that its index does not name are not); or a tensor holds NaN.
        ConfigError: the policy reads an adapter that the model does not have, would use neurons
            that carry decisions, or would take decisions for what they were not trained to be; or
            the family cannot express the model.
    """
    check_model(model)
    check_policy(policy)
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(
            f"the path to write a checkpoint to must be a directory: {plain(repr(path))}"
        )
    target = pathlib.Path(os.path.realpath(expanded(path)))
    check_adapter(policy, has_adapter=model.transformer.has_adapter)
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
    config = _config(model, policy)
    try:
        with replacement(target) as directory:
            _write_json(directory / "config.json", config)
            before = read_json(target, "generation_config.json", max_bytes=MAX_CONFIG_BYTES)
            _write_json(
                directory / "generation_config.json", _sampling(before or {}) | _generation(model)
            )
            if model.tokenizer is not None:
                model.tokenizer.save(directory)
            _write_tensors(model, directory, max_shard_bytes)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {target}: {error}") from error


def _config(model: LanguageModel, policy: Policy) -> dict[str, Any]:
    transformer = model.transformer
    fields = transformer.config.to_hf()
    fields["torch_dtype"] = np.dtype(model.dtype).name
    ends = _generation(model)
    fields |= {name: ends[name] for name in _SPECIAL_IDS if name in ends}
    return fields | policy_to_hf(policy, has_adapter=transformer.has_adapter)


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says besides the special tokens, which are the model's."""
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


def _tensors(model: LanguageModel) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its Hugging Face name, one at a time."""
    for path, param in nnx.to_flat_state(nnx.state(model.transformer, nnx.Param)):
        value = jax.device_get(param.get_value())
        for piece in names.PIECES[path]:
            layout = piece.layout
            if layout.stacked:
                within = piece.index(value.ndim - 1)
                for layer in range(value.shape[0]):
                    yield layout.tensor_name(layer), layout.to_tensor(value[layer][within])
            else:
                yield layout.name, layout.to_tensor(value)


def _write_tensors(model: LanguageModel, directory: pathlib.Path, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or numbered shards and their index."""
    mode = (directory / "config.json").stat().st_mode & 0o777
    written: list[tuple[pathlib.Path, list[str]]] = []
    shard: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        nonlocal shard, size
        file = directory / f"shard-{len(written)}"
        try:
            save_file(shard, str(file), metadata={"format": "pt"})
        except SafetensorError as error:  # of a system call that failed, too
            raise OSError(str(error)) from error
        file.chmod(mode)  # the library's files are private
        written.append((file, list(shard)))
        shard, size = {}, 0

    for name, tensor in _tensors(model):
        if not np.isfinite(tensor).all():
            raise CheckpointError(
                f"tensor {name} holds NaN or infinite values; nothing was written, for it could "
                "not be loaded again"
            )
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


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
