r"""Times the engine in whole calls: many sampled prompts of mixed lengths.

Real model shapes, random weights, random prompts. Answer lengths vary (log-normal), so that lanes
are refilled one by one. The first call compiles; `runs` are whole calls after it. With `--profile`
one more short call runs under jax's profiler, and the device time of every program is reported
(`traces`). With --clients requests arrive one by one, as at a server, and programs are compiled
before timing.

    python -m experiments.benchmarks.engine --shape qwen2.5-1.5b --lanes 256 --requests 256 \
        --prompts 105 105 --new-tokens 300 --temperature 0 --profile
"""

import collections
import dataclasses
import gc
import pathlib
import sys
import time
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import Request, Update, make_requests
from experiments.benchmarks import traces
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, meshes_of, random_model


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the engine."""

    shape: Shape = "qwen2.5-0.5b"
    """Model shape to time, with random weights."""
    lanes: int = 256
    """Sequences decoded at a time."""
    requests: int = 1500
    """Prompts of one call."""
    clients: int | None = None
    """Clients that each send the next request after an answer; by default all requests come at
    once.
    """
    prompts: tuple[int, int] = (20, 190)
    """Tokens of the shortest and the longest prompt; uniform between them."""
    new_tokens: int = 275
    """Mean tokens of an answer; the longest has twice as many."""
    chunk: int = 32
    """Decode steps between two looks at the requests."""
    temperature: float = 0.7
    """Sampling temperature; top-p is 0.95."""
    runs: int = 2
    """Timed calls after the first, which compiles."""
    profile: bool = False
    """Also profile a short call: two chunks of steps, and an eighth of the lanes refilled."""
    data_parallel: int = 1
    """Devices over which the lanes are split, each with all weights."""
    model_parallel: int = 1
    """Devices over which heads, feed-forward and vocabulary are split."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/engine.json")
    """JSON file for the figures."""

    def __post_init__(self):
        dms_jax.Sampling(temperature=self.temperature)
        check_numbers(self, may_be_zero=("temperature",))
        if self.prompts[0] > self.prompts[1]:
            raise dms_jax.ConfigError(f"prompts {self.prompts}: the shortest comes first.")


class Clients:
    """Clients with one request each in an engine at a time.

    Args:
      requests: all requests, numbered in order.
      count: number of clients.
    """

    def __init__(self, requests: list[Request], count: int):
        self._coming, self._count = collections.deque(requests), count
        self._asked: set[int] = set()

    def incoming(self, wait: bool) -> list[Request] | None:
        """Returns the next requests; see `dms_jax.generation.engine.Incoming`."""
        del wait  # they never arrive later than an answer
        free = min(self._count - len(self._asked), len(self._coming))
        came = [self._coming.popleft() for _ in range(free)]
        self._asked.update(each.index for each in came)
        return came if self._asked else None

    def told(self, update: Update) -> None:
        """Records an ended answer."""
        if update.finished:
            self._asked.remove(update.index)


def sampling_of(config: Config) -> dms_jax.Sampling:
    """Returns the sampling."""
    return dms_jax.Sampling(
        temperature=config.temperature,
        top_p=0.95,
        max_new_tokens=2 * config.new_tokens,
    )


def requests_of(config: Config, model: dms_jax.LanguageModel, seed: int) -> list[Request]:
    """Draws prompts and answer lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(config.prompts[0], config.prompts[1] + 1, config.requests)
    prompts = [random.integers(0, model.config.vocab_size, size).tolist() for size in lengths]
    requests = make_requests(model.config, prompts, sampling_of(config))
    new = random.lognormal(np.log(config.new_tokens) - 0.1, 0.45, config.requests)
    for request, count in zip(requests, new, strict=True):
        request.max_new_tokens = int(np.clip(count, 1, 2 * config.new_tokens))
        request.max_length = len(request.prompt) + request.max_new_tokens
    return requests


def serve(config: Config, model: dms_jax.LanguageModel, requests: list[Request]) -> dict[str, Any]:
    """Serves requests with a new engine, all at once or by clients; returns the figures."""
    longest = config.prompts[1] + 2 * config.new_tokens
    engine = Engine(model, num_lanes=config.lanes, max_tokens=longest, chunk=config.chunk)
    source = Source(requests, sampling_of(config))
    if config.clients is not None:
        engine.warm()
        clients = Clients(requests, config.clients)
        told, incoming = clients.told, clients.incoming
        source = Source([], sampling_of(config), on_tokens=told, incoming=incoming)
    gc.collect()
    start = time.perf_counter()
    engine.serve(source)
    seconds = time.perf_counter() - start
    new = sum(len(each.generated) for each in requests)
    return dict(
        seconds=seconds,
        requests=len(requests),
        prompt_tokens=sum(len(each.prompt) for each in requests),
        new_tokens=new,
        tokens_per_second=new / seconds,
    )


def time_calls(config: Config) -> dict[str, Any]:
    """Returns the figures of the first call, of the runs after it, and of the profile."""
    ((_, mesh),) = meshes_of((config.model_parallel,), (config.data_parallel,)).items()
    model = random_model(SHAPES[config.shape], jnp.dtype(config.dtype), mesh)

    def call(requests: list[Request]) -> dict[str, Any]:
        gc.collect()  # two caches may not fit
        figures = serve(config, model, requests)
        print(figures, flush=True)
        return figures

    def short(seed: int, chunks: int) -> list[Request]:
        some = requests_of(config, model, seed)[: config.lanes + max(1, config.lanes // 8)]
        for request in some:
            request.max_new_tokens = min(request.max_new_tokens, chunks * config.chunk)
        return some

    results: dict[str, Any] = dict(first_call=call(short(0, chunks=1)))
    results["runs"] = [call(requests_of(config, model, seed)) for seed in range(1, config.runs + 1)]
    if config.profile:
        with traces.traced() as trace:
            figures = call(short(config.runs + 1, chunks=2))
        results["profile"] = figures | dict(calls=dict(trace.calls), programs=trace.programs())
    return results


def main(config: Config) -> None:
    """Times calls, and writes the figures."""
    make_place("--out", config.out)
    write_json(config.out, provenance(config) | time_calls(config))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
