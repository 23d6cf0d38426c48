"""Meshes and the tables that map logical axes to mesh axes.

The repository uses one sharding mode: meshes with **Auto** axes (GSPMD). So model code has plain
einsums without `out_sharding` arguments, the partitioner derives the collectives from the shardings
of parameters and batches, and all ragged code (caches, kernels) runs inside `jax.shard_map`, where
the mode makes no difference. The mesh comes from the context (`jax.set_mesh`), never from a config.

Parameters declare their logical axes in metadata `axes`, not in flax's `out_sharding`: training,
decoding and single layers shard one parameter by different rules, while flax by default applies
`out_sharding` when a parameter is created; and flax's rules only rename axes, while
`parameter_sharding` also replicates a dimension that a mesh axis does not divide, and uses each
mesh axis once.

There are two mesh axes: `data` (sequences; in training also a shard of every matrix, FSDP) and
`model` (heads, feed-forward, vocabulary). Attention is split by KV head: queries, keys and values
are one matrix, grouped by KV head. If the axis does not divide the KV heads, decoding replicates
that matrix and the attention over it; training splits the matrix within the heads, and repeats each
KV head for equal parts of its query heads. Training takes a third axis, `sequence`: the tokens of
each sequence (`dms_jax.model.split_rows`), and with `data` a shard of every matrix. Decoding does
not use it.

A mixture of experts may use an axis `experts`, which splits whole experts, while `model` splits the
feed-forward of each. Everything else is split over both axes like over a single `model`: eight
devices may be 8 in `model`, 8 in `experts`, or 4 by 2, and hold one copy of weights and caches.
Every device computes its part for all tokens of its `data` shard, and the parts are summed.

The gradients of training are computed inside `jax.shard_map` over `data` and `sequence`, where
`gather` and `scatter` define the collectives and their types; the partitioner handles `model`. It
cannot split a collective of `shard_map`: it would gather the operand over `model` first. So each
device of `model` runs `gather` and `scatter` on its own part (`_on_parts`).

Caches, and the inputs and outputs of attention over them, are split as their fields declare: the
class of a state declares the logical axes of each array at its field (`axes`), and `partition`
reads them. A field without declared axes is refused.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dms_jax.checks import Count, check
from dms_jax.errors import ConfigError

DATA = "data"
SEQUENCE = "sequence"
EXPERTS = "experts"
MODEL = "model"

# A mesh axis, or several that split one dimension together.
Axes = str | tuple[str, ...]

# Name of the result of `gather`, for policies of `jax.checkpoint`.
GATHERED = "gathered"

# Mesh axes of each logical axis; axes that a mesh lacks are ignored.
Rules = Mapping[str, str | tuple[str, ...] | None]

# The mesh axes that `MODEL` stands for, except for experts.
_TOGETHER = {MODEL: (EXPERTS, MODEL)}

# Matrices are gathered layer by layer from their shards over both axes (FSDP). Adapters decide for
# all KV heads on every device: split by head, each would have a part of the gradient of the hidden
# states, to be summed in float32.
TRAINING_RULES: Rules = {
    "layers": None,
    "embed": (DATA, SEQUENCE),
    "heads": MODEL,
    "kv_heads": MODEL,
    "decisions": None,
    "group": None,
    "head_dim": MODEL,
    "gate_up": None,
    "mlp": MODEL,
    "vocab": MODEL,
    "experts": EXPERTS,
    "routes": None,
    "rank": None,
    "adapter": None,
}
# A decode step must not gather parameters, so none is split over `data`.
DECODING_RULES: Rules = TRAINING_RULES | {"embed": None, "head_dim": None, "decisions": MODEL}
# Rows never cross devices, and each device holds the pages of its own rows.
CACHE_RULES: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    "sequences": (DATA,),
    "tokens": (),
    "heads": (EXPERTS, MODEL),
    "kv_heads": (EXPERTS, MODEL),
    "pages": (DATA, EXPERTS, MODEL),
}


def make_mesh(
    data: int = 1, model: int = 1, *, sequence: int = 1, experts: int = 1, devices: Any = None
) -> jax.sharding.Mesh:
    """Returns a (data, model) mesh with Auto axes over the first `data * model` devices.

    `sequence`, for training on long sequences, adds an axis after `data`; `experts`, for mixtures
    of experts, adds one before `model`. Links between slices or hosts are slow; if their number
    divides `data`, all other axes stay within one of them.

    Raises:
      ConfigError: there are too few devices.
    """
    data, model = check("make_mesh: data", data, Count), check("make_mesh: model", model, Count)
    sequence = check("make_mesh: sequence", sequence, Count)
    experts = check("make_mesh: experts", experts, Count)
    available = jax.devices() if devices is None else list(devices)
    sizes = mesh_axes(data, model, sequence=sequence, experts=experts)
    names, shape = tuple(sizes), tuple(sizes.values())
    size = math.prod(shape)
    if size > len(available):
        raise ConfigError(
            f"A mesh of {' x '.join(map(str, shape))} needs {size} devices; there are "
            f"{len(available)}."
        )
    devices = available[:size]
    types = (AxisType.Auto,) * len(shape)
    # jax numbers TPU slices, and the hosts of GPUs, by `slice_index`.
    near = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(near) > 1:
        if data % len(near) == 0 and len(set(near.values())) == 1:
            within, between = (data // len(near), *shape[1:]), (len(near), *(1,) * (len(shape) - 1))
            arranged = mesh_utils.create_hybrid_device_mesh(
                within, between, devices, allow_split_physical_axes=True
            )
        else:
            together = sorted(devices, key=lambda device: device.slice_index)
            arranged = np.asarray(together).reshape(shape)
        return jax.sharding.Mesh(arranged, names, axis_types=types)
    # Several mesh axes may share an axis of a torus.
    arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(arranged, names, axis_types=types)


def mesh_axes(data: int, model: int, *, sequence: int, experts: int) -> dict[str, int]:
    """Returns the axes of a mesh in order; `sequence` and `experts` only if they split anything."""
    sizes = {DATA: data, SEQUENCE: sequence, EXPERTS: experts, MODEL: model}
    return {name: size for name, size in sizes.items() if size > 1 or name in (DATA, MODEL)}


def mesh_sizes(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
) -> tuple[int, int, int]:
    """Returns the sizes of `data`, `sequence`, and `experts` times `model`.

    Missing axes have size 1.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    model = sizes.get(EXPERTS, 1) * sizes.get(MODEL, 1)
    return sizes.get(DATA, 1), sizes.get(SEQUENCE, 1), model


def axis_size(name: Axes | None) -> int:
    """Returns the size of mesh axes of the context, 1 without a mesh or for None.

    `model` counts `experts` and `model` together.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(sizes.get(axis, 1) for axis in _members(name))


def _members(rule: Axes | None) -> tuple[str, ...]:
    """Returns the mesh axes of a rule or of a name."""
    return _TOGETHER.get(rule, (rule,)) if isinstance(rule, str) else rule or ()


def _auto_sizes() -> dict[str, int]:
    """Returns the sizes above 1 of the context's mesh axes that the partitioner handles."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: size for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes
    }


def _joined(axes: Sequence[str]) -> Axes | None:
    """Returns the entry of a `PartitionSpec` for a dimension split over these axes."""
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None


def parameter_sharding(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    rules: Rules = DECODING_RULES,
) -> NamedSharding:
    """Returns the sharding of a parameter with these logical axes.

    A dimension not divisible by its mesh axis is replicated, such as fewer KV heads than devices or
    a vocabulary of odd size. A mesh axis splits only the first dimension that it divides.
    """
    return NamedSharding(mesh, _partition_of(dict(mesh.shape), axes, shape, rules))


def parameter_partition(axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the decoding partition of a parameter over the axes of the partitioner."""
    return _partition_of(_auto_sizes(), axes, shape, DECODING_RULES)


def _partition_of(
    sizes: Mapping[str, int], axes: tuple[str, ...], shape: tuple[int, ...], rules: Rules
) -> PartitionSpec:
    spec, used = [], set()
    for name, size in zip(axes, shape, strict=True):
        over = [axis for axis in _members(rules[name]) if axis in sizes and axis not in used]
        if size % math.prod(sizes[axis] for axis in over):
            over = []
        used |= set(over)
        spec.append(_joined(over))
    return PartitionSpec(*spec)


def constrain(x: jax.Array, *spec: str | None) -> jax.Array:
    """Constrains the sharding of `x` on the mesh of the context; the identity without a mesh.

    Inside `shard_map`, only the partitioner's axes apply.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_names) == set(mesh.manual_axes):
        return x
    auto = _auto_sizes()
    fitted = []
    for axis, size in zip(spec, x.shape, strict=True):
        over = [name for name in _members(axis) if name in auto]
        fitted.append(_joined(over if size % math.prod(auto[name] for name in over) == 0 else []))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*fitted))


def together(*each: Axes | None) -> tuple[str, ...]:
    """Returns the mesh axes of several entries of a `PartitionSpec`."""
    return tuple(axis for one in each for axis in ((one,) if isinstance(one, str) else one or ()))


def in_shards(name: str) -> bool:
    """Whether the code runs inside `shard_map` over a mesh axis."""
    return name in jax.sharding.get_abstract_mesh().manual_axes


def free_axes() -> set[str]:
    """Returns the axes of the context's mesh that no enclosing `shard_map` splits."""
    return {name for name in jax.sharding.get_abstract_mesh().axis_names if not in_shards(name)}


def shard_axes() -> tuple[str, ...]:
    """Returns the axes over which training is split, inside `shard_map` over them."""
    return tuple(name for name in (DATA, SEQUENCE) if in_shards(name))


def whole(place: NamedSharding) -> NamedSharding:
    """Returns the sharding of a parameter that is not split over `data` and `sequence`."""
    split = [[x for x in together(over) if x not in (DATA, SEQUENCE)] for over in place.spec]
    return NamedSharding(place.mesh, PartitionSpec(*map(_joined, split)))


def gather(
    shard: jax.Array,
    axis: int,
    dtype: Any,
    over: tuple[str, ...] = (),
    *,
    parts: PartitionSpec = PartitionSpec(),  # noqa: B008
) -> jax.Array:
    """Gathers an array from its shards, inside `shard_map`.

    Its gradient is summed over the devices in at least float32.

    Args:
      shard: this device's part.
      axis: the axis along which the array is split.
      dtype: the type of the result.
      over: mesh axes of the shards; by default `shard_axes()`.
      parts: partition of the array over the axes of the partitioner.
    """
    over = over or shard_axes()
    return checkpoint_name(_gather(shard, axis, dtype, over, parts), GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(shard, axis, dtype, over, parts):
    gathered = functools.partial(jax.lax.all_gather, axis_name=over, axis=axis, tiled=True)
    return _on_parts(gathered, shard.astype(dtype), parts)


def scatter(
    array: jax.Array,
    axis: int,
    over: tuple[str, ...] = (),
    *,
    parts: PartitionSpec = PartitionSpec(),  # noqa: B008
) -> jax.Array:
    """Returns this device's shard of the sum over the shards, in at least float32."""
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    over = over or shard_axes()
    summed = functools.partial(
        jax.lax.psum_scatter, axis_name=over, scatter_dimension=axis, tiled=True
    )
    return _on_parts(summed, wide, parts)


def _on_parts(
    collective: Callable[[jax.Array], jax.Array], x: jax.Array, parts: PartitionSpec
) -> jax.Array:
    """Runs a collective of `shard_map` on each device's part over the axes of the partitioner."""
    auto = _auto_sizes()
    split = [[name for name in together(over) if name in auto] for over in parts]
    axes = {name for names in split for name in names}
    if not axes:
        return collective(x)
    spec = PartitionSpec(*map(_joined, split))
    mapped = jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
    )
    return mapped(x)


def keeps_all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy of `jax.checkpoint`: the backward pass recomputes nothing but gathers."""
    inner = parameters["jaxpr"].eqns if primitive.name == "shard_map" else ()
    names = {primitive.name, *(each.primitive.name for each in inner)}
    return not names & {"all_gather", "custom_vjp_call"} and parameters.get("name") != GATHERED


def _gather_forward(shard, axis, dtype, over, parts):
    # The backward pass needs only the shard's dtype.
    return _gather(shard, axis, dtype, over, parts), jnp.zeros(0, shard.dtype)


def _gather_backward(axis, dtype, over, parts, like, gradient):
    del dtype
    return (scatter(gradient, axis, over, parts=parts).astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def row_axes(num_sequences: int, num_kv_heads: int) -> tuple[str | None, Axes | None]:
    """Returns the mesh axes over which rows are split: (for sequences, for KV heads).

    None means that rows are not split: there is no mesh, the axis does not divide them, or the code
    already runs inside `shard_map` over the axis.
    """
    auto = _auto_sizes()
    data, model = auto.get(DATA), [name for name in _members(MODEL) if name in auto]
    return (
        DATA if data is not None and num_sequences % data == 0 else None,
        _joined(model if num_kv_heads % math.prod(auto[name] for name in model) == 0 else []),
    )


def has_mesh() -> bool:
    """Whether the context has a mesh of more than one device.

    If so, code on rows (Pallas kernels, page tables with shard-local page numbers) must run inside
    `jax.shard_map`.
    """
    return bool(_auto_sizes())


def axes(*names: str) -> dict[str, tuple[str, ...]]:
    """Declares the leading logical axes of a field's arrays; other axes are not split.

        ring: Int[Array, "B K W"] = struct.field(metadata=axes("sequences", "kv_heads"))

    Raises:
      ConfigError: an axis is not in `CACHE_RULES`.
    """
    if unknown := [name for name in names if name not in CACHE_RULES]:
        raise ConfigError(
            f"Unknown axis {unknown[0]!r}; the axes of caches are {', '.join(CACHE_RULES)}."
        )
    return {"axes": names}


def declared_axes(tree: Any) -> Any:
    """Returns a tree of the declared axes of each array, from its innermost field.

    Tuples, lists and dicts have no declarations; that of their field applies.

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


def cache_spec(names: tuple[str, ...], data: str | None, model: Axes | None) -> PartitionSpec:
    """Returns the partition of an array with these axes, given `row_axes`."""
    split = together(data, model)
    return PartitionSpec(
        *(tuple(axis for axis in CACHE_RULES[name] if axis in split) for name in names)
    )


def partition(tree: Any, data: str | None, model: Axes | None) -> Any:
    """Returns the partition of every array of a state, given `row_axes`.

    Raises:
      ConfigError: see `declared_axes`.
    """
    return jax.tree.map(lambda _, names: cache_spec(names, data, model), tree, declared_axes(tree))
