"""One layer's view of the cache: the whole pool, its own rows, and its policy's state."""

from typing import no_type_check

from flax import struct

from dms_jax.cache import Pool
from dms_jax.policies.base import PolicyState


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class LayerCache:
    """The pool, and the state of one layer's rows."""

    pool: Pool
    state: PolicyState
