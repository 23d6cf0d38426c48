"""Save a model and its policy as a Hugging Face directory that transformers opens.

If only an adapter or low-rank updates were trained, they can be saved by themselves (`adapter.py`);
otherwise low-rank updates are written as part of the weights.

Everything is written into a directory beside the target, which replaces it at the end
(`replacing.py`), so that a full disk or an interrupt leaves the old checkpoint and never part of
a new one.

Of several processes, which all call `save`, the first writes. Arrays that are spread over them are
gathered one layer at a time.

A run that goes on while its model is written calls `begin_save`, which moves the arrays to the host
and leaves the files to another thread.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
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
from dms_jax.checkpoint.contents import read_checkpoint
from dms_jax.checkpoint.files import MAX_CONFIG_BYTES, expanded, read_json
from dms_jax.checkpoint.low_rank import low_rank_tensors
from dms_jax.checkpoint.policy_fields import policy_to_hf
from dms_jax.checkpoint.replacing import ADAPTER, CHECKPOINT, replacement
from dms_jax.checkpoint.tensor_files import (
    Tensors,
    check_finite,
    mode_of,
    save_tensors,
    write_json,
    write_tensors,
)
from dms_jax.checks import check
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.policies.base import check_adapter, check_policy

MAX_SHARD_BYTES = 5 * 10**9

Write = Callable[[Tensors, pathlib.Path], None]

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
    target, contents = _asked(model, policy, path, adapter_only=adapter_only)

    def write_all() -> None:
        transformer, write = contents(model, policy, max_shard_bytes)
        with _gathered(transformer) as tensors, _file_errors(target):
            if processes.is_first():
                write(tensors, target)

    _together(write_all)


def begin_save(
    model: LanguageModel,
    policy: Policy,
    path: str | pathlib.Path,
    *,
    adapter_only: bool = False,
    kept: Iterable[jax.Array] = (),
) -> Callable[[], None]:
    """Move to the host what `save` would write, and return what writes it, in any thread.

    The host of the first process holds all of it until it is written; where there is one process,
    without the arrays of `kept`.

    Args:
        model, policy, path, adapter_only: as for `save`.
        kept: arrays of the model that stay on the devices until it is written. Of a single process
            they are moved one at a time, when they are written.

    Returns:
        What writes the files, in the first process; it raises CheckpointError where `save` would.

    Raises:
        CheckpointError, ConfigError: what `save` refuses before it writes.
    """
    target, contents = _asked(model, policy, path, adapter_only=adapter_only)

    def move() -> Callable[[], None]:
        transformer, write = contents(model, policy, MAX_SHARD_BYTES)
        tensors = _moved(transformer, kept)

        def write_later() -> None:
            with _file_errors(target):
                write(tensors, target)

        return write_later

    return _together(move)


def _asked(
    model: LanguageModel, policy: Policy, path: Any, *, adapter_only: bool
) -> tuple[pathlib.Path, Callable[[LanguageModel, Policy, int], tuple[Transformer, Write]]]:
    """Check what is to be saved; return the directory, and what says what goes into it.

    Raises:
        CheckpointError: the path is none.
        ConfigError: the policy and the model do not belong together.
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
    adapter = check("adapter_only", adapter_only, bool)
    return target, _of_adapter if adapter else _of_model


def _together[Result](action: Callable[[], Result]) -> Result:
    """Do what all processes do, and end in all of them if the first fails."""
    together = processes.Agreement()
    try:
        result = action()
    except (CheckpointError, ConfigError) as error:
        together.first_done(error)
        raise
    together.first_done(None)
    return result


@contextlib.contextmanager
def _file_errors(target: pathlib.Path) -> Iterator[None]:
    """Raise CheckpointError where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {target}: {error}") from error


def _of_model(
    model: LanguageModel, policy: Policy, max_shard_bytes: int
) -> tuple[Transformer, Write]:
    """The parameters of a whole checkpoint, and what writes it without the model's arrays."""
    config, special_ids, tokenizer = _config(model, policy), _generation(model), model.tokenizer

    def write(tensors: Tensors, target: pathlib.Path) -> None:
        with replacement(target, CHECKPOINT) as directory:
            write_json(directory / "config.json", config)
            before = read_json(target, "generation_config.json", max_bytes=MAX_CONFIG_BYTES)
            write_json(directory / "generation_config.json", _sampling(before or {}) | special_ids)
            if tokenizer is not None:
                tokenizer.save(directory)
            write_tensors(tensors, directory, max_shard_bytes)

    return low_rank.merge(model.transformer), write


def _of_adapter(model: LanguageModel, policy: Policy, _: int) -> tuple[Transformer, Write]:
    """The parameters that an adapter goes with, and what compares them and writes it alone."""
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
    source, config = model.source, model.config

    def write(others: Tensors, target: pathlib.Path) -> None:
        adapter = tensors if policy.retrofit.adapter else {}
        identity = _unchanged_base(source, config, others, adapter)
        for name, value in tensors.items():
            check_finite(name, value)
        with replacement(target, ADAPTER) as directory:
            write_json(directory / ADAPTER_CONFIG, adapter_config(policy, size, identity))
            save_tensors(tensors, directory / ADAPTER_TENSORS, mode_of(directory / ADAPTER_CONFIG))

    return low_rank.drop_factors(model.transformer), write


def _unchanged_base(
    source: str | None, config: ModelConfig, tensors: Tensors, adapter: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Compute the identity of a model's base, after checking that its weights are unchanged.

    Args:
        source: where the model was loaded from.
        config: its config.
        tensors: its tensors, without low-rank updates.
        adapter: takes those of its adapter.

    Raises:
        CheckpointError: the model was not loaded, or its base is gone or has other weights.
    """
    whole = "save the whole model (adapter_only=False)"
    if source is None:
        raise CheckpointError(
            "this model was not loaded from a checkpoint, so that there is no base which an "
            f"adapter could be saved beside; {whole}, or save the base first and load that"
        )
    try:
        base = read_checkpoint(pathlib.Path(source))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"the base {source}, with which the model must be compared before its adapter "
            f"is saved alone, cannot be read any more: {error}"
        ) from error
    reason = f"the model is not its base {source} with an adapter: "
    different = differing_shape(base.config, config)
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
def _gathered(transformer: Transformer) -> Iterator[Tensors]:
    """Yield the tensors, and go through those that are left: other processes take part in each."""
    tensors = _tensors(_arrays(transformer))
    try:
        yield tensors
    finally:
        if processes.several():
            for _ in tensors:
                pass


def _moved(transformer: Transformer, kept: Iterable[jax.Array]) -> Tensors:
    """The tensors, of arrays that are on the host; of a single process `kept` ones are not yet."""
    if processes.several():
        with _gathered(transformer) as tensors:
            return iter(list(tensors) if processes.is_first() else [])
    left, arrays = {id(each) for each in kept}, _arrays(transformer)
    moving = iter(jax.device_get([value for _, value in arrays if id(value) not in left]))
    return _tensors([(p, value if id(value) in left else next(moving)) for p, value in arrays])


def _arrays(transformer: Transformer) -> list[tuple[Any, Any]]:
    """Every parameter's path and array."""
    flat = nnx.to_flat_state(nnx.state(transformer, nnx.Param))
    return [(path, param.get_value()) for path, param in flat]


def _tensors(arrays: list[tuple[Any, Any]]) -> Tensors:
    """Yield every tensor with its Hugging Face name, one at a time; in the first process alone."""
    for path, value in arrays:
        pieces = names.PIECES[path]
        stacked = pieces[0].layout.stacked
        for layer, part in enumerate(processes.slices(value, along_first=stacked)):
            if part is None:
                continue
            for piece in pieces:
                layout = piece.layout
                name = layout.tensor_name(layer) if stacked else layout.name
                yield name, layout.to_tensor(part[piece.index(part.ndim)])
