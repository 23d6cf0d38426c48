"""Seconds to read long prompts under every policy, and the kernels that they go to.

    python -m experiments.benchmarks.policy_prompts --out runs/policy_prompts
    python -m experiments.benchmarks.policy_prompts --context 16384 --batch 8 --only H2O SnapKV

Each call reads different random prompts to their first tokens, all at once, with random weights.
The policies are those of `policy_steps`: learned eviction is played by draws.
"""

import dataclasses
import functools
import gc
import pathlib
import statistics
import sys
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import command, run
from dms_jax.generation import Completion
from dms_jax.json_text import json_text
from experiments.benchmarks import traces
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.policy_steps import Racer, check, racers, tried
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of, with_scorer


@dataclasses.dataclass(frozen=True)
class Config:
    """Time whole prompts under every policy, with random weights."""

    shape: Shape = "qwen2.5-0.5b"
    """Model whose shape is timed, with random weights."""
    context: int = 16384
    """Tokens of each prompt."""
    batch: int = 8
    """Prompts of a call."""
    ratio: int = 4
    """Compression ratio of the budgets."""
    prefill_chunk: int = 512
    """Tokens of one prompt per compiled program."""
    only: tuple[str, ...] = ()
    """Labels to time; all unless given."""
    repeats: int = 3
    """Timed calls; the median counts."""
    profile: bool = False
    """Also profile a call, on a GPU. A profiler has room for a million kernels: give few tokens."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/policy_prompts")
    """Folder for the figures, prompts.json."""

    def __post_init__(self):
        check_numbers(self)


def time_prompts(config: Config, model: dms_jax.LanguageModel, racer: Racer) -> dict[str, Any]:
    """Returns the seconds of calls that read a batch of prompts, and what one of them launches."""
    engine = dms_jax.Engine(
        with_scorer(model, racer.policy),
        racer.policy,
        num_lanes=config.batch,
        max_tokens=config.context + 1,
        prefill_chunk=config.prefill_chunk,
        kv_dtype=racer.kv_dtype,
    )
    random = np.random.default_rng(0)
    sampling = dms_jax.Sampling(temperature=0.0, max_new_tokens=1)

    def call() -> tuple[float, list[Completion]]:
        shape = config.batch, config.context
        prompts = random.integers(0, model.config.vocab_size, shape).tolist()
        start = time.perf_counter()
        answers = engine.generate(prompts, sampling=sampling)
        return time.perf_counter() - start, answers

    first, answers = call()
    seconds = [call()[0] for _ in range(config.repeats)]
    figures: dict[str, Any] = dict(
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        first_call=first,
        tokens_per_second=config.batch * config.context / statistics.median(seconds),
        peak_cache_bytes=max(each.usage.peak_cache_bytes for each in answers),
        policy=racer.policy.to_dict(),
        kv_dtype=racer.kv_dtype,
    )
    if config.profile and jax.default_backend() == "gpu":
        with traces.traced() as trace:
            call()
        figures["programs"] = trace.programs()
    return figures


def main(config: Config) -> list[dict[str, Any]]:
    """Times every policy; rows are written as they come.

    Raises:
      ConfigError: a shape, length, ratio or label is not to be had.
    """
    check(config.shape, config.context, (config.ratio,), config.only)
    make_folder("--out", config.out)
    model = model_of(config.shape, jnp.dtype(config.dtype))
    rows: list[dict[str, Any]] = []
    results = environment() | dict(
        command=command(without=("--out",)),
        config={name: each for name, each in vars(config).items() if name != "out"},
        rows=rows,
    )
    for racer in racers(config.context, config.ratio):
        if config.only and racer.label not in config.only:
            continue
        figures, lost = tried(functools.partial(time_prompts, config, model, racer))
        told = figures.get("failed") or (
            f"{figures['seconds']:.3f} s, {figures['tokens_per_second']:,.0f} tokens/s, "
            f"{figures['peak_cache_bytes'] / 1e9:.2f} GB"
        )
        gc.collect()
        rows.append(dict(label=racer.label, ratio=config.ratio, **figures))
        print(f"{racer.label}: {told}", flush=True)
        (config.out / "prompts.json").write_text(json_text(results, indent=1) + "\n")
        if lost:
            print("The device gave up. Start again with --only for the rows that are left.")
            break
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
