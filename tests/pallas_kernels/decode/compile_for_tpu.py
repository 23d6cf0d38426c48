"""Compile the TPU kernel for a TPU that is not there; prints one line a case.

Usage: compile_for_tpu.py TOPOLOGY CASE... ; "large" is a step of 512 rows of 1024 pages, "wide" one
of 8192 small pages a row and "widest" one of as many as there may be, "page48" and "page192" have
pages of sizes that are no powers of two.
"base+" is the case called base with all results: log-sum-exp and scores.
"""

import functools
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import decode_attention
from pallas_kernels.decode import cases
from tests.pallas_kernels.support import structs
from tests.support.ahead import compile_ahead

# Tables of 2 MiB: twice the scalar memory of a chip.
LARGE = cases.DecodeCase("large", (100,) * 512, spare_columns=1022)
WIDE = cases.DecodeCase("wide", (100,) * 64, page_size=16, spare_columns=8185)
PAGES = [cases.DecodeCase(f"page{size}", (0, 1, 40 * size), page_size=size) for size in (48, 192)]
# Two rows of tables of 4 bytes a page fill scalar memory, but for 16 KiB that are left alone.
WIDEST = cases.DecodeCase("widest", (100,) * 2, page_size=16, spare_columns=1007 * 128 - 7)
OWN = {case.name: case for case in (LARGE, WIDE, WIDEST, *PAGES)}


def main(topology, names):
    """Compile each case, with the optional results where its name ends with a plus."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(chips[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    for name in names:
        everything, plain = name.endswith("+"), name.removesuffix("+")
        case = OWN.get(plain) or cases.by_name(plain)
        shapes = {
            key: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for key, shape in structs(case).items()
        }
        run = functools.partial(
            decode_attention, scale=0.1, return_lse=everything, return_scores=everything
        )
        lowered = jax.jit(lambda inputs, run=run: run(**inputs)).trace(shapes).lower()
        kernel = "tpu_custom_call" in compile_ahead(lowered, topology).text
        print(f"{name} {'kernel' if kernel else 'no kernel'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
