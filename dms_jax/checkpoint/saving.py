"""Save a model and its policy as a Hugging Face directory that transformers can load.

An adapter and low-rank updates can be saved without the base (`adapter.py`); otherwise low-rank
updates are merged into the weights.

Everything is written into a directory beside the target, which replaces the target at the end
(`atomic_replace.py`). So a full disk or an interrupt leaves the old checkpoint, never a partial
one. With several processes, all call `save`; they gather the tensors and the first one writes.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dms_jax import processes
from dms_jax.checkpoint import names
from dms_jax.checkpoint.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    adapter_config,
    base_identity,
)
from dms_jax.checkpoint.atomic_replace import ADAPTER, CHECKPOINT, atomic_replace
from dms_jax.checkpoint.contents import read_checkpoint
from dms_jax.checkpoint.files import expanded, read_json
from dms_jax.checkpoint.policy_fields import policy_to_hf
from dms_jax.checkpoint.tensor_files import (
    Tensors,
    check_finite,
    save_tensors,
    tensors_of,
    write_json,
    write_tensors,
)
from dms_jax.checks import check
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.model.parameters import arrays_of
from dms_jax.policies import Policy, as_policy

MAX_SHARD_BYTES = 5 * 10**9

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(
    model: LanguageModel,
    policy: Policy | str,
    path: str | pathlib.Path,
    *,
    adapter_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config, tensors, tokenizer and generation defaults; the policy goes into the config.

    Args:
        model: the model to write; tensors keep the dtype of its parameters.
        policy: the cache policy to run the model with.
        path: directory to write, following a link. If it already contains a checkpoint, its config,
            tensors and tokenizer are replaced; documents beside them (README, licence) are kept,
            and so are the sampling fields of its generation_config.json.
        adapter_only: write only the adapter's tensors, the low-rank updates, the policy and the
            identity of the base, for `load(base, adapter=path)`: a few hundred kilobytes, or
            megabytes with low-rank updates. The other weights must still be those of the model's
            `source`. If False, low-rank updates are merged into the weights.
        max_shard_bytes: the most bytes of a tensor file.

    Raises:
        CheckpointError: the path cannot be written, or contains files that do not belong to a
            checkpoint (such as tensors missing from its index); a tensor contains NaN; or
            `adapter_only` is set and the other weights are not those of a checkpoint.
        OtherProcessError: another process failed.
        ConfigError: the policy needs an adapter that the model lacks, would use neurons that carry
            decisions, or interprets decisions differently than in training; or the model's family
            cannot express its switches.
    """
    check_model(model)
    policy = as_policy(policy)
    what = "the path to write a checkpoint to must be a directory"
    target = pathlib.Path(os.path.realpath(expanded(path, what)))
    if check("adapter_only", adapter_only, bool):
        _save_adapter(model, policy, target)
        return
    policy = model.resolve_policy(policy)
    arrays = arrays_of(low_rank.merge(model.transformer))
    tensors = tensors_of(arrays, model.config)
    config = _config(model, policy)
    with _written_by_first(target, tensors) as first:
        if first:
            with atomic_replace(target, CHECKPOINT) as directory:
                write_json(directory / "config.json", config)
                before = read_json(target, "generation_config.json") or {}
                sampling = {name: x for name, x in before.items() if name not in _SPECIAL_IDS}
                write_json(directory / "generation_config.json", sampling | _special_ids(model))
                if model.tokenizer is not None:
                    model.tokenizer.save(directory)
                write_tensors(tensors, directory, max_shard_bytes)


@contextlib.contextmanager
def _written_by_first(target: pathlib.Path, tensors: Tensors) -> Iterator[bool]:
    """A context in which the first process writes tensors that all processes gather.

    An error in the first process is raised in all.

    Raises:
        CheckpointError: the target cannot be written.
        OtherProcessError: the first process failed.
    """
    agreement, problem = processes.Agreement(), None
    try:
        yield processes.is_first()
    except OSError as error:
        problem = CheckpointError(f"the checkpoint cannot be written to {target}: {error}")
        problem.__cause__ = error
    except BaseException as error:
        problem = error
    for _ in tensors:  # after an error: all processes take part in every gather
        pass
    agreement.first_done(problem)
    if problem is not None:
        raise problem


def _save_adapter(model: LanguageModel, policy: Policy, target: pathlib.Path) -> None:
    """Save a model's adapter and low-rank updates.

    Raises:
        CheckpointError: the model's other weights are not those of a checkpoint.
        ConfigError: the model has nothing that can be saved without the base.
    """
    transformer = model.transformer
    updates = low_rank.low_rank_of(transformer)
    if policy.retrofit.borrowed_neurons is not None:
        raise ConfigError(
            f"{policy} decides in neurons of the base, which an adapter does not hold; save the "
            "whole model"
        )
    policy = model.resolve_policy(policy)
    if not policy.retrofit.adapter and updates is None:
        raise ConfigError(f"{policy} has no adapter to save alone; save the whole model")
    if model.source is None:
        raise CheckpointError(
            "the other weights of this model are not those of a checkpoint: it was not loaded from "
            "one, all its weights were trained, or low-rank updates were merged into them. Save "
            "the whole model (adapter_only=False), or save the base first and load that"
        )
    pieces_of = names.pieces_of(transformer.config)
    tensors = tensors_of(
        {
            path: array
            for path, array in arrays_of(transformer).items()
            if low_rank.is_factor(path)
            or (policy.retrofit.adapter and names.is_adapter(pieces_of[path]))
        },
        transformer.config,
    )
    with _written_by_first(target, tensors) as first:
        if first:
            content = dict(tensors)
            for name, value in content.items():
                check_finite(name, value)
            base = read_checkpoint(pathlib.Path(model.source))
            identity = base_identity(base.config, base.weights)
            with atomic_replace(target, ADAPTER) as directory:
                write_json(directory / ADAPTER_CONFIG, adapter_config(policy, updates, identity))
                save_tensors(content, directory / ADAPTER_TENSORS)


def _config(model: LanguageModel, policy: Policy) -> dict[str, Any]:
    transformer = model.transformer
    fields = transformer.config.to_hf()
    fields["torch_dtype"] = np.dtype(model.dtype).name
    policy_fields = policy_to_hf(policy, has_adapter=transformer.has_adapter)
    return fields | _special_ids(model) | policy_fields


def _special_ids(model: LanguageModel) -> dict[str, Any]:
    """The special tokens of config.json and generation_config.json."""
    defaults = model.generation
    ends = list(defaults.eos_token_ids)
    fields = {
        "bos_token_id": defaults.bos_token_id,
        "eos_token_id": (ends[0] if len(ends) == 1 else ends) if ends else None,
        "pad_token_id": defaults.pad_token_id,
    }
    return {name: value for name, value in fields.items() if value is not None}
