"""Load a checkpoint as a `LanguageModel`: a Hugging Face directory, a model of the hub, a GGUF."""

import dataclasses
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.checkpoint import gguf, names
from dms_jax.checkpoint.files import MAX_CONFIG_BYTES, expanded, read_json
from dms_jax.checkpoint.filling import fill
from dms_jax.checkpoint.policy_fields import policy_from_hf
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.checkpoint.weights import Tensors, Weights
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.policies import Policy, Vanilla

# Those that a model can be trained and run in; a float8 that is stored means nothing by itself.
_DTYPES = ("float16", "bfloat16", "float32", "float64")

# No checkpoint has more than ten; each takes part in every step of generation.
MAX_END_TOKENS = 64
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# Repositories often hold the same weights again, in a folder or under this name.
_NOT_HUB_FILES = ["*/*", "consolidated*"]
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


def load(
    path: str | pathlib.Path, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None
) -> LanguageModel:
    """Load a checkpoint.

    Args:
        path: a Hugging Face directory, a hub id ("owner/name" or "owner/name@revision"), or a GGUF
            file (the first one, or any, of a model that is split over several).
        dtype: type of the parameters; None keeps what the files hold, and float32 where they hold
            quantised numbers.
        mesh: devices over which to place the parameters; None places them on the default device.

    Returns:
        the model, with its tokenizer (None where there is none) and the policy that its config
        declares (`Vanilla()` where it declares none).

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit its config.
        ConfigError: the config is malformed, or describes a model that is not served exactly.
    """
    dtype = _check_dtype(dtype)
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ConfigError(f"mesh must come from dms_jax.make_mesh, got {mesh!r:.80}")
    place = _place(path)
    contents = _read_gguf(place) if place.is_file() else _read_directory(place)
    transformer = fill(
        contents.config, contents.weights, adapter=contents.adapter, dtype=dtype, mesh=mesh
    )
    return LanguageModel(
        transformer=transformer,
        tokenizer=contents.tokenizer,
        policy=contents.policy,
        generation=contents.generation,
        mesh=mesh,
    )


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What a checkpoint holds; the tensors are read later."""

    config: ModelConfig
    weights: Tensors
    adapter: bool
    policy: Policy
    tokenizer: Tokenizer | None
    generation: GenerationDefaults


def _read_directory(directory: pathlib.Path) -> _Contents:
    hf_config = read_json(directory, "config.json", max_bytes=MAX_CONFIG_BYTES)
    if hf_config is None:
        found = sorted(plain(file.name) for file in directory.glob("*.gguf"))
        hint = f"; give the GGUF file itself ({', '.join(found[:3])})" if found else ""
        raise CheckpointError(f"{directory / 'config.json'} does not exist{hint}")
    config = ModelConfig.from_hf(hf_config)
    weights = Weights(directory)
    has_adapter = any(names.ADAPTER_MARK in name for name in weights.shapes)
    policy = policy_from_hf(hf_config, has_adapter=has_adapter)
    tokenizer = Tokenizer.from_directory(directory)
    return _Contents(
        config=config,
        weights=weights,
        # Adapter tensors that no policy accounts for are reported as unexpected.
        adapter=policy is not None and (policy.uses_adapter or has_adapter),
        policy=Vanilla() if policy is None else policy,
        tokenizer=tokenizer,
        generation=_generation_defaults(directory, hf_config, tokenizer),
    )


def _read_gguf(path: pathlib.Path) -> _Contents:
    files = gguf.GgufFiles(path)
    config, weights = gguf.read_model(files)
    tokenizer, generation = gguf.read_tokenizer(files, config.vocab_size)
    return _Contents(config, weights, False, Vanilla(), tokenizer, generation)


def _check_dtype(dtype: Any) -> np.dtype | None:
    """The dtype of the parameters; None for that of the files."""
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except Exception as error:  # numpy raises most kinds there are
        raise ConfigError(
            f"dtype {plain(repr(dtype), 80)} is not known; give e.g. 'bfloat16'"
        ) from error
    if known.name not in _DTYPES:
        raise ConfigError(
            f"parameters cannot have dtype {plain(known.name)}; give one of {', '.join(_DTYPES)}"
        )
    return known


def _place(path: str | pathlib.Path) -> pathlib.Path:
    """The local directory or GGUF file of a checkpoint, fetched from the hub if it is there."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(
            "the path of a checkpoint must be a directory, a GGUF file or a hub id: "
            f"{plain(repr(path))}"
        )
    directory = expanded(path)
    if directory.is_dir() or gguf.is_gguf(directory):
        return directory
    if directory.exists():
        raise CheckpointError(
            f"{directory} is a file and no GGUF; give the directory that holds config.json"
        )
    if not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"no directory {directory}, and it is not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    name, _, revision = path.partition("@")
    try:
        found = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_NOT_HUB_FILES,
        )
    except Exception as error:  # network, authorisation and absence come as many classes
        raise CheckpointError(
            f"there is no directory {path!r} here, and it could not be fetched from the hub: "
            f"{plain(error, 300)}"
        ) from error
    return pathlib.Path(found)


def _generation_defaults(
    directory: pathlib.Path, hf_config: dict[str, Any], tokenizer: Tokenizer | None
) -> GenerationDefaults:
    """Ends of a sequence: generation_config.json, else config.json, else the tokenizer."""
    fields = read_json(directory, "generation_config.json", max_bytes=MAX_CONFIG_BYTES) or {}

    def ids(name: str) -> tuple[int, ...]:
        for source in (fields, hf_config):
            value = source.get(name)
            if value is None:
                continue
            return _token_ids(name, value)
        value = getattr(tokenizer, name, None)
        return () if value is None else (value,)

    def one(name: str) -> int | None:
        return next(iter(ids(name)), None)

    return GenerationDefaults(
        eos_token_ids=ids("eos_token_id"),
        bos_token_id=one("bos_token_id"),
        pad_token_id=one("pad_token_id"),
    )


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids that a config gives: one or a list. -1 is what old configs write for none."""
    listed = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise CheckpointError(f"{name} must be a token id or a list of them")
    if any(not -1 <= i < 2**31 for i in listed):
        raise CheckpointError(f"{name} holds a number that is no token id: they lie in 0 ... 2^31")
    kept = tuple(dict.fromkeys(i for i in listed if i >= 0))
    if len(kept) > MAX_END_TOKENS:
        raise CheckpointError(
            f"{name} lists {len(kept)} tokens, more than the {MAX_END_TOKENS} that are served; "
            "keep those that end an answer"
        )
    return kept
