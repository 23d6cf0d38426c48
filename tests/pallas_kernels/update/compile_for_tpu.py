"""Compile the TPU kernel for a TPU that is not there; prints one line a case.

Usage: compile_for_tpu.py TOPOLOGY CASE...
"""

import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.update import cases, tpu
from tests.pallas_kernels.update.support import operation, write_structs
from tests.support.ahead import compile_ahead

# As many rows as their addresses may be in scalar memory.
MOST_ROWS = cases.WriteCase("most_rows", tpu._MOST_ROWS)


def main(topology, names):
    """Compile each case and say whether the pool stays where it is."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    for name in names:
        case = MOST_ROWS if name == "most_rows" else cases.by_name(name)
        shapes = write_structs(case, sharding)
        pool = {key: shapes.pop(key) for key in ("k_pages", "v_pages")}
        write = operation(case)
        run = jax.jit(lambda pool, rest, write=write: write(**pool, **rest), donate_argnums=0)
        report = compile_ahead(run.trace(pool, shapes).lower(), topology)
        size = sum(x.size * x.dtype.itemsize for x in pool.values())
        memory = report.memory
        kernel = "tpu_custom_call" in report.text
        in_place = memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size / 8
        print(f"{name} {kernel} {in_place}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
