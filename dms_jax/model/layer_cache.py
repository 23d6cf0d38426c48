"""What a layer sees of the cache, and how that is split over devices.

Whatever touches rows runs inside `shard_map`: rows never cross devices, page numbers are local, and
the only thing a policy may reduce over devices is a mean over heads.
"""

from typing import Any, no_type_check

import jax
from flax import struct
from jax.sharding import PartitionSpec

from dms_jax.cache import Pool
from dms_jax.policies.base import PolicyState

# Fields whose first axis is that of the sequences, with none for heads.
PER_SEQUENCE = ("live", "reads", "positions", "count", "horizon", "ends_prompt", "future")


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class LayerCache:
    """What one layer sees of the cache: the whole pool, its own rows."""

    pool: Pool
    state: PolicyState


def partition(tree: Any, data: str | None, model: str | None) -> Any:
    """The partition of every array that crosses the boundary of shard_map, by its field."""
    pool = PartitionSpec(tuple(axis for axis in (data, model) if axis))
    tokens_heads = PartitionSpec(data, None, model)
    rows = PartitionSpec(data, model)

    def of(path: tuple, leaf: Any) -> PartitionSpec:
        del leaf
        names = [getattr(key, "name", None) for key in path]
        if "pool" in names or "pages" in names:
            return pool
        if names and names[0] in ("out", "k", "v", "queries"):
            return tokens_heads
        if names and names[0] in PER_SEQUENCE:
            return PartitionSpec(data)
        if names and names[0] == "layer":
            return PartitionSpec()
        return rows  # decisions, page_table, lengths, state.rows

    if hasattr(tree, "shape"):  # q is [B, T, H, D], cos and sin are [B, T, D/2]
        return tokens_heads if len(tree.shape) == 4 else PartitionSpec(data)
    return jax.tree_util.tree_map_with_path(of, tree)
