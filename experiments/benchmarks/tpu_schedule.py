"""Model the TPU kernels from their compiled instructions. This is a model: no TPU was available.

Each kernel is compiled ahead of time for v5e, v5p and v6e, and its instruction bundles are read. A
TensorCore issues at most one bundle a cycle, and copies run in parallel. So a block of the decode
kernel, of which n are in buffers, takes

    max(D, C, (D + C + latency) / n)

where D is the time of its bytes at the bandwidth of the data sheet and C that of its bundles: the
copy of a block starts when the one n - 1 before it is about to be computed. No data sheet states
the latency of a copy, so the model is shown for several. Bundles count every branch as executed, so
C is an upper bound; it excludes pipeline stalls. The same rule applies to a tile of keys in the
prefill kernel.

    python -m experiments.benchmarks.tpu_schedule --out experiments/results/kernels
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dms_jax
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.devices import DEVICES
from pallas_kernels import decode_attention, fetch_rows, prefill_attention, select_largest
from pallas_kernels.prefill.tiles import TILE
from pallas_kernels.prefill.tpu import BUFFERS

LATENCIES = (0.0, 0.5e-6, 1e-6)
_MODULE = "experiments.benchmarks.tpu_schedule"


@dataclasses.dataclass(frozen=True)
class Chip:
    """The model's parameters of a chip, beside its data sheet in `dms_jax.devices`.

    Attributes:
      kind: libtpu's name of the slice.
      topology: the slice of which one chip is compiled for.
      cores: number of TensorCores.
      clock: cycles a second of a TensorCore.
    """

    kind: str
    topology: str
    cores: int
    clock: float


CHIPS = {
    "v5e": Chip("v5litepod-4", "v5e:2x2", 1, 1.5e9),
    "v5p": Chip("v5p-8", "v5p:2x2x1", 2, 1.75e9),
    "v6e": Chip("v6e-4", "v6e:2x2", 1, 1.75e9),
}

# (rows, slots of a row, page size): 32 sequences of 8 KV heads.
DECODE = ((256, 4096, 64), (256, 4096, 16), (256, 32768, 64), (256, 512, 64))
# (query heads a KV head, tokens of the past, page size): a chunk of 512 tokens of 4 prompts.
PREFILL = ((1, 4096, 64), (4, 4096, 64))
# (rows, scores of a row, how many): pages for Quest and slots for KCache, 8 sequences of 32 heads.
SELECT = ((256, 1024, 64), (256, 32768, 128))
# (fetched rows, rows of the store, unused): 128 values of 32 heads of one sequence.
FETCH = ((4096, 1 << 20, 1),)


@dataclasses.dataclass(frozen=True)
class Config:
    """Model the TPU kernels from their compiled instructions."""

    out: pathlib.Path = pathlib.Path("runs/tpu_schedule")
    """Folder for schedule.json."""
    chips: tuple[str, ...] = tuple(CHIPS)
    """Chips to model, by name; all known ones unless given."""


# -- bundles ---------------------------------------------------------------------------------------
#
# The text that libtpu writes for every compiled operation. It does not contain stalls (a wait for a
# copy, a full copy queue).

# Size of the unit in which bundles count the bytes of a copy.
GRANULE = 32
# Bundles after a branch that always execute.
_DELAY_SLOTS = 4

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ *(?:[A-Z]{2})? *: *>* *\{", re.MULTILINE)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (\([^)]*\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(\w+).*?/\*size_in_granules=\*/(\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a compiled kernel, or the whole of one.

    Attributes:
      bundles: number of bundles of one round, without inner loops. Branches count as if everything
        between were executed.
      copies: bytes of the copies that one round starts, by direction ("hbm_to_vmem"), without inner
        loops.
      waits: number of waits for copies in one round, without inner loops.
      rounds: number of rounds, if known to the compiler.
      loops: inner loops, in the order of the program.
    """

    bundles: int
    copies: tuple[tuple[str, int], ...]
    waits: int
    rounds: int | None
    loops: tuple["Loop", ...]

    @property
    def nested(self) -> tuple["Loop", ...]:
        """The loop and all loops inside, in the order of the program."""
        return (self, *(found for loop in self.loops for found in loop.nested))

    def total(self) -> int:
        """Returns the bundles of all rounds of this loop and its inner loops.

        A loop with an unknown number of rounds counts once.
        """
        return (self.rounds or 1) * (self.bundles + sum(loop.total() for loop in self.loops))


def read_bundles(folder: pathlib.Path) -> dict[str, Loop]:
    """Returns the program's operations with bundles in a folder, by name."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = re.sub(r"^\d+-(.*)-\d+-(schedule-analysis_)?final_bundles\.txt$", r"\1", path.name)
        if "schedule-analysis" not in path.name and not name.startswith("<"):
            found[name] = parse(path.read_text())
    return found


def parse(text: str) -> Loop:
    """Returns the loops of the bundles of one operation."""
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    ends = [*starts[1:], len(text)]
    bundles = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    first = {}
    for index, bundle in enumerate(bundles):
        for region in _START.findall(bundle):
            first.setdefault(region, index)
    spans = []
    for index, bundle in enumerate(bundles):
        for _, region in _BRANCH.findall(bundle):
            if first.get(region, index + 1) <= index:
                spans.append((first[region], min(index + _DELAY_SLOTS + 1, len(bundles))))
    return _loop(bundles, 0, len(bundles), sorted(spans, key=lambda span: (span[0], -span[1])), 1)


def _loop(bundles, start, end, spans, rounds) -> Loop:
    """Returns the loop of the bundles from `start` to `end`."""
    inner, mine, place = [], [], start
    while spans:
        span, spans = spans[0], spans[1:]
        inside = [other for other in spans if other[1] <= span[1]]
        spans = [other for other in spans if other[1] > span[1]]
        mine += bundles[place : span[0]]
        place = span[1]
        inner.append(_loop(bundles, span[0], span[1], inside, None))
    mine += bundles[place:end]
    if rounds is None:
        known = [int(limit) for bundle in mine for limit in _EXIT.findall(bundle)]
        rounds = known[-1] if known else None
    copies = [copy for bundle in mine for copy in _COPY.findall(bundle)]
    return Loop(
        bundles=len(mine),
        copies=tuple((direction, int(size) * GRANULE) for direction, size in copies),
        waits=sum(bundle.count("dma.done.wait") for bundle in mine),
        rounds=rounds,
        loops=tuple(inner),
    )


# -- programs --------------------------------------------------------------------------------------

# Llama-3.1-8B: 8 KV heads, each with 4 query heads, of 128 numbers.
GROUP, DIM = 4, 128


def program_of(operation: str, implementation: str, shape: tuple[int, int, int]):
    """Returns the function to compile, and the shapes and dtypes of its arguments.

    Args:
      operation: decode, prefill, select or fetch.
      implementation: mosaic_tpu or xla.
      shape: three numbers, see `DECODE`, `PREFILL`, `SELECT` and `FETCH`.
    """
    rows, width, part = shape
    if operation == "select":
        select = functools.partial(select_largest, count=part, implementation=implementation)
        return select, [((rows, width), jnp.float32)]
    if operation == "fetch":
        fetch = functools.partial(fetch_rows, implementation=implementation)
        return fetch, [((width, DIM), jnp.bfloat16), ((rows,), jnp.int32)]
    if operation == "prefill":
        return prompt_of(rows, width, part, implementation)
    pool = ((rows * width // part, part, DIM), jnp.bfloat16)
    attend = functools.partial(decode_attention, scale=DIM**-0.5, implementation=implementation)
    table = ((rows, width // part), jnp.int32)
    return attend, [((rows, GROUP, DIM), jnp.bfloat16), pool, pool, table, ((rows,), jnp.int32)]


def prompt_of(group: int, past: int, page_size: int, choice: str):
    """The same for a chunk of 4 prompts: 512 tokens after a past of whole pages."""
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


def compile_program(
    topology: str, operation: str, implementation: str, shape: tuple[int, int, int]
) -> None:
    """Compiles a program for an absent TPU; libtpu writes the bundles."""
    jax.config.update("jax_enable_compilation_cache", False)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    function, shapes = program_of(operation, implementation, shape)
    arguments = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]
    jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def compiled(chip: Chip, operation: str, implementation: str, shape) -> dict[str, Loop]:
    """Returns the loops of every operation of a compiled program, by name.

    Compilation runs in a separate process: libtpu reads its options from the environment when it is
    loaded, and writes everything that the process compiles into one folder.

    Raises:
      DmsJaxError: it could not be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": chip.kind,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=final_bundles",
        }
        call = f"compile_program{(chip.topology, operation, implementation, tuple(shape))}"
        done = subprocess.run(
            [sys.executable, "-c", f"from {_MODULE} import compile_program; {call}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise dms_jax.DmsJaxError(f"{call}: {done.stderr[-2000:]}")
        return read_bundles(pathlib.Path(folder))


# -- the model -------------------------------------------------------------------------------------


def kernel_of(found: dict[str, Loop], name: str) -> Loop:
    """Returns the loops of the kernel of this name."""
    return next(loop for key, loop in found.items() if key.startswith(name))


def taken(copying: float, computing: float, latency: float, buffers: int) -> float:
    """Returns the time of a block or tile in a ring of buffers, in the unit of the arguments."""
    return max(copying, computing, (copying + computing + latency) / buffers)


def decode_parts(kernel: Loop, slots: int, page_size: int) -> dict[str, int]:
    """Finds the loops of the decode kernel: bundles of a row and of a block, and its copies."""
    row = kernel.loops[0]
    # The first of these starts the copies before the first row, all buffers but one; in the second
    # a block is computed.
    first, block = (loop for loop in row.loops if loop.waits and loop.loops)
    assert first.rounds is not None
    # A loop starts the copies of a whole block in runs of pages; where one run is all, it is part
    # of the block.
    runs = next((loop for loop in block.loops if loop.copies and loop.rounds), None)
    rounds, starting, source = 1, 0, block
    if runs is not None:
        assert runs.rounds is not None
        rounds, starting, source = runs.rounds, runs.rounds * runs.bundles, runs
    copies = [size for way, size in source.copies if way == "hbm_to_vmem"] * rounds
    block_slots = len(copies) // 2 * page_size
    return {
        "buffers": first.rounds + 1,
        "row_bundles": row.bundles,
        "block_bundles": block.bundles + starting,
        "starting_bundles": starting,
        "copies_a_block": len(copies),
        "bytes_a_copy": copies[0],
        "bytes_a_block": sum(copies),
        "slots_a_block": block_slots,
        "blocks_a_row": -(-slots // block_slots),
    }


def decode_share(parts: dict[str, int], slots: int, chip: Chip, bandwidth: float) -> dict[str, Any]:
    """Returns the modelled share of the bandwidth for each latency."""
    own = bandwidth / chip.cores
    bundles = parts["block_bundles"] + parts["row_bundles"] / parts["blocks_a_row"]
    live = parts["bytes_a_block"] * slots / (parts["slots_a_block"] * parts["blocks_a_row"])
    copying, computing = live / own, bundles / chip.clock
    share = {
        f"share_at_{latency * 1e6:g}_us": round(
            copying / taken(copying, computing, latency, parts["buffers"]), 3
        )
        for latency in LATENCIES
    }
    return {"copy_cycles": round(copying * chip.clock), "cycles": round(bundles), **share}


def decode_records(name: str, chip: Chip) -> list[dict[str, Any]]:
    """Models the decode kernel on a chip."""
    records = []
    for shape in DECODE:
        rows, slots, page_size = shape
        found = compiled(chip, "decode", "mosaic_tpu", shape)
        parts = decode_parts(kernel_of(found, "decode_attention"), slots, page_size)
        share = decode_share(parts, slots, chip, DEVICES[name].bandwidth)
        sizes = {"rows": rows, "slots": slots, "page_size": page_size}
        records.append({"chip": name, "operation": "decode", **sizes, **parts, **share})
    return records


def prefill_records(name: str, chip: Chip) -> list[dict[str, Any]]:
    """Models the prefill kernel on a chip: a tile of keys that no query masks."""
    records = []
    for shape in PREFILL:
        group, past, page_size = shape
        kernel = kernel_of(compiled(chip, "prefill", "mosaic_tpu", shape), "prefill")
        # The loops with waits run over tiles that all queries see completely, and over the others.
        whole, masked = (loop for loop in kernel.loops[0].loops if loop.waits)
        moved = 2 * TILE * DIM * 2  # keys and values of 16 bits
        copying = moved * chip.cores / DEVICES[name].bandwidth * chip.clock
        record = {"chip": name, "operation": "prefill", "group": group, "past": past}
        record |= {"page_size": page_size, "buffers": BUFFERS, "bytes_a_tile": moved}
        record |= {"copy_cycles": round(copying), "cycles": whole.bundles}
        record["masked_cycles"] = masked.bundles
        for buffers, latency in [(BUFFERS, each) for each in LATENCIES] + [(2, LATENCIES[-1])]:
            key = f"cycles_in_{buffers}_at_{latency * 1e6:g}_us"
            record[key] = round(taken(copying, whole.bundles, latency * chip.clock, buffers))
        records.append(record)
    return records


def selection_cycles(kernel: Loop) -> int:
    """Returns the bundles of the selection kernel if every bisection takes 32 rounds."""
    (block,) = kernel.loops
    bisection, search = block.loops
    per_block = block.bundles + 32 * bisection.bundles + search.total()
    assert block.rounds is not None
    return (block.rounds - 2) * per_block  # the rounds of the pipeline include filling and draining


def other_records(name: str, chip: Chip) -> list[dict[str, Any]]:
    """Counts the bundles of selecting and fetching, by kernel and by XLA."""
    records = []
    wanted = [("select", shape, which) for shape in SELECT for which in ("mosaic_tpu", "xla")]
    wanted += [("fetch", shape, "xla") for shape in FETCH]
    for operation, shape, which in wanted:
        rows, width, _ = shape
        found = compiled(chip, operation, which, shape)
        if which == "mosaic_tpu":
            cycles = selection_cycles(kernel_of(found, "select_largest"))
        else:
            cycles = sum(loop.total() for loop in found.values())
        started = [copy for loop in found.values() for one in loop.nested for copy in one.copies]
        record = {"chip": name, "operation": operation, "implementation": which}
        record |= dict(zip(("rows", "width", "count"), shape, strict=True))
        record |= {"cycles": cycles, "us": round(cycles / chip.clock * 1e6, 1)}
        moved = rows * width * 4 if operation == "select" else rows * 256
        record["bandwidth_us"] = round(moved / DEVICES[name].bandwidth * 1e6, 1)
        if operation == "fetch":
            del record["count"]
            record["cycles_a_row"] = round(cycles / rows, 1)
            record["bytes_a_copy"] = min(size for way, size in started if way == "hbm_to_vmem")
        records.append(record)
    return records


def main(config: Config) -> None:
    """Compile, model, print, and write the report."""
    check_names("--chips", config.chips, CHIPS)
    make_folder("--out", config.out)
    report = provenance(config) | {
        "model": "from compiled bundles; nothing was measured, no TPU was at hand",
        "chips": {name: dataclasses.asdict(chip) for name, chip in CHIPS.items()},
        "records": [],
    }
    for name in config.chips:
        for kind in (decode_records, prefill_records, other_records):
            for record in kind(name, CHIPS[name]):
                print(json.dumps(record), flush=True)
                report["records"].append(record)
        write_json(config.out / "schedule.json", report)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
