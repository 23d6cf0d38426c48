"""Times the engine as users call it: many prompts of mixed lengths, sampled, in one call.

Real model shapes, random weights, random prompts. Answers have lengths of their own (log-normal),
so that lanes are refilled one by one. Reported for each policy:

- **first call**: seconds of the first call of the process, which compiles: one short answer for
  each lane, and for one in eight a second one; how many programs, and the seconds that they took.
  With the cache of compiled programs filled (a second process) these are loaded.
- **runs**: tokens per second of whole calls after it, and what they still compiled.
- **prompts**: their programs, and the places for tokens of these, all of which are computed;
  **steps**: those of all lanes, idle ones included. Neither depends on the device.
- **idle**: seconds in which the device had no chunk of steps or prompt to run, between two chunks.
- **profile**, where asked: one more short call under jax's profiler, and what of every program the
  device ran (`traces`).
- **limit**: the same work at the rates of the data sheet: the weights once per step and each key
  and value that was read over the bandwidth, and the products of prompts over the matrix rate,
  with as many sequences at a time as lanes and memory hold.
- **limit_measured**: the same at the rates that a large read and a large product of bfloat16
  (8192 x 4096 x 28672 and back, a hundred of them) reach in the same run.

    python -m experiments.benchmarks.engine --out runs/engine/qwen2.5-0.5b.json
    python -m experiments.benchmarks.engine --shape llama-3.1-8b --lanes 96 --memory 12e9 \
        --prompts 512 4096 --requests 192 --policies dense live

No request waits for a lane, so that each chunk is launched before the last one is read:

    python -m experiments.benchmarks.engine --requests 256

With --clients requests come one by one, as they come to a server, and every answer is told of as it
grows: what a server can give at most. Programs are compiled, or loaded, before time begins.

    python -m experiments.benchmarks.engine --requests 1024 --clients 256 --chunk 8
"""

import collections
import concurrent.futures
import dataclasses
import gc
import pathlib
import sys
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.devices import DEVICES
from dms_jax.generation import Engine, programs
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import Request, Update, completion_of, make_requests
from dms_jax.json_text import json_text
from dms_jax.model.caching import tree_bytes
from experiments.benchmarks import traces
from experiments.benchmarks.decode_steps import median_seconds, read_rate
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the engine."""

    shape: Shape = "qwen2.5-0.5b"
    """Model whose shape is timed, with random weights."""
    policies: tuple[Literal["dense", "live"], ...] = ("dense",)
    """The plain cache, and one that keeps `live` tokens of each row."""
    live: int = 512
    """Tokens that each row keeps."""
    lanes: int = 256
    """Sequences that are decoded at a time."""
    requests: int = 1500
    """Prompts of one call, which take turns in the lanes."""
    clients: int | None = None
    """Clients who each send a request when they have the answer to the one before; all requests are
    there from the beginning unless given."""
    prompts: tuple[int, int] = (20, 190)
    """Tokens of the shortest and the longest prompt; uniform between them."""
    new_tokens: int = 275
    """Tokens of an answer in the mean, and half of the longest."""
    memory: float | None = None
    """Bytes of the cache; what the sequences can need if none are given."""
    chunk: int = 32
    """Decode steps between two looks at the requests."""
    temperature: float = 0.7
    """Temperature that tokens are drawn at."""
    top_p: float = 0.95
    """Share of probability that tokens are drawn from."""
    runs: int = 2
    """Calls that are timed after the first, which compiles."""
    profile: bool = False
    """Also profile a short call: two chunks of steps, and an eighth of the lanes refilled."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    device: str = "h200"
    """Device whose data sheet gives the limit (`dms_jax.devices`)."""
    out: pathlib.Path = pathlib.Path("runs/engine.json")
    """JSON file for the figures."""

    def __post_init__(self):
        dms_jax.Sampling(temperature=self.temperature, top_p=self.top_p)
        check_numbers(self, may_be_zero=("temperature",))
        if self.prompts[0] > self.prompts[1]:
            raise dms_jax.ConfigError(f"prompts {self.prompts}: the shortest comes first.")
        if self.device not in DEVICES:
            known = ", ".join(DEVICES)
            raise dms_jax.ConfigError(f"device {self.device!r} is unknown; known are {known}.")


class Clients:
    """Clients who each have one request in an engine at a time.

    Args:
      requests: all of them, numbered in their order.
      count: how many clients there are.
    """

    def __init__(self, requests: list[Request], count: int):
        self._coming, self._count = collections.deque(requests), count
        self._asked: set[int] = set()

    def incoming(self, wait: bool) -> list[Request] | None:
        """Returns the next requests; see `dms_jax.generation.engine.Incoming`."""
        del wait  # they never come later than an answer
        free = min(self._count - len(self._asked), len(self._coming))
        came = [self._coming.popleft() for _ in range(free)]
        self._asked.update(each.index for each in came)
        return came if self._asked else None

    def told(self, update: Update) -> None:
        """Takes note of an answer that has ended."""
        if update.finished:
            self._asked.remove(update.index)


class Compilations:
    """Counts the programs that are compiled or loaded, and their seconds."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.seconds.setdefault(event.rsplit("/", 1)[-1], []).append(duration_secs)

    def take(self) -> dict[str, Any]:
        """Returns programs and seconds by kind since the last call."""
        kinds = {
            "trace_seconds": "jaxpr_trace_duration",
            "lower_seconds": "jaxpr_to_mlir_module_duration",
            "compile_seconds": "backend_compile_duration",
            "of_it_load_seconds": "cache_retrieval_time_sec",
        }
        taken, self.seconds = self.seconds, {}
        figures: dict[str, Any] = {
            "programs": len(taken.get("backend_compile_duration", [])),
            "loaded": len(taken.get("cache_retrieval_time_sec", [])),
        }
        return figures | {name: round(sum(taken.get(kind, [])), 3) for name, kind in kinds.items()}


class Timeline:
    """Notes when programs that read the cache were launched, and when the device ended each."""

    def __init__(self):
        self.launched: list[float] = []
        self.ended: list[concurrent.futures.Future[float]] = []
        self.counts = collections.Counter[str]()
        self._watching = concurrent.futures.ThreadPoolExecutor(64)
        call = programs.Program.__call__

        def noted(program: programs.Program, *args: Any) -> Any:
            launched = time.perf_counter()
            results = call(program, *args)
            if program is programs.extend:
                places = args[5].size if args[10] is None else args[10]
                self.counts.update(prompt_programs=1, padded_prompt_tokens=places)
            elif program is programs.decode:
                self.counts.update(lane_steps=args[9] * len(args[5]))
            if program in (programs.decode, programs.extend):
                # Of results only the cache, which comes first, is donated to the next program.
                self.ended.append(self._watching.submit(_ready, results[1:]))
                self.launched.append(launched)
            return results

        setattr(programs.Program, "__call__", noted)  # noqa: B010

    def take(self) -> dict[str, Any]:
        """Returns programs, and the seconds between them in which none had been launched."""
        ended = [each.result() for each in self.ended]
        between = zip(self.launched[1:], ended, strict=False)
        idle = [max(0.0, launched - before) for launched, before in between]
        counts, self.counts = dict(self.counts), collections.Counter()
        self.launched, self.ended = [], []
        return dict(launches=len(ended), idle_seconds=sum(idle)) | counts


def _ready(results: Any) -> float:
    """Waits for results and returns the time."""
    jax.block_until_ready(results)
    return time.perf_counter()


def requests_of(config: Config, model: dms_jax.LanguageModel, seed: int) -> list[Request]:
    """Draws prompts, each with an answer of its own length."""
    random = np.random.default_rng(seed)
    lengths = random.integers(config.prompts[0], config.prompts[1] + 1, config.requests)
    prompts = [random.integers(0, model.config.vocab_size, size).tolist() for size in lengths]
    requests = make_requests(model.config, prompts, sampling_of(config))
    new = random.lognormal(np.log(config.new_tokens) - 0.1, 0.45, config.requests)
    for request, count in zip(requests, new, strict=True):
        request.max_new_tokens = int(np.clip(count, 1, 2 * config.new_tokens))
        request.max_length = len(request.prompt) + request.max_new_tokens
    return requests


def sampling_of(config: Config) -> dms_jax.Sampling:
    """Returns how tokens are drawn."""
    return dms_jax.Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=2 * config.new_tokens,
    )


class Rates(NamedTuple):
    """What limits a run: bytes and operations a second."""

    bandwidth: float
    peak: float


def measured_rates() -> Rates:
    """Returns the rates of a large read and of a large product of bfloat16, long enough to warm."""
    on_cpu = jax.default_backend() == "cpu"
    rows, inner, columns, times = (64, 64, 64, 2) if on_cpu else (8192, 4096, 28672, 100)
    x = jax.random.normal(jax.random.key(0), (rows, inner), jnp.bfloat16)
    up, down = (
        jax.random.normal(jax.random.key(1), shape, jnp.bfloat16) * shape[0] ** -0.5
        for shape in ((inner, columns), (columns, inner))
    )

    def multiply(x, up, down):
        return jax.lax.fori_loop(0, times // 2, lambda _, x: jnp.dot(jnp.dot(x, up), down), x)

    program = programs.Program(multiply)
    seconds = median_seconds(lambda: program(x, up, down), 3, warmup=1)
    return Rates(read_rate(), 2 * times * rows * inner * columns / seconds)


def limit_of(
    config: Config,
    model: dms_jax.LanguageModel,
    usages: list[Usage],
    page_size: int,
    rates: Rates,
) -> dict[str, float]:
    """Returns the seconds of the same work at these rates; see the module."""
    shape = model.config
    weights = tree_bytes(model.transformer)
    if not shape.tie_embeddings:
        weights -= tree_bytes(model.transformer.embedding)
    rows = shape.num_layers * shape.num_kv_heads
    entry = 2 * shape.head_dim * jnp.dtype(model.dtype).itemsize
    at_once = float(config.lanes)
    if config.memory is not None:
        held = [use.live_tokens + page_size / 2 for use in usages]
        at_once = min(at_once, config.memory / (rows * entry * float(np.mean(held))))
    new = sum(use.new_tokens for use in usages)
    prompt = sum(use.prompt_tokens for use in usages)
    parameters = (tree_bytes(model.transformer) - tree_bytes(model.transformer.embedding)) / (
        jnp.dtype(model.dtype).itemsize
    )
    steps = new / at_once * weights / rates.bandwidth
    reads = sum(use.kv_reads for use in usages) * rows * entry / rates.bandwidth
    prefill = 2 * parameters * prompt / rates.peak
    return dict(
        sequences_at_once=at_once,
        weights_seconds=steps,
        cache_seconds=reads,
        prefill_seconds=prefill,
        seconds=steps + reads + prefill,
        tokens_per_second=new / (steps + reads + prefill),
    )


def measure(
    config: Config,
    model: dms_jax.LanguageModel,
    name: str,
    counts: Compilations,
    timeline: Timeline,
    rates: Rates,
) -> dict[str, Any]:
    """Times the first call and whole calls of one policy."""
    policy = dms_jax.Vanilla() if name == "dense" else dms_jax.StreamingLLM(budget=config.live)
    sampling = sampling_of(config)
    counts.take()

    def serve(requests: list[Request]) -> tuple[dict[str, Any], list[Usage], Engine]:
        start = time.perf_counter()
        engine = Engine(
            model,
            policy,
            num_lanes=config.lanes,
            max_tokens=config.prompts[1] + 2 * config.new_tokens,
            memory=config.memory,
            chunk=config.chunk,
        )
        if config.clients is None:
            engine.serve(Source(requests, sampling))
        else:
            engine.warm()
            start = time.perf_counter()
            clients = Clients(requests, config.clients)
            engine.serve(Source([], sampling, on_tokens=clients.told, incoming=clients.incoming))
        seconds = time.perf_counter() - start
        done = [completion_of(each, logprobs=False) for each in requests]
        new = sum(len(each.tokens) for each in done)
        figures = dict(
            seconds=seconds,
            requests=len(done),
            prompt_tokens=sum(each.usage.prompt_tokens for each in done),
            new_tokens=new,
            prefilled_tokens=sum(each.usage.prefilled_tokens for each in done),
            tokens_per_second=new / seconds,
        )
        figures |= timeline.take() | counts.take()
        return figures, [each.usage for each in done], engine

    def short(seed: int, chunks: int) -> list[Request]:
        some = requests_of(config, model, seed)[: config.lanes + max(1, config.lanes // 8)]
        for request in some:
            request.max_new_tokens = min(request.max_new_tokens, chunks * config.chunk)
        return some

    figures, _, engine = serve(short(0, chunks=1))
    print(name, "first call", figures, flush=True)
    results: dict[str, Any] = dict(policy=str(policy), first_call=figures, runs=[])
    for seed in range(1, config.runs + 1):
        del engine
        gc.collect()  # two caches may not fit
        figures, usages, engine = serve(requests_of(config, model, seed))
        device = DEVICES[config.device]
        for name_of, given in (
            ("limit", Rates(device.bandwidth, device.peak)),
            ("limit_measured", rates),
        ):
            limit = limit_of(config, model, usages, engine.options.page_size, given)
            figures |= {
                name_of: limit,
                f"share_of_{name_of}": limit["seconds"] / figures["seconds"],
            }
        results["runs"].append(figures)
        print(name, figures, flush=True)
    if config.profile:
        del engine
        gc.collect()
        with traces.traced() as trace:
            figures, _, engine = serve(short(config.runs + 1, chunks=2))
        results["profile"] = figures | dict(calls=dict(trace.calls), kernels=trace.programs())
        print(name, "profile", figures, flush=True)
    return results


def main(config: Config) -> None:
    """Measures every policy and writes the figures as they come."""
    make_place("--out", config.out)
    counts, timeline, start = Compilations(), Timeline(), time.perf_counter()
    model = model_of(config.shape, jnp.dtype(config.dtype))
    jax.block_until_ready(jax.tree.leaves(model.transformer))
    model_seconds, rates = time.perf_counter() - start, measured_rates()
    print("measured", rates, flush=True)
    results: dict[str, Any] = environment() | dict(
        command=command(),
        config={f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)},
        compiled_in=jax.config.jax_compilation_cache_dir,
        model_seconds=model_seconds,
        measured_rates=rates._asdict(),
        policies=[],
    )
    for name in config.policies:
        results["policies"].append(measure(config, model, name, counts, timeline, rates))
        config.out.write_text(json_text(results, indent=1) + "\n")
        gc.collect()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
