"""Small results of a program as one array, which the host reads in one transfer.

On a GPU every array that is read is a transfer of its own, which takes about a millisecond however
small it is: a chunk of steps has six results, and its lanes wait for them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class Packed:
    """A tree of arrays as words of 32 bits, one behind the other.

    Attributes:
      words: their bits; booleans are words of their own.
      tree: structure of the tree.
      leaves: shape and dtype of each array.
    """

    words: Int[Array, " n"]
    tree: Any = struct.field(pytree_node=False)
    leaves: tuple[jax.ShapeDtypeStruct, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, tree: Any) -> "Packed":
        """Packs a tree, inside a program."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(jnp.concatenate([_words(leaf) for leaf in leaves]), structure, shapes)

    def read(self) -> Any:
        """Waits for the program, and returns the tree with NumPy arrays."""
        words, arrays, start = np.asarray(self.words), [], 0
        for leaf in self.leaves:
            wide = np.dtype(np.int32) if leaf.dtype == bool else np.dtype(leaf.dtype)
            end = start + leaf.size * wide.itemsize // 4
            array = words[start:end].view(wide).reshape(leaf.shape)
            arrays.append(array.astype(leaf.dtype, copy=False))
            start = end
        return jax.tree.unflatten(self.tree, arrays)


def _words(leaf: Array) -> Int[Array, " n"]:
    if leaf.dtype == bool:
        return leaf.astype(jnp.int32).reshape(-1)
    return jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1)
