"""Times the first token of several chains of one prompt, which is read once for all of them.

For each policy: seconds from the call until every chain has its first token, for one chain, for
several chains of one prompt, and for as many different prompts of the same length, which are read
one by one. Real model shapes, random weights, random prompts; the calls alternate, after one of
each that compiles, and the median counts.

    python -m experiments.benchmarks.shared_prompts
    python -m experiments.benchmarks.shared_prompts --layers 2 --dtype float32     # without a GPU
"""

import dataclasses
import gc
import pathlib
import sys
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.generation import Engine, Sampling, Update
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, random_model

POLICIES = {
    "Vanilla": dms_jax.Vanilla(),
    "RandomEviction": dms_jax.RandomEviction(window=128, rate=0.75),
    "SnapKV": dms_jax.SnapKV(budget=128),
    "Quest": dms_jax.Quest(budget=256),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the first tokens of chains that share their prompt."""

    shape: Shape = "llama-3.2-1b"
    """Model whose shape is timed, with random weights."""
    layers: int | None = None
    """Layers of the model; the shape's own if none are given."""
    prompt: int = 2048
    """Tokens of the prompt that all chains share."""
    chains: int = 16
    """Chains of one prompt, beside a single one."""
    policies: tuple[Literal["Vanilla", "RandomEviction", "SnapKV", "Quest"], ...] = (
        "Vanilla",
        "RandomEviction",
        "SnapKV",
    )
    """Cache policies that are timed, by name."""
    new_tokens: int = 2
    """Tokens that each chain generates; the first one counts."""
    repeats: int = 7
    """Timed calls of each kind."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/shared_prompts.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


def seconds_to_first_tokens(engine: Engine, prompts: list[list[int]], config: Config) -> float:
    """Returns the time until every prompt has its first token."""
    begun: dict[int, float] = {}

    def note(update: Update) -> None:
        begun.setdefault(update.index, time.perf_counter())

    sampling = Sampling(temperature=0.6, max_new_tokens=config.new_tokens)
    start = time.perf_counter()
    engine.generate(prompts, sampling=sampling, on_tokens=note)
    return max(begun.values()) - start


def time_policy(config: Config, model: dms_jax.LanguageModel, name: str) -> dict[str, Any]:
    """Returns the figures of one policy."""
    length = config.prompt + config.new_tokens
    engine = Engine(model, POLICIES[name], num_lanes=config.chains, max_tokens=length)
    random = np.random.default_rng(0)

    def prompts(count: int) -> list[list[int]]:
        return random.integers(0, model.config.vocab_size, (count, config.prompt)).tolist()

    calls = {
        "one chain": lambda: prompts(1),
        "chains of one prompt": lambda: prompts(1) * config.chains,
        "different prompts": lambda: prompts(config.chains),
    }
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for repeat in range(config.repeats + 1):
        for kind, make in calls.items():
            seconds = seconds_to_first_tokens(engine, make(), config)
            if repeat:  # the first call compiles
                times[kind].append(seconds)
    medians = {kind: float(np.median(seconds)) for kind, seconds in times.items()}
    one, shared, apart = medians.values()
    return dict(
        policy=name,
        seconds=medians,
        all_seconds=times,
        chains_over_one=shared / one,
        different_over_one=apart / one,
    )


def main(config: Config) -> None:
    """Times every policy and writes the figures."""
    make_place("--out", config.out)
    fields = dict(SHAPES[config.shape])
    fields["num_hidden_layers"] = config.layers or fields["num_hidden_layers"]
    model = random_model(fields, jnp.dtype(config.dtype))
    results: dict[str, Any] = environment() | dict(
        command=command(without=("--out",)),
        config={
            f.name: str(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.name != "out"
        },
        rows=[],
    )
    for name in config.policies:
        figures = time_policy(config, model, name)
        results["rows"].append(figures)
        shown = {kind: f"{1e3 * seconds:.1f} ms" for kind, seconds in figures["seconds"].items()}
        print(name, shown, f"{figures['chains_over_one']:.2f} times one chain", flush=True)
        config.out.write_text(json_text(results, indent=1) + "\n")
        gc.collect()
        jax.clear_caches()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
