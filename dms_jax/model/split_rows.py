"""Rows of tokens that are split over the mesh axis `sequence`, in training.

Inside `jax.shard_map` each of N shards has two of 2 N pieces of every row: shard i has piece i from
the start and piece i from the end, so that the queries of all shards see the same number of keys.

    N = 2, pieces 0 1 2 3    shard 0: 0 3    shard 1: 1 2

A token's hidden states, queries, loss and gradients stay in its shard. In each layer the keys,
values and decisions of all tokens are all-gathered in the order of the row (with grouped-query
attention they are small beside activations: there is no ring); relaxation, merging and rotation of
keys run on the whole row in every shard, and each piece of queries attends to it from its position.
So policies (delayed windows, merged neighbours) need no further exchange. The gradients of gathered
arrays are summed over the shards.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dms_jax import sharding

PIECES = 2  # of a row in each shard


@struct.dataclass
class SplitRow:
    """A shard's part of rows of `length` tokens.

    Attributes:
      shard: number of the shard, from 0.
      shards: number of shards, N.
      length: tokens of a whole row, a multiple of 2 N.
    """

    shard: Int[Array, ""]
    shards: int = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)

    @property
    def starts(self) -> tuple[Int[Array, ""], ...]:
        """The index in the row of the first token of each piece."""
        size = self.length // (PIECES * self.shards)
        return self.shard * size, (PIECES * self.shards - 1 - self.shard) * size

    def own(self, x: Array) -> Array:
        """Returns this shard's pieces of an array over whole rows."""
        size = self.length // (PIECES * self.shards)
        pieces = [jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for start in self.starts]
        return jnp.concatenate(pieces, axis=1)

    def whole(self, x: Array, axis: int = 1) -> Array:
        """Returns an array over whole rows from every shard's pieces.

        # N = 2   gathered: 0 3 1 2   Out: 0 1 2 3
        """
        over = (sharding.SEQUENCE,)
        if jnp.issubdtype(x.dtype, jnp.floating):
            gathered = sharding.gather(x, axis, x.dtype, over)
        else:
            gathered = jax.lax.all_gather(x, over, axis=axis, tiled=True)
        shape = (*x.shape[:axis], self.shards, PIECES, -1, *x.shape[axis + 1 :])
        pieces = gathered.reshape(shape)
        first, second = (jax.lax.index_in_dim(pieces, i, axis + 1, keepdims=False) for i in (0, 1))
        ordered = jnp.concatenate([first, jnp.flip(second, axis)], axis)
        return ordered.reshape(gathered.shape)


@dataclasses.dataclass(frozen=True)
class Share:
    """A device's part of a pass that is split over several devices.

    Attributes:
      prepare: turns a stored layer into the one to compute with, such as a whole layer from a
        shard; with `sharding.gather` the backward pass repeats it.
      row: how the tokens of a row are split.
    """

    prepare: Callable[[Any], Any] | None = None
    row: SplitRow | None = None


def of_whole_rows(row: SplitRow | None, tree: Any, axis: int = 1) -> Any:
    """Returns arrays over whole rows; without a split they are unchanged."""
    return tree if row is None else jax.tree.map(lambda x: row.whole(x, axis), tree)


def of_own_tokens(row: SplitRow | None, tree: Any) -> Any:
    """Returns this shard's part of arrays over whole rows."""
    return tree if row is None else jax.tree.map(row.own, tree)
