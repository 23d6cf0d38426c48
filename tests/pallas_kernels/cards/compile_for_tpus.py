"""Compile a kernel for an absent TPU; print one line per case.

Usage: compile_for_tpus.py KERNEL TOPOLOGY CASE... A line says whether the program has the kernel,
and whether it writes in place. The decoding case "base+" is "base" with all results: log-sum-exp
and scores.
"""

import functools
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import decode_attention
from pallas_kernels.decode import cases as decode_cases
from pallas_kernels.update import cases as write_cases
from pallas_kernels.update import tpu
from tests.pallas_kernels.support import by_name, structs
from tests.pallas_kernels.update.support import operation, write_structs
from tests.support.ahead import compile_ahead

DECODE = [
    # Tables of 2 MiB: twice the scalar memory of a chip.
    decode_cases.DecodeCase("large", (100,) * 512, spare_columns=1022),
    # Rows of 8192 small pages, and of pages whose sizes are no powers of two.
    decode_cases.DecodeCase("wide", (100,) * 64, page_size=16, spare_columns=8185),
    *(
        decode_cases.DecodeCase(f"page{size}", (0, 1, 40 * size), page_size=size)
        for size in (48, 192)
    ),
    # The largest pages.
    decode_cases.DecodeCase("float32_head_dim256", (70, 0, 64), dtype="float32", head_dim=256),
    # Two rows of tables of 4 bytes per page fill scalar memory, except for 16 KiB.
    decode_cases.DecodeCase("widest", (100,) * 2, page_size=16, spare_columns=1007 * 128 - 7),
]
# As many rows as have addresses in scalar memory.
WRITE = [write_cases.WriteCase("most_rows", tpu._MOST_ROWS)]
OWN = {case.name: case for case in (*DECODE, *WRITE)}


def decode(name, place):
    everything, plain = name.endswith("+"), name.removesuffix("+")
    shapes = placed(structs(OWN.get(plain) or by_name(decode_cases, plain)), place)
    run = functools.partial(
        decode_attention, scale=0.1, return_lse=everything, return_scores=everything
    )
    return jax.jit(lambda inputs: run(**inputs)).trace(shapes)


def write(name, place):
    case = OWN.get(name) or by_name(write_cases, name)
    shapes = write_structs(case, place)
    pool = {key: shapes.pop(key) for key in ("k_pages", "v_pages")}
    run = operation(case)
    return jax.jit(lambda pool, rest: run(**pool, **rest), donate_argnums=0).trace(pool, shapes)


def placed(shapes, place):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)


def main(kernel, topology, names):
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    place = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    for name in names:
        traced = {"decode": decode, "write": write}[kernel](name, place)
        report = compile_ahead(traced.lower(), topology)
        memory, donated = (
            report.memory,
            sum(donated_bytes(x) for x in jax.tree.leaves(traced.args_info)),
        )
        in_place = memory.alias_size_in_bytes >= donated > 8 * memory.temp_size_in_bytes
        found = ("tpu_custom_call" in report.text, in_place)
        print(name, *found, flush=True)


def donated_bytes(argument):
    return argument.donated * argument.dtype.itemsize * int(np.prod(argument.shape))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
