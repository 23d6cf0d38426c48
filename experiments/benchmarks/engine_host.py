r"""Times what the engine itself does on the host between two chunks, without a device to wait for.

The programs of `dms_jax.generation.programs` are replaced by those of the tests of the host, which
compute nothing but what the host reads (`tests/support/fake_programs.py`); no token ends an answer.
Requests, lanes, layers and KV heads are those of a real call (`engine`), with little in each
vector, so that what is left of its time is almost the host's alone. Reported, in milliseconds,
medians over the turns of all runs:

- **to_prompts**: from the arrival of the results that a turn waits for to the launch of newcomers'
  prompts, and **to_steps**: to that of the next steps, where nobody has come. The last steps of a
  chunk run on meanwhile, if they take as long; behind those of a whole chunk the device is idle.
- **prompts_to_steps**: from the first to the last of these launches, where some have come.
- **to_first_launch**: from the call to its first program.
- **turn**: the whole call over its programs of steps, of which a chunk has several (under a
  grammar each is of one step). It holds what the host waits for, too: a step writes and reads one
  entry of each row.
- **step**: the processor time of the engine's thread over the steps of all lanes. Threads that
  compute masks, and what runs beside the benchmark, do not count.
- **functions**, with --profile: of one more call under cProfile, which itself takes time, the
  milliseconds a turn of each function with what it calls. It counts the calls of every thread as
  if they were one's: a process that runs other Python meanwhile has no such figures.

    python -m experiments.benchmarks.engine_host --out runs/engine_host.json
    python -m experiments.benchmarks.engine_host --requests 1024 --clients 256 --chunk 8
    python -m experiments.benchmarks.engine_host --requests 512 --clients 256 --regex "(.|\n)*" \
        --tokenizer path/to/qwen
"""

import contextlib
import cProfile
import dataclasses
import gc
import pathlib
import pstats
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.grammar import Grammar, make_matchers
from dms_jax.generation.programs import Packed, Program
from dms_jax.json_text import json_text
from dms_jax.model.language_model import GenerationDefaults
from experiments.benchmarks import engine
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, random_model
from tests.support.fake_programs import FAKES, faked

_NARROW = dict(vocab_size=512, hidden_size=64, intermediate_size=64, head_dim=8)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the host's part of the engine."""

    shape: Shape = "qwen2.5-0.5b"
    """Model whose layers and KV heads there are."""
    lanes: int = 256
    """Sequences that are decoded at a time."""
    requests: int = 1500
    """Prompts of one call; see `engine`."""
    clients: int | None = None
    """Clients who each send a request when they have an answer; see `engine`."""
    chunk: int = 32
    """Decode steps per compiled program."""
    runs: int = 5
    """Calls that are timed after the first, which compiles."""
    regex: str | None = None
    """Regular expression that answers must match, such as "(.|\\n)*": what grammars cost."""
    tokenizer: pathlib.Path | None = None
    """Directory with a tokenizer.json, whose vocabulary the model has then: that of the shipped
    model, 512 tokens, unless given."""
    profile: bool = False
    """Also profile a call."""
    out: pathlib.Path = pathlib.Path("runs/engine_host.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


class Marks:
    """When the results of steps arrived, and when programs were launched."""

    def __init__(self):
        self.events: list[tuple[str, float]] = []
        self.steps = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which the programs are those of the tests, and are noted."""
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
        since: dict[str, float] = {}  # of this turn: the chunk, and the first prompts
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
        self.events = []
        return found


def model_of(config: Config) -> dms_jax.LanguageModel:
    """Returns a narrow model; with a tokenizer if answers are to match a grammar."""
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


def main(config: Config) -> None:
    """Times calls and writes the figures."""
    make_place("--out", config.out)
    timed = engine.Config(
        shape=config.shape,
        lanes=config.lanes,
        requests=config.requests,
        clients=config.clients,
        chunk=config.chunk,
    )
    model, marks = model_of(config), Marks()
    sampling = engine.sampling_of(timed)
    if config.regex is not None:
        sampling = dataclasses.replace(sampling, grammar=Grammar.regex(config.regex))

    def serve(profile: cProfile.Profile | None = None) -> tuple[float, float, float, int]:
        """Serves once; returns milliseconds, and the number of programs of steps.

        The milliseconds are those of the call, those to its first launch, and its processor time
        over its steps.
        """
        requests = engine.requests_of(timed, model, 1)
        for each in requests:
            each.sampling = sampling
        make_matchers(model, requests)
        longest = timed.prompts[1] + 2 * timed.new_tokens
        served = Engine(model, num_lanes=timed.lanes, max_tokens=longest, chunk=timed.chunk)
        given: dict[str, Any] = {}
        if timed.clients is not None:
            served.warm()
            clients = engine.Clients(requests, timed.clients)
            given = dict(on_tokens=clients.told, incoming=clients.incoming)
            requests = []
        gc.collect()
        marks.steps = 0
        start, processor = time.perf_counter(), time.thread_time()
        with profile or contextlib.nullcontext():
            served.serve(Source(requests, sampling, **given))
        seconds, first = time.perf_counter() - start, marks.events[0][1] - start
        step = (time.thread_time() - processor) / marks.steps
        chunks = sum(name == "chunk" for name, _ in marks.events)
        return 1e3 * seconds, 1e3 * first, 1e3 * step, chunks

    kinds: dict[str, list[float]] = {}
    with marks.noted():
        serve()
        marks.take()
        for _ in range(config.runs):
            whole, first, step, chunks = serve()
            kinds.setdefault("turn", []).append(whole / chunks)
            kinds.setdefault("step", []).append(step)
            kinds.setdefault("to_first_launch", []).append(first)
            for kind, times in marks.take().items():
                kinds.setdefault(kind, []).extend(times)
        figures: dict[str, Any] = {
            kind: dict(median=float(np.median(times)), count=len(times))
            for kind, times in kinds.items()
            if times
        }
        if config.profile:
            profile = cProfile.Profile()
            *_, chunks = serve(profile)
            stats: dict[Any, Any] = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
            own = {
                f"{pathlib.Path(file).name}:{name}": 1e3 * cumulative / chunks
                for (file, _, name), (_, _, _, cumulative, _) in stats.items()
                if pathlib.Path(dms_jax.__file__).parent in pathlib.Path(file).parents
            }
            figures["functions"] = dict(sorted(own.items(), key=lambda each: -each[1])[:40])
    results = environment() | dict(
        command=command(),
        config={f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)},
        milliseconds=figures,
    )
    config.out.write_text(json_text(results, indent=1) + "\n")
    print(json_text(figures, indent=1))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
