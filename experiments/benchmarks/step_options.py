"""Times decode steps under other options of XLA's, and with XLA's scatters for the write.

The variants take turns in one process, over the same random weights and a cache at its length (the
functions of `decode_steps`); that they draw the same tokens is checked. What came of it is the
choice in `dms_jax.generation.programs`.

    python -m experiments.benchmarks.step_options
    python -m experiments.benchmarks.step_options --only ours "ours, loops unrolled in a graph" \
        --shape qwen2.5-0.5b --batch 256 --context 256 --ratios 1
"""

import contextlib
import dataclasses
import functools
import gc
import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.cache import pool
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.errors import ConfigError
from dms_jax.generation import programs
from dms_jax.generation.runner import Runner
from dms_jax.json_text import json_text
from experiments.benchmarks import decode_steps, shapes
from experiments.benchmarks.kernel_timing import environment

NO_ASYNC = {"xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"}
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
DEPENDENT = {"xla_gpu_enable_pdl": True, "xla_gpu_enable_pdl_launch": True}
# Whole loops as parts of a CUDA graph, beside what is in one by default.
LOOPS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    )
}
OURS = programs.GPU_STEP_OPTIONS
UNROLLED = LOOPS | {"xla_gpu_command_buffer_unroll_loops": True}
# XLA unrolls every loop by two, with an order between the two halves.
DOUBLE_BUFFERED = {
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
ANY_SIZE = {"xla_gpu_graph_min_graph_size": 1}
NOT_TUNED = {"xla_gpu_autotune_level": 0}
KERNEL, SCATTERS = "the kernel", "XLA's scatters"
# Name, options beside `programs.GPU_OPTIONS`, and what writes new keys and values.
VARIANTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("XLA's defaults", {}, KERNEL),
    ("concurrent", CONCURRENT, KERNEL),
    ("concurrent, no asynchronous copies", NO_ASYNC | CONCURRENT, KERNEL),
    ("ours", OURS, KERNEL),
    ("ours, double-buffered loops", OURS | DOUBLE_BUFFERED, KERNEL),
    ("ours, no graphs", OURS | NO_GRAPHS, KERNEL),
    ("ours, loops in a graph", OURS | LOOPS, KERNEL),
    ("ours, loops unrolled in a graph", OURS | UNROLLED, KERNEL),
    ("ours, dependent launches", OURS | DEPENDENT, KERNEL),
    ("ours, graphs of any size", OURS | ANY_SIZE, KERNEL),
    ("ours, products not tuned", OURS | NOT_TUNED, KERNEL),
    ("programmatic dependent launches", DEPENDENT, KERNEL),
    ("programmatic dependent launches, no asynchronous copies", NO_ASYNC | DEPENDENT, KERNEL),
    ("XLA's defaults and scatters", {}, SCATTERS),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode steps under other options."""

    shape: shapes.Shape = "llama-3.1-8b"
    """Model whose shape is timed, with random weights."""
    batch: int = 32
    """Sequences that are decoded at a time."""
    context: int = 8192
    """Tokens that each sequence has seen."""
    window: int = 128
    """Tokens that no head evicts."""
    ratios: tuple[int, ...] = (8, 1)
    """Compression ratios of the live tokens; 1 is the plain cache."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs of a turn; the median counts."""
    turns: int = 3
    """How often each variant is timed."""
    only: tuple[str, ...] = ()
    """Names of the variants that are timed; all of them if none are given."""
    dtype: str = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/decode/step_options.json")
    """JSON file for the figures."""


@contextlib.contextmanager
def using(program: programs.Program, write: str) -> Iterator[list[np.ndarray]]:
    """Steps go through a program of another compilation; yields the tokens that they drew."""
    before = programs.decode, pool.write_pages, Runner.read
    drawn: list[np.ndarray] = []

    def read(self, launched):
        steps = before[2](self, launched)
        drawn.append(np.asarray(steps.tokens))
        return steps

    programs.decode, Runner.read = program, read
    if write == SCATTERS:
        pool.write_pages = functools.partial(before[1], implementation="xla")
    try:
        yield drawn
    finally:
        programs.decode, pool.write_pages, Runner.read = before


def program_of(options: dict[str, Any]) -> programs.Program:
    """The library's step, compiled by itself with these options on a GPU."""
    step = inspect.unwrap(programs.decode)

    def decode(*args):  # another function, so that nothing compiled before serves it
        return step(*args)

    return programs.Program(
        decode,
        gpu_options=programs.GPU_OPTIONS | options,
        donate_argnums=1,
        static_argnums=(7, 9, 10),
    )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every variant at every ratio, writes the figures as they come, and returns them."""
    names = [name for name, _, _ in VARIANTS]
    if unknown := set(config.only) - set(names):
        raise ConfigError(f"--only: {sorted(unknown)[0]!r} is no variant; there are {names}")
    make_place("--out", config.out)
    steps = decode_steps.Config(
        shapes=(config.shape,),
        batch=config.batch,
        context=config.context,
        window=config.window,
        chunk=config.chunk,
        repeats=config.repeats,
    )
    model = shapes.model_of(config.shape, jnp.dtype(config.dtype))
    rate = decode_steps.read_rate()
    rows: list[dict[str, Any]] = []
    variants = [each for each in VARIANTS if not config.only or each[0] in config.only]
    report = environment() | dict(command=command(), read_rate=rate, rows=rows)
    for ratio in config.ratios:
        own: list[dict[str, Any]] = [
            dict(options=name, compiler_options=options, write=write, ratio=ratio, step_ms=[])
            for name, options, write in variants
        ]
        compiled = [program_of(options) for _, options, _ in variants]
        rows += own
        first: np.ndarray | None = None
        for _ in range(config.turns):
            for row, program in zip(own, compiled, strict=True):
                if "error" in row:
                    continue
                try:
                    with using(program, row["write"]) as drawn:
                        figures = decode_steps.time_paged(steps, model, ratio, rate)
                except (jax.errors.JaxRuntimeError, ValueError) as error:
                    row["error"] = str(error)[:500]  # options that this XLA does not know or bear
                    continue
                gc.collect()
                first = drawn[0] if first is None else first
                row["same_tokens"] = float((drawn[0] == first).mean())
                row["step_ms"].append(figures["step_ms"])
                row.setdefault("share_of_roofline", []).append(figures["share_of_roofline"])
                print(
                    f"{row['options']}, {row['write']}, 1/{ratio}: {figures['step_ms']:.3f} ms, "
                    f"{row['same_tokens']:.0%} of the tokens the same",
                    flush=True,
                )
                config.out.write_text(json_text(report, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
