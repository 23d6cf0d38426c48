"""Load a Hugging Face directory, or a model of the hub, as a `LanguageModel`.

Headers are checked first, and every missing, unexpected and mis-shaped tensor is named in one
message. Then parameters are filled one at a time, tensor by tensor, each device's slice read
straight from the files where a mesh is given, so that nothing is held twice.
"""

import functools
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from dms_jax import sharding
from dms_jax.checkpoint import names
from dms_jax.checkpoint.files import MAX_CONFIG_BYTES, expanded, read_json
from dms_jax.checkpoint.policy_fields import policy_from_hf
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.checkpoint.weights import Weights
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Vanilla

# Those that a model can be trained and run in; a float8 that is stored means nothing by itself.
_DTYPES = ("float16", "bfloat16", "float32", "float64")

# No checkpoint has more than ten; each takes part in every step of generation.
MAX_END_TOKENS = 64
# Beyond so many, a message lists no more tensors: a model of 80 layers that lacks two of each.
_MOST_PROBLEMS = 160

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# Repositories often hold the same weights again, in a folder or under this name.
_NOT_HUB_FILES = ["*/*", "consolidated*"]
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


def load(
    path: str | pathlib.Path, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None
) -> LanguageModel:
    """Load a checkpoint.

    Args:
        path: a Hugging Face directory, or a hub id ("owner/name" or "owner/name@revision").
        dtype: of the parameters; None keeps what the files hold.
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
    directory = _directory(path)
    hf_config = read_json(directory, "config.json", max_bytes=MAX_CONFIG_BYTES)
    if hf_config is None:
        raise CheckpointError(f"{directory / 'config.json'} does not exist")
    config = ModelConfig.from_hf(hf_config)
    weights = Weights(directory)
    has_adapter = any(names.ADAPTER_MARK in name for name in weights.shapes)
    policy = policy_from_hf(hf_config, has_adapter=has_adapter)
    # Adapter tensors that no policy accounts for are reported as unexpected.
    adapter = policy is not None and (policy.retrofit.adapter or has_adapter)
    transformer = _fill(config, weights, adapter=adapter, dtype=dtype, mesh=mesh)
    tokenizer = Tokenizer.from_directory(directory)
    return LanguageModel(
        transformer=transformer,
        tokenizer=tokenizer,
        policy=Vanilla() if policy is None else policy,
        generation=_generation_defaults(directory, hf_config, tokenizer),
        mesh=mesh,
    )


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


def _directory(path: str | pathlib.Path) -> pathlib.Path:
    """The local directory of a checkpoint, fetched from the hub where it names one."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(
            f"the path of a checkpoint must be a directory or a hub id: {plain(repr(path))}"
        )
    directory = expanded(path)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(f"{directory} is a file; give the directory that holds config.json")
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


def _fill(
    config: ModelConfig,
    weights: Weights,
    *,
    adapter: bool,
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
) -> Transformer:
    abstract = nnx.eval_shape(lambda: Transformer(config, adapter=adapter, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    parameters = dict(nnx.to_flat_state(state))
    _check(config, weights, {path: param.get_value() for path, param in parameters.items()})
    filled = []
    for path, param in parameters.items():
        value = _read_parameter(
            weights,
            names.PIECES[path],
            param.get_value().shape,
            dtype=dtype,
            place=None
            if mesh is None
            else sharding.parameter_sharding(
                mesh, param.get_metadata("axes"), param.get_value().shape
            ),
        )
        filled.append((path, param.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _check(config: ModelConfig, weights: Weights, parameters: dict[Any, Any]) -> None:
    """Raise one error that names every tensor that is missing, unexpected or mis-shaped."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, value in parameters.items():
        for piece in names.PIECES[path]:
            layout = piece.layout
            shape = piece.shape(value.shape[1:] if layout.stacked else value.shape)
            for layer in range(value.shape[0] if layout.stacked else 1):
                expected[layout.tensor_name(layer)] = layout.tensor_shape(shape)
    found = {name: shape for name, shape in weights.shapes.items() if not names.is_derived(name)}
    if config.tie_embeddings and names.LM_HEAD in found:
        expected[names.LM_HEAD] = expected[names.EMBEDDING]
        if found[names.LM_HEAD] == found.get(names.EMBEDDING) == expected[names.EMBEDDING]:
            _check_tied(weights, found[names.LM_HEAD])

    def show(name: str) -> str:
        return f"{plain(name)} {plain(list(found.get(name, expected.get(name, ()))))}"

    problems = [f"missing: {show(name)}" for name in expected if name not in found]
    problems += [f"unexpected: {show(name)}" for name in found if name not in expected]
    problems += [
        f"mis-shaped: {name} is {plain(list(found[name]))}, the config asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        listed = sorted(problems)[:_MOST_PROBLEMS]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        hint = ""
        if any(names.ADAPTER_MARK in name for name in found if name not in expected):
            hint = (
                "\nThe dms_proj_alpha tensors are a DMS adapter: set dms_window_size and "
                '"dms_separate_alpha": true in config.json to use it.'
            )
        raise CheckpointError(
            f"the tensors do not fit config.json ({config.model_type}), {len(problems)} problems:\n"
            + "\n".join(listed)
            + hint
        )


def _check_tied(weights: Weights, shape: tuple[int, ...]) -> None:
    rows = max(1, 2**26 // max(shape[1], 1))
    for start in range(0, shape[0], rows):
        part = (slice(start, min(start + rows, shape[0])), slice(None))
        if not np.array_equal(
            weights.read(names.LM_HEAD, part), weights.read(names.EMBEDDING, part)
        ):
            raise CheckpointError(
                f"config.json ties the output matrix to the embedding, but {names.LM_HEAD} and "
                f"{names.EMBEDDING} differ; set tie_word_embeddings to false"
            )


def _read_parameter(
    weights: Weights,
    pieces: tuple[names.Piece, ...],
    shape: tuple[int, ...],
    *,
    dtype: Any,
    place: jax.sharding.Sharding | None,
) -> jax.Array:
    """Read a parameter, or each device's part of it."""
    stacked = pieces[0].layout.stacked
    layers = shape[0] if stacked else 1
    if dtype is None:
        stored = {
            weights.dtypes[piece.layout.tensor_name(layer)]
            for piece in pieces
            for layer in range(layers)
        }
        dtype = functools.reduce(jnp.promote_types, stored)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if not stacked:
            return _read_tensor(weights, pieces[0].layout, 0, shape, index, dtype)
        chosen = range(layers)[index[0]]
        sizes = [len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True)]
        out = np.empty(sizes, dtype)
        for piece in pieces:  # side by side along an axis that no mesh axis divides
            piece_shape = piece.shape(shape[1:])
            within = piece.index(len(piece_shape))
            for row, layer in enumerate(chosen):
                out[row][within] = _read_tensor(
                    weights, piece.layout, layer, piece_shape, index[1:], dtype
                )
        return out

    if place is None:
        return jax.device_put(part((slice(None),) * len(shape)))
    # Replicas ask for the same part: read it once.
    parts: dict[tuple, np.ndarray] = {}

    def cached(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(shape) if index is None else index
        key = tuple(cut.indices(size) for cut, size in zip(index, shape, strict=True))
        if key not in parts:
            parts[key] = part(index)
        return parts[key]

    return jax.make_array_from_callback(shape, place, cached)


def _read_tensor(
    weights: Weights,
    layout: names.Layout,
    layer: int,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    name = layout.tensor_name(layer)
    cut, rest = layout.tensor_slices(shape, index)
    whole = all(
        part.indices(size) == (0, size, 1)
        for part, size in zip(cut, weights.shapes[name], strict=True)
    )
    tensor = weights.read(name, () if whole else cut)
    with np.errstate(over="ignore"):
        tensor = tensor.astype(dtype, copy=False)
    if not _is_finite(tensor):
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values as {dtype.name}; the file is damaged, or "
            "its numbers do not fit this dtype"
        )
    return layout.to_parameter(tensor, shape)[rest]


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether no number is NaN or infinite; bfloat16 by its exponent bits, which is quicker."""
    if tensor.dtype == ml_dtypes.bfloat16:
        return int((tensor.view(np.uint16) & 0x7FFF).max(initial=0)) < 0x7F80
    return bool(np.isfinite(tensor).all())


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
