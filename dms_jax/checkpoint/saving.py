"""Save a model and its policy as a Hugging Face directory that transformers can load.

An adapter and low-rank updates can be saved without the base (`adapter_saving.py`); otherwise
low-rank updates are merged into the weights.

Everything is written into a directory beside the target, which replaces the target at the end
(`atomic_replace.py`). So a full disk or an interrupt leaves the old checkpoint, never a partial
one.

With several processes, all call `save` (`distributed_save.py`). Each writes its tensor files
(`shard_plan.py`) into a shared directory, and the first also writes all other files. Only the first
process writes a model of one file.
"""

import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from dms_jax import processes
from dms_jax.checkpoint.adapter_saving import AdapterSaving
from dms_jax.checkpoint.atomic_replace import CHECKPOINT, atomic_replace, flush
from dms_jax.checkpoint.distributed_save import Saving
from dms_jax.checkpoint.files import expanded, read_json
from dms_jax.checkpoint.policy_fields import policy_to_hf
from dms_jax.checkpoint.shard_plan import list_tensors, own_tensors, plan_shards
from dms_jax.checkpoint.tensor_files import write_index, write_json, write_tensors
from dms_jax.checks import check
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy, as_policy
from dms_jax.policies.base import LEARN_FIRST, check_adapter

MAX_SHARD_BYTES = 5 * 10**9

# Seconds until a network file system shows a new directory to other hosts.
_SEEN_WITHIN_SECONDS = 60
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
            and so are the sampling fields of its generation_config.json. Several processes need a
            shared directory, unless there is only one tensor file.
        adapter_only: write only the adapter's tensors, the low-rank updates, the policy and the
            identity of the base, for `load(base, adapter=path)`: a few hundred kilobytes, or
            megabytes with low-rank updates. The base's files are read again to check that the model
            still has their weights. If False, low-rank updates are merged into the weights.
        max_shard_bytes: the most bytes of a tensor file. If the model is no larger, the first of
            several processes gathers it and writes that single file, and the others need not see
            the directory.

    Raises:
        CheckpointError: the path cannot be written, or contains files that do not belong to a
            checkpoint (such as tensors missing from its index); a tensor contains NaN;
            `adapter_only` is set and the other weights differ from the model's checkpoint; or one
            of several processes does not see the directory.
        OtherProcessError: another process failed.
        ConfigError: the policy needs an adapter that the model lacks, would use neurons that carry
            decisions, or interprets decisions differently than in training; or the model's family
            cannot express its switches.
    """
    saving = prepare_save(model, policy, path, adapter_only, max_shard_bytes)
    saving.begin()
    saving.run()


def prepare_save(
    model: LanguageModel,
    policy: Policy | str,
    path: Any,
    adapter_only: bool,
    max_shard_bytes: int,
) -> Saving:
    """Checks the arguments of `save`; returns the save before its start.

    Raises:
        CheckpointError: the path is malformed.
        ConfigError: the policy does not fit the model.
    """
    check_model(model)
    policy = as_policy(policy)
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(
            f"the path to write a checkpoint to must be a directory: {plain(repr(path))}"
        )
    target = pathlib.Path(os.path.realpath(expanded(path)))
    check_adapter(policy, model.transformer.adapter_shape)
    if model.policy.retrofit.borrowed_neurons not in (None, policy.retrofit.borrowed_neurons):
        raise ConfigError(
            f"this model was made for {model.policy}, whose decision neurons must "
            f"take no part in attention; saved for {policy} it would use them. Save it with its "
            "own policy"
        )
    trained, asked = model.policy.retrofit.decisions, policy.retrofit.decisions
    if trained is not None and asked is not None and trained != asked:
        raise ConfigError(
            f"this model was made for {model.policy}: its decisions mean {trained}; saved for "
            f"{policy} they would be read as {asked}. Save it with its own policy"
        )
    if check("adapter_only", adapter_only, bool):
        return AdapterSaving(model, policy, target)
    borrows = policy.retrofit.borrowed_neurons is not None
    if borrows and model.policy.retrofit.borrowed_neurons is None and not model.untrained:
        raise ConfigError(
            f"{policy.name} learns what to evict, and this model was never trained for it: whoever "
            f"loads the checkpoint would evict at random. {LEARN_FIRST}"
        )
    return _ModelSaving(model, policy, target, max_shard_bytes)


class _ModelSaving(Saving):
    """The save of a whole checkpoint."""

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy,
        target: pathlib.Path,
        max_shard_bytes: int,
    ):
        super().__init__(target)
        self._config, self._special_ids = _config(model, policy), _special_ids(model)
        self._tokenizer = model.tokenizer
        flat = nnx.to_flat_state(nnx.state(low_rank.merge(model.transformer), nnx.Param))
        self._arrays: dict[Any, Any] = {path: param.get_value() for path, param in flat}
        self._files = plan_shards(list_tensors(self._arrays, model.config), max_shard_bytes)
        self._own = [file for file in self._files if file.process == jax.process_index()]
        self._directory: pathlib.Path | None = None

    def _begin(self) -> None:
        arrays, self._arrays = self._arrays, {}
        if processes.several():
            self._directory = pathlib.Path(self._agreement.from_first(lambda: str(self._open())))
        self._tensors = own_tensors(arrays, self._files)

    def _open(self) -> pathlib.Path:
        """Creates the directory and writes all files but the tensors."""
        directory = self._replacement.enter_context(atomic_replace(self._target, CHECKPOINT))
        write_json(directory / "config.json", self._config)
        before = read_json(self._target, "generation_config.json") or {}
        sampling = {name: value for name, value in before.items() if name not in _SPECIAL_IDS}
        write_json(directory / "generation_config.json", sampling | self._special_ids)
        if self._tokenizer is not None:
            self._tokenizer.save(directory)
        write_index(directory, self._files)
        return directory

    def _write(self) -> None:
        directory = self._open() if self._directory is None else self._directory
        if not self._own:  # nothing to write: its host need not see the directory
            return
        _wait_for(directory, self._target)
        write_tensors(self._tensors, directory, self._own)
        if not processes.is_first():  # the first one flushes when it replaces the target
            flush(*(directory / file.name for file in self._own))

    def _complete(self) -> None:
        self._replacement.close()


def _wait_for(directory: pathlib.Path, target: pathlib.Path) -> None:
    """Waits until this process sees the directory of the first process.

    Raises:
        CheckpointError: it does not appear within a minute.
    """
    end = time.monotonic() + _SEEN_WITHIN_SECONDS
    while not (directory / "config.json").is_file():
        if time.monotonic() > end:
            raise CheckpointError(
                f"process {jax.process_index()} does not see {directory}, which process 0 made for "
                "it to write its part of the checkpoint into. Give a directory on a file system "
                f"that the hosts of all processes share, in place of {target}"
            )
        time.sleep(0.1)


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
