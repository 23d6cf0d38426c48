"""The programs whose compiled form `tpu_schedule` reads, one process each.

    python -m experiments.benchmarks.tpu_programs

libtpu takes its options from the environment when it is loaded, and writes all that a process
compiles into one folder.
"""

import dataclasses
import functools
import sys
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax.command_line.running import run
from experiments.benchmarks.settings import check_numbers
from pallas_kernels import decode_attention, fetch_rows, prefill_attention, select_largest

# Llama-3.1-8B: 8 KV heads, each with 4 query heads, of 128 numbers.
GROUP, DIM = 4, 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Compile one kernel for a TPU that is not there."""

    topology: str = "v5e:2x2"
    """TPU to compile for, as libtpu names it."""
    operation: Literal["decode", "prefill", "select", "fetch"] = "decode"
    """Operation to compile."""
    implementation: Literal["mosaic_tpu", "xla"] = "mosaic_tpu"
    """Implementation of it."""
    rows: int = 256
    """Rows of scores, of the page table, or fetched rows; of a prompt query heads a KV head."""
    width: int = 4096
    """Slots or scores of a row, or rows of the store; of a prompt the slots of its past."""
    part: int = 64
    """Page size, or number of scores to select."""

    def __post_init__(self):
        check_numbers(self)


def shapes_of(config: Config):
    """Returns the function to compile, and the shapes and dtypes of its arguments."""
    name, rows, width, part = config.operation, config.rows, config.width, config.part
    choice = config.implementation
    if name == "select":
        select = functools.partial(select_largest, count=part, implementation=choice)
        return select, [((rows, width), jnp.float32)]
    if name == "fetch":
        fetch = functools.partial(fetch_rows, implementation=choice)
        return fetch, [((width, DIM), jnp.bfloat16), ((rows,), jnp.int32)]
    if name == "prefill":
        return prompt_of(rows, width, part, choice)
    pool = ((rows * width // part, part, DIM), jnp.bfloat16)
    attend = functools.partial(decode_attention, scale=DIM**-0.5, implementation=choice)
    table = ((rows, width // part), jnp.int32)
    return attend, [((rows, GROUP, DIM), jnp.bfloat16), pool, pool, table, ((rows,), jnp.int32)]


def prompt_of(group: int, past: int, page_size: int, choice: str):
    """Returns the same of a chunk of 4 prompts: 512 tokens behind a past of whole pages."""
    batch, length, heads = 4, 512, 8
    attend = functools.partial(
        prefill_attention, window=256, scale=DIM**-0.5, implementation=choice
    )
    new = ((batch, length, heads, DIM), jnp.bfloat16)
    columns = past // page_size
    pool = ((batch * heads * columns, page_size, DIM), jnp.bfloat16)
    return attend, [
        ((batch, length, heads * group, DIM), jnp.bfloat16),
        new,
        new,
        ((batch, heads, length), jnp.bool_),
        ((batch,), jnp.int32),
        pool,
        pool,
        ((batch, heads, columns), jnp.int32),
        ((batch, heads), jnp.int32),
        ((batch, heads, past), jnp.int32),
    ]


def main(config: Config) -> None:
    """Compile it; libtpu writes the bundles."""
    jax.config.update("jax_enable_compilation_cache", False)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=config.topology).devices
    sharding = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    function, shapes = shapes_of(config)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
