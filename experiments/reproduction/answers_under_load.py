"""Measures how often an answer under load differs from the answer alone, and why.

    python -m experiments.reproduction.answers_under_load --out runs/load.json

Seeded and greedy requests of many lengths and temperatures arrive at random in an engine whose pool
is too small for its lanes, so some are preempted and recomputed. Then the same engine answers each
request alone. For each different answer it reports:

- **place**: the first token that differs;
- **logprobs**: the largest difference between log-probabilities before that place;
- **margin**: the least noise on the logits, of standard deviation 1e-7, 1e-6, ..., with which the
  request's own random numbers draw both tokens. Rounding explains a difference if the margin is of
  the size of rounding.

A defect of the scheduler would show in float64 too (`--dtype float64`), where rounding is 2^29
times smaller. In bfloat16 the logits of a step depend on its batch.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.command_line.options import check_names, load_model
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation import Engine, Sampling
from dms_jax.generation.engine import Source
from dms_jax.generation.programs import request_keys
from dms_jax.generation.requests import Request, make_request
from dms_jax.generation.sampling import sample
from dms_jax.generation.scheduler import Scheduler
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

POLICIES: dict[str, tuple[str, Policy | None, dict[str, Any]]] = {
    "Vanilla": ("stories260k", dms_jax.Vanilla(), {}),
    "DMS": ("reasoner-11m-dms", None, {}),  # the adapter's own
    "TOVA": ("stories260k", dms_jax.TOVA(budget=48, prefill="evict_past_budget"), {}),
    "Quest": ("stories260k", dms_jax.Quest(budget=48), {}),
    "SnapKV": ("stories260k", dms_jax.SnapKV(budget=48, window=16, interval=32), {}),
    "KCache": ("stories260k", dms_jax.KCache(top=16), {}),
    "float8": ("stories260k", dms_jax.Vanilla(), {"kv_dtype": "float8_e4m3"}),
}
DRAWS = 4096  # draws per margin
MARGINS = [10.0**exponent for exponent in range(-7, 1)]


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare seeded answers under load with the same requests alone."""

    policies: tuple[str, ...] = tuple(POLICIES)
    """Policies and cache types, each with a shipped model."""
    requests: int = 300
    """Requests of each policy."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of weights, cache and activations; float64 needs JAX_ENABLE_X64=1."""
    lanes: int = 48
    """Sequences decoded at a time."""
    share: float = 0.15
    """Share of the pages that full lanes need; below 1 requests are preempted."""
    most_tokens: int = 96
    """Maximum tokens of a prompt, and of an answer."""
    seed: int = 0
    """Seed of prompts, lengths, sampling and arrivals."""
    out: pathlib.Path | None = None
    """JSON file for the figures, with device, versions, date and command."""


def main(config: Config) -> dict[str, Any]:
    """Measures, prints, writes the file."""
    if config.out is not None:
        make_place("--out", config.out)
    check_names("--policies", config.policies, POLICIES)
    report: dict[str, Any] = provenance(config) | {"policies": {}}
    for name in config.policies:
        row = report["policies"][name] = measure(name, config)
        print(
            f"{name} {config.dtype}: {len(row['differ'])} of {row['requests']} answers differ, "
            f"{row['preemptions']} preemptions; {row['seconds_loaded']:.0f} s under load, "
            f"{row['seconds_alone']:.0f} s alone",
            flush=True,
        )
        for each in row["differ"]:
            print(f"  {each}", flush=True)
        if config.out is not None:
            write_json(config.out, report)
    return report


def measure(name: str, config: Config) -> dict[str, Any]:
    """Answers the requests of one policy under load and alone, and compares."""
    path, policy, options = POLICIES[name]
    model = load_model(path, None, config.dtype)
    policy = model.resolve_policy(policy)
    settings: dict[str, Any] = dict(
        num_lanes=config.lanes, max_tokens=2 * config.most_tokens, chunk=8, page_size=16, **options
    )
    engine = Engine(model, policy, **settings)
    runner = engine.runner
    pages = int(config.share * runner.reservation.allocator.pages_per_shard * runner.num_shards)
    engine = Engine(model, policy, memory=pages * runner.page_bytes, **settings)
    arrivals = np.random.default_rng(config.seed)

    start = time.perf_counter()
    with counted_preemptions() as preempted:
        loaded = answer(engine, make_all(model, config), lambda idle: int(arrivals.integers(0, 4)))
    between = time.perf_counter()
    alone = answer(engine, make_all(model, config), int)
    end = time.perf_counter()
    pairs = list(zip(loaded, alone, strict=True))
    differ = [pair for pair in pairs if pair[0].generated != pair[1].generated]
    return {
        "model": path,
        "policy": str(policy),
        "requests": len(alone),
        "tokens": sum(len(each.generated) for each in alone),
        "preemptions": len(preempted),
        "differ": [explain(model, policy, *pair) for pair in differ],
        "largest_logprob_difference": max(difference(*pair) for pair in pairs),
        "seconds_loaded": between - start,
        "seconds_alone": end - between,
    }


@contextlib.contextmanager
def counted_preemptions() -> Iterator[list[int]]:
    """Collects the lanes of preempted requests."""
    preempt, lanes = Scheduler.preempt, []

    def counted(scheduler: Scheduler) -> int:
        lanes.append(preempt(scheduler))
        return lanes[-1]

    with mock.patch.object(Scheduler, "preempt", counted):
        yield lanes


def make_all(model: LanguageModel, config: Config) -> list[Request]:
    """Requests with parts of stories as prompts, a fifth greedy, the others sampled."""
    random = np.random.default_rng(config.seed)
    stories = model.tokenizer.encode("\n".join(assets.stories("valid")[:200]))
    requests = []
    for index in range(config.requests):
        # Short prompts are admitted; their long answers outgrow the pool.
        count = int(random.integers(4, max(5, config.most_tokens // 3)))
        most = int(random.integers(config.most_tokens // 2, config.most_tokens + 1))
        start = int(random.integers(len(stories) - count))
        sampling = Sampling(
            temperature=[0, 0.6, 0.8, 1.0, 1.2][index % 5],
            top_p=[1.0, 0.95][index % 2],
            max_new_tokens=most,
            logprobs=True,
        )
        prompt = stories[start : start + count]
        requests.append(make_request(model.config, prompt, sampling, index=index, seed=index))
    return requests


def answer(
    engine: Engine, requests: list[Request], arriving: Callable[[bool], int]
) -> list[Request]:
    """Serves requests; `arriving` returns the number that arrive at a time."""
    left = iter(requests)

    def incoming(idle: bool) -> list[Request] | None:
        count = max(arriving(idle), int(idle))
        came = [each for _, each in zip(range(count), left, strict=False)]
        return came or (None if idle else [])

    engine.serve(Source([], Sampling(logprobs=True), incoming=incoming))
    return requests


def difference(loaded: Request, alone: Request) -> float:
    """The largest difference of log-probabilities before the first different token."""
    same = first_difference(loaded, alone)
    pairs = np.array([loaded.logprobs[:same], alone.logprobs[:same]])
    return float(np.abs(pairs[0] - pairs[1]).max(initial=0))


def first_difference(loaded: Request, alone: Request) -> int:
    """The number of equal tokens at the beginning of both answers."""
    pairs = zip(loaded.generated, alone.generated, strict=False)
    unequal = (place for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return next(unequal, min(len(loaded.generated), len(alone.generated)))


def explain(
    model: LanguageModel, policy: Policy, loaded: Request, alone: Request
) -> dict[str, Any]:
    """Describes the first token in which two answers differ."""
    place = first_difference(loaded, alone)
    found = {
        "request": alone.index,
        "place": place,
        "temperature": alone.sampling.temperature,
        "logprobs": difference(loaded, alone),
        "margin": None,
    }
    if place < min(len(loaded.generated), len(alone.generated)):
        tokens = np.array([alone.prompt + alone.generated[:place]], np.int32)
        lengths = np.array([len(alone.prompt)], np.int32)
        logits = model.logits(tokens, policy=policy, prompt_lengths=lengths)[:, -1]
        both = {loaded.generated[place], alone.generated[place]}
        found["margin"] = margin(logits, alone, tokens.shape[1], both)
    return found


def margin(logits: Any, request: Request, position: int, both: set[int]) -> float | None:
    """The least noise on the logits with which one request draws both tokens; None beyond 1."""
    seeds = jnp.tile(jnp.array([[request.seed, request.copy]], jnp.uint32), (DRAWS, 1))
    positions = jnp.full(DRAWS, position)
    rule = request.sampling.filter
    noise = jax.random.normal(jax.random.key(0), (DRAWS, logits.shape[1]), logits.dtype)
    draw = jax.jit(lambda logits: sample(logits, request_keys(seeds), positions, rule)[0])
    for size in MARGINS:
        if both <= set(np.asarray(draw(logits + size * noise)).tolist()):
            return size
    return None


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
