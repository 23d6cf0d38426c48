"""Times the first tokens of agents that send their growing prompt again at every turn.

Several sessions run at a time. At every turn each sends all that it has sent and been answered so
far and some more tokens (a tool's result), and is answered. An engine that keeps prefixes reads
what is new, one that keeps none reads all. For each policy: the median and the longest time to a
session's first token by turn, with and without prefixes, the share of the prompts' tokens that were
cached, whether the answers are the same, and the bytes that the prefixes hold at the end; these
beside Vanilla's are how many more sessions the same memory keeps. Real model shapes, random
weights, random tokens; RandomEviction stands for DMS at the same ratio, and keeps as much.

    python -m experiments.benchmarks.agent_sessions
    python -m experiments.benchmarks.agent_sessions --memory-gb 4 --prefix-gb 8
    python -m experiments.benchmarks.agent_sessions --layers 2 --dtype float32 --sessions 2 \
        --turns 3     # without a GPU
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
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, random_model

POLICIES = {
    "Vanilla": dms_jax.Vanilla(),
    "RandomEviction": dms_jax.RandomEviction(window=512, rate=0.75),
    "SnapKV": dms_jax.SnapKV(budget=1024),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the first tokens of agents whose prompts grow, with and without cached prefixes."""

    shape: Shape = "qwen2.5-1.5b"
    """Model whose shape is timed, with random weights."""
    layers: int | None = None
    """Layers of the model; the shape's own if none are given."""
    sessions: int = 16
    """Sessions, which take each turn together."""
    turns: int = 30
    """Turns of a session."""
    first: int = 1024
    """Tokens of the first prompt, half of which all sessions share."""
    more: int = 384
    """Tokens that come with every further turn."""
    answer: int = 128
    """Tokens of every answer."""
    policies: tuple[Literal["Vanilla", "RandomEviction", "SnapKV"], ...] = (
        "Vanilla",
        "RandomEviction",
    )
    """Cache policies that are timed, by name."""
    memory_gb: float | None = None
    """Gigabytes of the page pool; what the sessions can need unless given."""
    prefix_gb: float = 16.0
    """Gigabytes of host memory for prefixes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/agent_sessions.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


def run_sessions(
    config: Config, model: dms_jax.LanguageModel, name: str, prefix_cache: float | None
) -> dict[str, Any]:
    """Returns the figures of all turns, and the answers."""
    length = config.first + config.turns * (config.more + config.answer)
    engine = Engine(
        model,
        POLICIES[name],
        num_lanes=config.sessions,
        max_tokens=length,
        memory=None if config.memory_gb is None else config.memory_gb * 1e9,
        prefix_cache=prefix_cache,
    )
    engine.warm()  # as a server is: requests come while it runs
    sampling = Sampling(temperature=0, max_new_tokens=config.answer)
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(0, model.config.vocab_size, count).tolist()

    shared = tokens(config.first // 2)
    prompts = [shared + tokens(config.first - len(shared)) for _ in range(config.sessions)]
    turns, answers = [], []
    for _ in range(config.turns):
        begun: dict[int, float] = {}
        start = time.perf_counter()

        def note(update: Update, begun=begun, start=start) -> None:
            begun.setdefault(update.index, time.perf_counter() - start)

        requests = make_requests(model.config, prompts, sampling)
        come = iter([requests])
        engine.serve(
            Source([], sampling, incoming=lambda _, come=come: next(come, None), on_tokens=note)
        )
        cached = sum(each.usage.cached_tokens for each in requests if each.usage)
        turns.append(
            dict(
                prompt=len(prompts[0]),
                median_seconds=float(np.median(list(begun.values()))),
                longest_seconds=max(begun.values()),
                cached=cached / sum(map(len, prompts)),
            )
        )
        answers.append([each.generated for each in requests])
        prompts = [each.prompt + each.generated + tokens(config.more) for each in requests]
    held = dataclasses.asdict(engine.runner.prefixes.counts)
    return dict(turns=turns, prefixes=held, answers=answers)


def time_policy(config: Config, model: dms_jax.LanguageModel, name: str) -> dict[str, Any]:
    """Returns the figures of one policy."""
    anew = run_sessions(config, model, name, None)
    gc.collect()
    kept = run_sessions(config, model, name, config.prefix_gb * 1e9)
    equal = [
        sum(a == b for a, b in zip(*turn, strict=True)) / config.sessions
        for turn in zip(anew.pop("answers"), kept.pop("answers"), strict=True)
    ]
    ratios = [
        a["median_seconds"] / b["median_seconds"]
        for a, b in zip(anew["turns"], kept["turns"], strict=True)
    ]
    return dict(policy=name, anew=anew, kept=kept, equal_answers=equal, times_faster=ratios)


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
        last = figures["kept"]["turns"][-1]
        print(
            f"{name}: first tokens {figures['times_faster'][-1]:.1f} times as fast at the last "
            f"turn, {last['median_seconds']:.3f} s for {last['prompt']:,} tokens, "
            f"{last['cached']:.0%} cached; prefixes hold "
            f"{figures['kept']['prefixes']['bytes'] / 1e9:.2f} GB of the pool and "
            f"{figures['kept']['prefixes']['host_bytes'] / 1e9:.2f} GB of the host",
            flush=True,
        )
        config.out.write_text(json_text(results, indent=1) + "\n")
        gc.collect()
        jax.clear_caches()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
