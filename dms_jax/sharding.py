"""Meshes and the tables that map logical axes to mesh axes.

The repository uses one sharding mode: meshes with **Auto** axes (GSPMD). Model code then consists
of plain einsums without `out_sharding` arguments, the partitioner derives the collectives from the
shardings of parameters and batches, and everything ragged (caches, kernels) runs inside
`jax.shard_map`, where the mode makes no difference. The mesh comes from the context
(`jax.set_mesh`), never from a config.

There are two mesh axes: `data` (sequences; in training also a shard of every parameter, FSDP) and
`model` (heads, feed-forward, vocabulary). Attention is split by KV head: queries, keys and values
are one matrix, grouped by KV head, so if the axis does not divide the KV heads, that matrix and the
attention over it are replicated, query heads included.

Caches, and everything that attention over them takes and returns, are split as their fields
declare: the class of a state declares the logical axes of each array at its field (`axes`), and
`partition` reads them. A field without declared axes is refused.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dms_jax.checks import Count, check
from dms_jax.errors import ConfigError

DATA = "data"
MODEL = "model"

Rules = Mapping[str, str | None]

# Parameters are gathered layer by layer from their `data` shards (FSDP).
TRAINING_RULES: Rules = {
    "layers": None,
    "embed": DATA,
    "heads": MODEL,
    "kv_heads": MODEL,
    "group": None,
    "head_dim": None,
    "gate_up": None,
    "mlp": MODEL,
    "vocab": MODEL,
    "rank": None,
    "adapter": None,
}
# A decode step must not gather parameters, so none is split over `data`.
DECODING_RULES: Rules = TRAINING_RULES | {"embed": None}
# Rows never cross devices, and each device holds the pages of its own rows.
CACHE_RULES: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    "sequences": (DATA,),
    "tokens": (),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "pages": (DATA, MODEL),
}


def make_mesh(data: int = 1, model: int = 1, *, devices: Any = None) -> jax.sharding.Mesh:
    """Returns a (data, model) mesh with Auto axes over the first `data * model` devices.

    Raises:
      ConfigError: there are fewer devices.
    """
    data, model = check("make_mesh: data", data, Count), check("make_mesh: model", model, Count)
    available = jax.devices() if devices is None else list(devices)
    if data * model > len(available):
        raise ConfigError(
            f"A mesh of {data} x {model} takes {data * model} devices; there are {len(available)}."
        )
    devices = available[: data * model]
    return jax.make_mesh(
        (data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def axis_size(name: str) -> int:
    """Returns the size of a mesh axis of the context, 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def parameter_sharding(
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    rules: Rules = DECODING_RULES,
) -> NamedSharding:
    """Returns the sharding of a parameter with these logical axes.

    A dimension that its mesh axis does not divide is replicated, such as fewer KV heads than
    devices or a vocabulary of odd size.
    """
    spec = []
    for name, size in zip(axes, shape, strict=True):
        axis = rules[name]
        spec.append(axis if axis is not None and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def constrain(x: jax.Array, *spec: str | None) -> jax.Array:
    """Constrains the sharding of `x` on the mesh of the context; the identity without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    fitted = (
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(spec, x.shape, strict=True)
    )
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fitted))


def row_axes(num_sequences: int, num_kv_heads: int) -> tuple[str | None, str | None]:
    """Returns the mesh axes over which rows are split: (for sequences, for KV heads).

    None means that rows are replicated: there is no mesh, or the axis does not divide them.
    """
    data, model = axis_size(DATA), axis_size(MODEL)
    return (
        DATA if data > 1 and num_sequences % data == 0 else None,
        MODEL if model > 1 and num_kv_heads % model == 0 else None,
    )


def has_mesh() -> bool:
    """Whether the context has a mesh of more than one device.

    If so, everything that works on rows (Pallas kernels, page tables with shard-local page numbers)
    must run inside `jax.shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and math.prod(mesh.shape.values()) > 1 and not mesh.manual_axes


def axes(*names: str) -> dict[str, tuple[str, ...]]:
    """Declares the leading logical axes of a field's arrays; the remaining axes are not split.

        ring: Int[Array, "B K W"] = struct.field(metadata=axes("sequences", "kv_heads"))

    Raises:
      ConfigError: there is no such axis in `CACHE_RULES`.
    """
    if unknown := [name for name in names if name not in CACHE_RULES]:
        raise ConfigError(
            f"Unknown axis {unknown[0]!r}; the axes of caches are {', '.join(CACHE_RULES)}."
        )
    return {"axes": names}


def declared_axes(tree: Any) -> Any:
    """Returns a tree of the declared axes of each array, from the innermost field around it.

    Tuples, lists and dicts declare nothing themselves; the declaration of their field applies.

    Raises:
      ConfigError: a field declares no axes, or more than its array has.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [_axes_at(tree, path, leaf) for path, leaf in leaves])


def _axes_at(tree: Any, path: tuple, leaf: Any) -> tuple[str, ...]:
    holder, names = "An array outside any state", None
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            if dataclasses.is_dataclass(tree):
                (field,) = (field for field in dataclasses.fields(tree) if field.name == key.name)
                holder, names = f"{type(tree).__name__}.{field.name}", field.metadata.get("axes")
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            tree = tree[key.key]
        else:
            break
    if names is None:
        raise ConfigError(
            f"{holder} declares no axes, so it cannot be split over devices. Declare "
            'them at the field: flax.struct.field(metadata=dms_jax.sharding.axes("sequences", '
            '"kv_heads")), or "pages" for arrays by page.'
        )
    if len(names) > len(leaf.shape):
        raise ConfigError(
            f"{holder} declares the axes {', '.join(names)}, but has the shape {leaf.shape}."
        )
    return names


def cache_spec(names: tuple[str, ...], data: str | None, model: str | None) -> PartitionSpec:
    """Returns the partition of an array with these axes, given `row_axes`."""
    return PartitionSpec(
        *(tuple(axis for axis in CACHE_RULES[name] if axis in (data, model)) for name in names)
    )


def partition(tree: Any, data: str | None, model: str | None) -> Any:
    """Returns the partition of every array of a state, given `row_axes`.

    Raises:
      ConfigError: see `declared_axes`.
    """
    return jax.tree.map(lambda _, names: cache_spec(names, data, model), tree, declared_axes(tree))
