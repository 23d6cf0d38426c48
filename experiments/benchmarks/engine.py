r"""Times the engine in whole calls: many sampled prompts of mixed lengths.

Real model shapes, random weights, random prompts. Answer lengths vary (log-normal), so that lanes
are refilled one by one. The first call compiles; `runs` are whole calls after it. With `--profile`
one more short call runs under jax's profiler, and the device time of every program is reported
(`traces`). With --clients requests arrive one by one, as at a server, and programs are compiled
before timing.

`--host` times the host instead, without a device to wait for. Fake programs
(`tests/support/fake_programs.py`), which compute only the values that the host reads, replace those
of `dms_jax.generation.programs`, and the model is narrow, so that a call takes almost only host
time. Reported, in milliseconds, medians over the turns of all runs:

- **to_prompts**: from the arrival of the results that a turn waits for to the launch of new
  prompts, and **to_steps**: to the launch of the next steps if there are no new prompts. Meanwhile
  the last steps of a chunk run, if they take as long; after a whole chunk the device is idle.
- **prompts_to_steps**: from the first to the last of these launches, if there are new prompts.
- **to_first_launch**: from the call to its first program.
- **turn**: the whole call divided by its programs of steps, several per chunk (with a grammar each
  has one step).
- **step**: the CPU time of the engine's thread divided by the steps of all lanes. Threads that
  compute masks, and other processes, do not count.

    python -m experiments.benchmarks.engine --shape qwen2.5-1.5b --lanes 256 --requests 256 \
        --prompts 105 105 --new-tokens 300 --temperature 0 --profile
    python -m experiments.benchmarks.engine --requests 1024 --clients 256 --chunk 8 --host
    python -m experiments.benchmarks.engine --requests 512 --clients 256 --regex "(.|\n)*" \
        --tokenizer path/to/qwen --host
"""

import collections
import contextlib
import dataclasses
import gc
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.grammar import Grammar, make_matchers
from dms_jax.generation.programs import Packed, Program
from dms_jax.generation.requests import Request, Update, make_requests
from dms_jax.json_text import json_text
from dms_jax.model.language_model import GenerationDefaults
from experiments.benchmarks import traces
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, meshes_of, random_model
from tests.support.fake_programs import FAKES, faked

_NARROW = dict(vocab_size=512, hidden_size=64, intermediate_size=64, head_dim=8)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the engine."""

    shape: Shape = "qwen2.5-0.5b"
    """Model shape to time, with random weights; with --host only its layers and KV heads."""
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
    host: bool = False
    """Time only the host, on any machine."""
    regex: str | None = None
    """Regular expression that answers must match, such as "(.|\\n)*": to time grammars on the host.
    """
    tokenizer: pathlib.Path | None = None
    """Directory with a tokenizer.json for the model of --regex; by default the shipped one of 512
    tokens.
    """
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
        if self.regex is not None and not self.host:
            raise dms_jax.ConfigError("--regex is timed with --host.")


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
        grammar=None if config.regex is None else Grammar.regex(config.regex),
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
    if config.regex is not None:
        make_matchers(model, requests)
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
    start, processor = time.perf_counter(), time.thread_time()
    engine.serve(source)
    seconds, processor = time.perf_counter() - start, time.thread_time() - processor
    new = sum(len(each.generated) for each in requests)
    return dict(
        start=start,
        seconds=seconds,
        processor_seconds=processor,
        requests=len(requests),
        prompt_tokens=sum(len(each.prompt) for each in requests),
        new_tokens=new,
        tokens_per_second=new / seconds,
    )


# -- whole calls -----------------------------------------------------------------------------------


def time_calls(config: Config) -> dict[str, Any]:
    """Returns the figures of the first call, of the runs after it, and of the profile."""
    ((_, mesh),) = meshes_of((config.model_parallel,), (config.data_parallel,)).items()
    model = random_model(SHAPES[config.shape], jnp.dtype(config.dtype), mesh)

    def call(requests: list[Request]) -> dict[str, Any]:
        gc.collect()  # two caches may not fit
        figures = serve(config, model, requests)
        del figures["start"]
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


# -- the host alone --------------------------------------------------------------------------------


class Marks:
    """The times at which results of steps arrived and programs were launched."""

    def __init__(self):
        self.events: list[tuple[str, float]] = []
        self.steps = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A context with fake programs whose launches are recorded."""
        names = {program: name for name, program in FAKES.items()}
        call, read = Program.__call__, Packed.read

        def launched(program: Program, *args: Any) -> Any:
            if program in names:
                self.events.append((names[program], time.perf_counter()))
                if names[program] in ("decode", "advance"):
                    self.steps += args[9] if names[program] == "decode" else 1
            return call(program, *args)

        def arrived(packed: Packed) -> Any:
            jax.block_until_ready(packed.words)
            self.events.append(("chunk", time.perf_counter()))
            return read(packed)

        with (
            faked(),
            mock.patch.object(Program, "__call__", launched),
            mock.patch.object(Packed, "read", arrived),
        ):
            yield

    def take(self) -> dict[str, list[float]]:
        """Returns the milliseconds of each kind since the last call; see the module."""
        found: dict[str, list[float]] = dict(to_prompts=[], to_steps=[], prompts_to_steps=[])
        since: dict[str, float] = {}  # launches of this turn: the chunk, and the first prompts
        for name, now in self.events:
            if name == "chunk" and "extend" not in since:  # else one that ran on
                since = {name: now}
            elif "chunk" in since and name == "extend" and name not in since:
                found["to_prompts"].append(1e3 * (now - since["chunk"]))
                since[name] = now
            elif "chunk" in since and name in ("decode", "advance"):
                kind, start = ("to_steps", "chunk")
                if "extend" in since:
                    kind, start = ("prompts_to_steps", "extend")
                found[kind].append(1e3 * (now - since[start]))
                since = {}
        self.events, self.steps = [], 0
        return found


def narrow_model(config: Config) -> dms_jax.LanguageModel:
    """Returns a narrow model; with a tokenizer if answers have a grammar.

    Raises:
      ConfigError: the tokenizer has no end token.
    """
    fields = SHAPES[config.shape] | _NARROW
    if config.regex is None:
        return random_model(fields, jnp.bfloat16)
    tokenizer = Tokenizer.from_directory(config.tokenizer or assets.path("stories260k"))
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise dms_jax.ConfigError(f"--tokenizer {config.tokenizer}: no tokenizer with an end token")
    fields |= {"vocab_size": -(-tokenizer.backend.get_vocab_size() // 128) * 128}
    ends = GenerationDefaults(eos_token_ids=(tokenizer.eos_token_id,))
    model = random_model(fields, jnp.bfloat16)
    return dataclasses.replace(model, tokenizer=tokenizer, generation=ends)


def time_host(config: Config) -> dict[str, Any]:
    """Returns the median milliseconds of each kind, and their count."""
    model, marks = narrow_model(config), Marks()
    kinds: dict[str, list[float]] = collections.defaultdict(list)
    with marks.noted():
        for number in range(1 + config.runs):
            figures = serve(config, model, requests_of(config, model, 1))
            if number:  # else what compiled
                chunks = sum(name == "chunk" for name, _ in marks.events)
                kinds["turn"].append(1e3 * figures["seconds"] / chunks)
                kinds["step"].append(1e3 * figures["processor_seconds"] / marks.steps)
                kinds["to_first_launch"].append(1e3 * (marks.events[0][1] - figures["start"]))
            for kind, times in marks.take().items():
                kinds[kind].extend(times if number else ())
    return {
        kind: dict(median=float(np.median(times)), count=len(times))
        for kind, times in kinds.items()
        if times
    }


def main(config: Config) -> None:
    """Times calls or the host, and writes the figures."""
    make_place("--out", config.out)
    results = {"milliseconds": time_host(config)} if config.host else time_calls(config)
    write_json(config.out, provenance(config) | results)
    if config.host:
        print(json_text(results, indent=1))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
