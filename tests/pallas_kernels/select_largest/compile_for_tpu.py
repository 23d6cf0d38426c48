"""Compile the selection for a TPU that is not there; prints one line a case.

Usage: compile_for_tpu.py TOPOLOGY CASE...
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import select_largest
from pallas_kernels.select import cases
from tests.support.ahead import compile_ahead


def main(topology, names):
    """Compile each case and say whether the kernel does it, and nothing is sorted."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    for name in names:
        case = cases.by_name(name)
        shape = (case.rows, case.width)
        scores = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype), sharding=sharding)
        run = jax.jit(functools.partial(select_largest, count=case.count))
        text = compile_ahead(run.trace(scores).lower(), topology).text
        print(f"{name} {'tpu_custom_call' in text and ' sort(' not in text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
