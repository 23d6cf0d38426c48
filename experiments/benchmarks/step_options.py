"""Times decode steps with other XLA options, other loop turns, and XLA's scatters.

The variants alternate in one process, over the same random weights and a filled cache (the
functions of `decode_steps`), and must draw the same tokens. The winner is the choice in
`dms_jax.generation.programs`.

    python -m experiments.benchmarks.step_options
    python -m experiments.benchmarks.step_options --only ours "ours, loops unrolled in a graph" \
        --shape qwen2.5-0.5b --batch 256 --context 256 --ratios 1
"""

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.cache import pool
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import run
from dms_jax.compilation import SWITCH
from dms_jax.generation import programs
from dms_jax.generation.runner import Runner
from experiments.benchmarks import decode_steps, shapes
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.timing import about

OURS = programs.GPU_STEP_OPTIONS
NO_ASYNC = {"xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"}
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
DEPENDENT = {"xla_gpu_enable_pdl": True, "xla_gpu_enable_pdl_launch": True}
# Whole loops as parts of a CUDA graph, in addition to the default contents.
UNROLLED = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_command_buffer_unroll_loops": True,
}
KERNEL, SCATTERS = "the kernel", "XLA's scatters"


class Variant(NamedTuple):
    """Options beside `programs.GPU_OPTIONS`, layers per turn, and the write of keys and values."""

    name: str
    options: dict[str, Any]
    write: str = KERNEL
    block: int = programs.ON_GPU_STEP["block"]


VARIANTS: tuple[Variant, ...] = (
    Variant("XLA's defaults", {}),
    Variant("concurrent", CONCURRENT),
    Variant("concurrent, no asynchronous copies", NO_ASYNC | CONCURRENT),
    Variant("dependent launches", DEPENDENT),
    Variant("dependent launches, no asynchronous copies", NO_ASYNC | DEPENDENT),
    Variant("XLA's defaults and scatters", {}, SCATTERS),
    Variant("ours", OURS),
    *(Variant(f"ours, {block} layers a turn", OURS, block=block) for block in (1, 4, 8, 64)),
    Variant("ours, loops unrolled in a graph", OURS | UNROLLED),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode steps under other options."""

    shape: shapes.Shape = "llama-3.1-8b"
    """Model shape to time, with random weights."""
    batch: int = 32
    """Sequences decoded at a time."""
    context: int = 8192
    """Earlier tokens of each sequence."""
    window: int = 128
    """Tokens that no head evicts."""
    ratios: tuple[int, ...] = (8, 1)
    """Compression ratios of the live tokens; 1 is the plain cache."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs of a turn; the median counts."""
    turns: int = 3
    """Timings of each variant."""
    only: tuple[str, ...] = ()
    """Names of variants to time; all unless given."""
    dtype: str = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/decode/step_options.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("window",))


@contextlib.contextmanager
def using(program: programs.Program, write: str) -> Iterator[list[np.ndarray]]:
    """Runs steps through another compiled program; yields the drawn tokens."""
    drawn: list[np.ndarray] = []
    gather = Runner.collect

    def collect(self, program):
        steps = gather(self, program)
        drawn.append(np.asarray(steps.tokens))
        return steps

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(programs, "decode", program))
        stack.enter_context(mock.patch.object(Runner, "collect", collect))
        for name in ("write_pages", "rotate_and_write") if write == SCATTERS else ():
            scatters = functools.partial(getattr(pool, name), implementation="xla")
            stack.enter_context(mock.patch.object(pool, name, scatters))
        yield drawn


def program_of(variant: Variant) -> programs.Program:
    """The library's step, compiled with a variant's options."""
    step = inspect.unwrap(programs.decode)

    def decode(*args, block=1):  # a new function, so that no earlier compilation is reused
        return step(*args, block=block)

    return programs.Program(
        decode,
        gpu_options=programs.GPU_OPTIONS | variant.options,
        on_gpu=dict(block=variant.block),
        donate_argnums=1,
        static_argnums=(9, 10),
    )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every variant at every ratio, writes the figures as they come, and returns them."""
    check_names("--only", config.only, (each.name for each in VARIANTS))
    make_place("--out", config.out)
    os.environ[SWITCH] = "off"  # variants replace functions, and executables are keyed by source
    steps = decode_steps.Config(
        shapes=(config.shape,),
        batch=config.batch,
        context=config.context,
        window=config.window,
        chunk=config.chunk,
        repeats=config.repeats,
        ratios=config.ratios,
    )
    model = shapes.model_of(config.shape, jnp.dtype(config.dtype))
    rate = decode_steps.read_rate()
    rows: list[dict[str, Any]] = []
    variants = [each for each in VARIANTS if not config.only or each.name in config.only]
    report = about(config) | dict(read_rate=rate, rows=rows)
    for ratio in config.ratios:
        own: list[dict[str, Any]] = [
            dict(
                options=each.name,
                compiler_options=each.options,
                layers_a_turn=each.block,
                write=each.write,
                ratio=ratio,
                step_ms=[],
            )
            for each in variants
        ]
        compiled = [program_of(each) for each in variants]
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
                    row["error"] = str(error)[:500]  # options that this XLA does not support
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
                write_json(config.out, report)
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
