"""Read the contents of a checkpoint: a Hugging Face directory, a hub model or a GGUF file.

Everything but the tensors is read at once; the tensors are read when a model is built.
"""

import dataclasses
import pathlib
import re
import warnings
from typing import Any

from dms_jax.assets import BASES
from dms_jax.checkpoint import mxfp4, names
from dms_jax.checkpoint.adapter import ADAPTER_CONFIG, of_run
from dms_jax.checkpoint.files import expanded, is_directory, read_json
from dms_jax.checkpoint.policy_fields import policy_from_hf
from dms_jax.checkpoint.tokenizer import OTHER_LAYOUTS, Tokenizer
from dms_jax.checkpoint.weights import Tensors, Weights, tensor_files
from dms_jax.config import ModelConfig
from dms_jax.config_checks import language_config
from dms_jax.errors import CheckpointError, plain
from dms_jax.model.language_model import GenerationDefaults
from dms_jax.policies import Policy, Vanilla
from dms_jax.policies.values import AdapterShape

# Names that begin like paths or end like weight files are not looked up on the hub.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
HOLDS = "a checkpoint directory holds config.json, *.safetensors and tokenizer.json"
_TOKENIZER = "the tokenizer"  # a source of token ids, for messages
_WEIGHTS = (".gguf", ".safetensors")
_PATH = ("/", "./", "../", "~")
# With tokenizers in other layouts, from which transformers can write a tokenizer.json.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", *OTHER_LAYOUTS]
# Repositories often contain a second copy of the weights, in a folder or under this name.
_NOT_HUB_FILES = [f"*/{name}" for name in _HUB_FILES if name != "*.jinja"] + ["consolidated*"]


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint; the tensors are read later."""

    config: ModelConfig
    weights: Tensors
    adapter: AdapterShape | None
    policy: Policy
    tokenizer: Tokenizer | None
    generation: GenerationDefaults


def read_checkpoint(place: pathlib.Path) -> Contents:
    """Reads a directory or a GGUF file.

    Raises:
        CheckpointError: it cannot be read, or holds unsupported content.
        ConfigError: its config is malformed, or describes a model that is not supported exactly.
    """
    return _read_gguf(place) if place.is_file() else _read_directory(place)


def _read_directory(directory: pathlib.Path) -> Contents:
    hf_config = read_json(directory, "config.json")
    if hf_config is None:
        if (directory / ADAPTER_CONFIG).exists():
            base = BASES.get(directory.name)
            shipped = "" if base is None else f" (dms_jax.assets.path({base!r}))"
            raise CheckpointError(
                f"{directory} holds an adapter and no model: load the model that it was trained "
                f"on{shipped}, with this directory as `adapter`"
            )
        found = sorted(plain(file.name) for file in directory.glob("*.gguf"))
        hint = f"; give the GGUF file itself ({', '.join(found[:3])})" if found else f"; {HOLDS}"
        if below := of_run(directory, "config.json"):
            hint = f"; the model of this run is in {below}"
        elif below := of_run(directory, ADAPTER_CONFIG):
            hint = f"; the adapter of this run is in {below}: load it with its base"
        raise CheckpointError(f"{directory / 'config.json'} does not exist{hint}")
    language = language_config(hf_config)
    reads_images, hf_config = language is not hf_config, dict(language)
    config = ModelConfig.from_hf(hf_config)
    weights = Weights(tensor_files(directory))
    weights.unwrap()
    if reads_images:
        weights.keep_language_model()
        warnings.warn(
            f"{directory} holds a model that reads images; its language model alone is loaded.",
            stacklevel=2,
        )
    if hf_config.get("quantization_config"):  # MXFP4; others were refused with the config
        weights = mxfp4.Unpacked(weights)
    found = names.adapter_shape(weights.shapes, qkv_bias=config.qkv_bias)
    policy = policy_from_hf(hf_config, has_adapter=found is not None)
    tokenizer = Tokenizer.from_directory(directory)
    return Contents(
        config=config,
        weights=weights,
        # Adapter tensors that no policy accounts for are reported as unexpected.
        adapter=None if policy is None else policy.retrofit.adapter or found,
        policy=Vanilla() if policy is None else policy,
        tokenizer=tokenizer,
        generation=_generation_defaults(directory, hf_config, tokenizer, config.vocab_size),
    )


def _read_gguf(path: pathlib.Path) -> Contents:
    from dms_jax.checkpoint import gguf  # imported here because few models are GGUF files

    files = gguf.GgufFiles(path)
    config, weights = gguf.read_model(files)
    tokenizer, generation = gguf.read_tokenizer(files, config.vocab_size)
    return Contents(config, weights, None, Vanilla(), tokenizer, generation)


def find_checkpoint(path: str | pathlib.Path) -> pathlib.Path:
    """Finds the local directory or GGUF file of a checkpoint; downloads a hub model."""
    what = "the path of a checkpoint must be a directory, a GGUF file or a hub id"
    directory = expanded(path, what)
    if is_directory(directory):
        return directory
    from dms_jax.checkpoint import gguf

    if gguf.is_gguf(directory):
        return directory
    if directory.exists():
        raise CheckpointError(
            f"{directory} is a file and no GGUF; give the directory that holds config.json"
        )
    if not isinstance(path, str) or path.startswith(_PATH) or path.lower().endswith(_WEIGHTS):
        kind = "file" if directory.suffix.lower() in _WEIGHTS else "directory or file"
        raise CheckpointError(f"there is no {kind} {directory.absolute()}")
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"no directory or file {path}, and it is not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    name, _, revision = path.partition("@")
    try:
        found = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_NOT_HUB_FILES,
        )
    except Exception as error:  # failures of the hub raise many different classes
        raise CheckpointError(
            f"there is no directory {path!r} here, and it could not be fetched from the hub: "
            f"{plain(' '.join(str(error).split()), 300)}"
        ) from error
    found = pathlib.Path(found)
    if not any((found / file).exists() for file in ("config.json", ADAPTER_CONFIG)):
        raise CheckpointError(
            f"{plain(name)} holds no config.json on the hub. If its models are GGUF files, fetch "
            f"one (hf download {plain(name)} FILE.gguf --local-dir .) and give its path"
        )
    return found


def _generation_defaults(
    directory: pathlib.Path,
    hf_config: dict[str, Any],
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> GenerationDefaults:
    """Reads the special tokens of generation_config.json, config.json and the tokenizer.

    An answer ends at an end token of any of the three: a config often names the token that ends a
    text, and the tokenizer the one that ends a turn. For other special tokens the first of the
    three that names one counts.

    Raises:
        CheckpointError: an id is outside the vocabulary.
    """
    fields = read_json(directory, "generation_config.json") or {}

    def ids(name: str) -> dict[str, tuple[int, ...]]:
        own = getattr(tokenizer, name, None)
        if name == "pad_token_id" and own is not None and own >= vocab_size:
            own = None  # often without a row in the embedding; never used here
        found = {
            "generation_config.json": fields.get(name),
            "config.json": hf_config.get(name),
            _TOKENIZER: own,
        }
        return {
            place: _token_ids(place, name, value, vocab_size)
            for place, value in found.items()
            if value is not None
        }

    def one(name: str) -> int | None:
        return next((given[0] if given else None for given in ids(name).values()), None)

    ends = ids("eos_token_id").values()
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(index for given in ends for index in given)),
        bos_token_id=one("bos_token_id"),
        pad_token_id=one("pad_token_id"),
    )


def _token_ids(place: str, name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Checks token ids (one or a list) from a file. Old configs write -1 for none."""
    listed = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise CheckpointError(f"{place}: {name} must be a token id or a list of them")
    kept = tuple(dict.fromkeys(i for i in listed if i != -1))
    outside = [i for i in kept if not 0 <= i < vocab_size]
    if outside:
        own = place == _TOKENIZER
        field = f"{name.removesuffix('_id')} of tokenizer_config.json" if own else name
        raise CheckpointError(
            f"{place}: {name} is {plain(outside[0])}, not a token of the model: config.json "
            f"gives it a vocabulary of {vocab_size}. Set {field} to the right token, or to null"
        )
    return kept
