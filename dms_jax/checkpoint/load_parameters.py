"""Load the parameters of a model from the tensors of a checkpoint.

One message names every missing, unexpected and mis-shaped tensor before any data is read. Then
parameters are loaded one at a time, the tensors of each in threads. With a mesh, each device's
slice is read directly from the files. So memory never holds a second copy of the model.
"""

import concurrent.futures
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dms_jax import compilation, sharding
from dms_jax.checkpoint import names
from dms_jax.checkpoint.weights import Tensors
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError, plain
from dms_jax.model import low_rank
from dms_jax.model.low_rank import LowRank
from dms_jax.model.parameters import Path, parameters_of, place_of, with_arrays
from dms_jax.model.transformer import Transformer
from dms_jax.policies.values import AdapterShape

# The most tensors listed in a message: two per layer of a model of 80 layers.
_MOST_PROBLEMS = 160
# Threads that read, transpose and check tensors.
_THREADS = 8
# Most numbers in a read.
_RUN = 2**21


def load_parameters(
    config: ModelConfig,
    weights: Tensors,
    *,
    adapter: AdapterShape | None,
    dtype: Any,
    adapter_dtype: Any,
    mesh: jax.sharding.Mesh | None,
    rules: sharding.Rules,
) -> Transformer:
    """Builds the model of a config and reads its parameters.

    Args:
        config: the model's shape.
        weights: the tensors of the checkpoint.
        adapter: the shape of the decision head; None without one.
        dtype: type of the parameters; None keeps the files' type.
        adapter_dtype: type of the adapter's parameters; None keeps the files' type.
        mesh: devices for the parameters; None for the default device.
        rules: the mesh axes that split them.

    Raises:
        CheckpointError: the tensors do not fit the config, or cannot be read.
    """
    abstract, pieces_of = _checked(config, weights, adapter)
    parameters, arrays = parameters_of(abstract), {}
    with compilation.counted(len(parameters), "Loading", "array") as count:
        for path, param in parameters.items():
            arrays[path] = read_parameter(
                weights,
                pieces_of[path],
                param.get_value().shape,
                dtype=adapter_dtype if names.is_adapter(pieces_of[path]) else dtype,
                place=place_of(param, mesh, rules),
            )
            count()
    return with_arrays(abstract, arrays)


def load_head(
    config: ModelConfig, weights: Tensors, adapter: AdapterShape
) -> dict[Path, jax.Array]:
    """Reads only the parameters of the DMS adapter, in the dtypes of the files.

    Raises:
        CheckpointError: as for `load_parameters`; all tensors are checked.
    """
    abstract, pieces_of = _checked(config, weights, adapter)
    return {
        path: read_parameter(weights, pieces_of[path], param.get_value().shape)
        for path, param in parameters_of(abstract).items()
        if names.is_adapter(pieces_of[path])
    }


def read_factors(
    transformer: Transformer, size: LowRank, weights: Tensors, mesh: jax.sharding.Mesh | None
) -> dict[Path, jax.Array]:
    """Reads the factors of a file for a transformer, in the file's type.

    Raises:
        CheckpointError: the tensors are not those of such updates of this transformer.
    """
    factors = low_rank.factor_parameters(transformer, size)
    pieces_of, shapes = names.pieces_of(transformer.config), {}
    for path, param in factors.items():
        shapes |= names.tensor_shapes(pieces_of[path], param.get_value().shape)
    found = {name: shape for name, shape in weights.shapes.items() if names.is_low_rank(name)}
    wrong = [
        f"{plain(name)} ({found.get(name, 'missing')}, expected {shapes.get(name, 'nothing')})"
        for name in sorted(shapes.keys() | found.keys())
        if found.get(name) != shapes.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"the low-rank updates do not fit rank {size.rank} and the base: "
            f"{', '.join(wrong[:5])}; copy the adapter again"
        )
    return {
        path: read_parameter(
            weights, pieces_of[path], param.get_value().shape, place=place_of(param, mesh)
        )
        for path, param in factors.items()
    }


def _checked(
    config: ModelConfig, weights: Tensors, adapter: AdapterShape | None
) -> tuple[Transformer, names.Pieces]:
    """Returns the abstract transformer and its tensors; checks these against the file.

    Raises:
        CheckpointError: the tensors do not fit the config.
    """
    abstract = low_rank.skeleton(config, adapter=adapter, low_rank=None)
    pieces_of = names.pieces_of(config, any(".experts.0." in name for name in weights.shapes))
    expected: dict[str, tuple[int, ...]] = {}
    for path, param in parameters_of(abstract).items():
        expected |= names.tensor_shapes(pieces_of[path], param.get_value().shape)
    _check(config, weights, expected)
    return abstract, pieces_of


def _check(config: ModelConfig, weights: Tensors, expected: dict[str, tuple[int, ...]]) -> None:
    """Raises a single error that names all missing, unexpected and mis-shaped tensors."""
    found = {name: shape for name, shape in weights.shapes.items() if not names.is_derived(name)}
    if config.tie_embeddings and names.LM_HEAD in found:
        expected[names.LM_HEAD] = expected[names.EMBEDDING]
        if found[names.LM_HEAD] == found.get(names.EMBEDDING) == expected[names.EMBEDDING]:
            _check_tied(weights, found[names.LM_HEAD])

    def show(name: str) -> str:
        shape = found.get(name, expected.get(name, ()))
        return f"{plain(weights.stored_name(name))} {plain(list(shape))}"

    problems = [f"missing: {show(name)}" for name in expected if name not in found]
    problems += [f"unexpected: {show(name)}" for name in found if name not in expected]
    problems += [
        f"mis-shaped: {weights.stored_name(name)} is {plain(list(found[name]))}, the config asks "
        f"for {list(shape)}"
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
            f"the tensors do not fit {weights.config_name} ({config.model_type}), "
            f"{len(problems)} problems:\n" + "\n".join(listed) + hint
        )


def _check_tied(weights: Tensors, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError if the output matrix differs from the embedding it is tied to."""
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


def read_parameter(
    weights: Tensors,
    pieces: tuple[names.Piece, ...],
    shape: tuple[int, ...],
    *,
    dtype: Any = None,
    place: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """Reads a parameter, or each device's part of it.

    Args:
        weights: the tensors.
        pieces: the tensors of the parameter.
        shape: its shape.
        dtype: its type; None keeps the files' type.
        place: how it is placed on devices; None for the default device.

    Raises:
        CheckpointError: a tensor cannot be read, or is not finite.
    """
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
        out = np.empty(
            [len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True)], dtype
        )
        rows, inner = (out, index[1:]) if stacked else (out[None], index)
        chosen = range(layers)[index[0]] if stacked else range(1)
        own_shape = shape[1:] if stacked else shape

        def fill(task: tuple[int, names.Piece, tuple[slice, ...], tuple[slice, ...]]) -> None:
            row, piece, there, own = task
            piece_shape = piece.shape(own_shape)
            read = read_tensor(weights, piece.layout, chosen[row], piece_shape, own, dtype)
            rows[row][there] = read

        tasks = [
            (row, piece, there, own)
            for row, piece in itertools.product(range(len(chosen)), pieces)
            for there, own in _runs(piece, inner, own_shape)
        ]
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(fill, tasks):  # iterate to raise the first error
                pass
        return out

    if place is None:
        return jax.device_put(part((slice(None),) * len(shape)))
    # Read a part once for all its replicas.
    parts: dict[tuple, np.ndarray] = {}

    def cached(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(shape) if index is None else index
        key = tuple(cut.indices(size) for cut, size in zip(index, shape, strict=True))
        if key not in parts:
            parts[key] = part(index)
        return parts[key]

    return jax.make_array_from_callback(shape, place, cached)


def _runs(
    piece: names.Piece, index: tuple[slice, ...], shape: tuple[int, ...]
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Splits what a piece fills of a part of a parameter into reads that a core's cache can hold.

    Args:
        piece: the piece.
        index: the part.
        shape: shape of the parameter, without its layer axis.

    Returns:
        slices of the part and of the piece for each read.
    """
    if (found := piece.within(index, shape)) is None:
        return []
    there, own = found
    axis = piece.layout.split_axis(piece.shape(shape))
    if axis is None:
        return [found]
    first, start, stop = there[axis].start, own[axis].start, own[axis].stop
    step = max(1, _RUN * (stop - start) // math.prod(cut.stop - cut.start for cut in own))

    def moved(cuts: tuple[slice, ...], low: int, high: int) -> tuple[slice, ...]:
        return (*cuts[:axis], slice(low, high), *cuts[axis + 1 :])

    return [
        (moved(there, first + low - start, first + high - start), moved(own, low, high))
        for low in range(start, stop, step)
        for high in (min(low + step, stop),)
    ]


def read_tensor(
    weights: Tensors,
    layout: names.Layout,
    layer: int,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Reads a part of a parameter's layer from its tensor.

    Args:
        weights: the tensors.
        layout: the layout of the parameter.
        layer: the layer to read.
        shape: shape of a layer.
        index: the part to read.
        dtype: type of the result.

    Raises:
        CheckpointError: the tensor cannot be read, or is not finite.
    """
    name = layout.tensor_name(layer)
    cut, rest = layout.tensor_slices(shape, index)
    whole = all(
        part.indices(size) == (0, size, 1)
        for part, size in zip(cut, weights.shapes[name], strict=True)
    )
    tensor = weights.read(name, () if whole else cut, dtype)
    if not _is_finite(tensor):
        raise CheckpointError(
            f"{weights.file_name(name)}: tensor {weights.stored_name(name)} holds NaN or infinite "
            f"values as {dtype.name}; the file is damaged, or its numbers do not fit this dtype"
        )
    return layout.to_parameter(tensor, shape)[rest]


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether all numbers are finite; bfloat16 is checked by its exponent bits, which is faster."""
    if tensor.dtype == ml_dtypes.bfloat16:
        return int((tensor.view(np.uint16) & 0x7FFF).max(initial=0)) < 0x7F80
    return bool(np.isfinite(tensor).all())
