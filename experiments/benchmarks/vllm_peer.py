r"""Times requests beside vLLM: same model, prompts and lengths, one card, one call.

Every system is a process that keeps its engine and runs one load at a time, so that compared
systems alternate on the same card. vLLM runs in process, with CUDA graphs and without a prefix
cache; the best of its attention backends and numbers of sequences counts. All answers are greedy
and have the requested length. Parts:

- **plain**: 1 to 1,024 chats of 105 prompt and 300 new tokens, and first tokens of long prompts,
  with a plain cache that has room for all.
- **binding**: a cache too small for its requests, plain, float8 and DMS, with an untrained adapter
  that draws decisions to reach --ratio.
- **mixed**: requests of 512 to 4,096 tokens in too small a cache, under training-free policies.
- **adapter**: what a trained adapter costs, dms_jax alone: chats with a plain cache, with the
  adapter's low-rank updates beside the weights or merged into them, and with decisions that evict
  nothing.

vLLM's wheel and its dependencies may be unpacked in a separate folder (--vllm). Without --model
both read random weights of --shape from a directory.

    python -m experiments.benchmarks.vllm_peer --shape qwen2.5-1.5b --parts plain \
        --out experiments/results/speed/qwen2.5-1.5b.json
    python -m experiments.benchmarks.vllm_peer --shape llama-3.1-8b --parts plain mixed \
        --chats 64 --prompts 8 8192 --out experiments/results/speed/llama-3.1-8b.json
    python -m experiments.benchmarks.vllm_peer --model coder-1.5b.gguf --adapter runs/coder/model \
        --parts adapter --chats 256 --out experiments/results/speed/adapter.json
"""

import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

import dms_jax
from dms_jax.checkpoint.adapter import read_adapter
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import command, run
from dms_jax.model.caching import entry_bytes, tree_bytes
from dms_jax.policies import Policy, Vanilla
from experiments.benchmarks import shapes
from experiments.benchmarks.decode_steps import kept_share
from experiments.benchmarks.settings import check_numbers

Part = Literal["plain", "binding", "mixed", "adapter"]
Backend = Literal["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
# Upper bound of vLLM's activations and graphs beside weights and cache, bytes.
BESIDE = 8 << 30
WINDOW = 128  # of DMS
PAGE = 64
NEVER = 1e9  # alpha_offset with which DMS evicts nothing


@dataclasses.dataclass(frozen=True)
class Config:
    """Time requests beside vLLM."""

    model: pathlib.Path | None = None
    """Directory (GGUF file: parts without vLLM) of a model of --shape; by default one with random
    weights is made."""
    adapter: pathlib.Path | None = None
    """Directory of a trained DMS adapter of the model, for the part "adapter"."""
    shape: shapes.Shape = "qwen2.5-1.5b"
    """Model shape to time."""
    parts: tuple[Part, ...] = ("plain", "binding", "mixed")
    """Parts to time."""
    backends: tuple[Backend, ...] = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
    """vLLM's attention backends; the parts after "plain" run the best one of "plain"."""
    chats: tuple[int, ...] = (1, 32, 256, 1024)
    """Numbers of simultaneous chats."""
    prompts: tuple[tuple[int, int], ...] = ((64, 8192), (16, 32768))
    """Numbers and lengths of long prompts."""
    caches: tuple[float, ...] = (2e9, 4e9)
    """Bytes of the small caches."""
    binding: tuple[int, int, int] = (128, 128, 2048)
    """Requests, tokens of a prompt and tokens of an answer for the small caches."""
    ratio: float = 4.0
    """Compression ratio of DMS there."""
    mixed: tuple[int, float] = (96, 12e9)
    """Requests and bytes of cache of the mixed part."""
    runs: int = 5
    """Timed calls after the first, two if that takes longer than 4 s; the median counts."""
    vllm: pathlib.Path | None = None
    """Folder with vLLM's unpacked packages, first on the path of its process."""
    start_minutes: float = 6.0
    """Timeout for the start of a vLLM process, minutes."""
    out: pathlib.Path = pathlib.Path("runs/vllm_peer.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)
        if ("adapter" in self.parts) != (self.adapter is not None and self.model is not None):
            raise dms_jax.ConfigError("--parts adapter goes with --adapter and --model.")
        shortest = sum(self.binding[1:])
        if "binding" in self.parts and shortest <= self.ratio * (WINDOW + 1):
            raise dms_jax.ConfigError(
                f"--ratio {self.ratio:g}: DMS keeps its window of {WINDOW} tokens, more than that "
                f"share of {shortest}; give longer prompts and answers."
            )


@dataclasses.dataclass(frozen=True)
class System:
    """A library with its storage of keys and values.

    Attributes:
      project: the library.
      lanes: most sequences at a time.
      cache: bytes for keys and values.
      longest: tokens of the longest sequence.
      backend: vLLM's attention.
      kv_dtype: dtype of keys and values; None for the weights' dtype.
      policy: the policy of dms_jax.
      adapter: where the adapter's low-rank updates are; None for a model without it.
    """

    project: Literal["dms_jax", "vllm"]
    lanes: int
    cache: float
    longest: int
    backend: Backend | None = None
    kv_dtype: str | None = None
    policy: Policy = Vanilla()  # noqa: RUF009 (it is immutable)
    adapter: Literal["beside", "merged"] | None = None

    @property
    def label(self) -> str:
        """The name of its rows."""
        if self.project == "dms_jax":
            words = ["dms_jax", short(self.policy)]
            words += [f"updates {self.adapter}"] if self.adapter else []
            words += ["nothing evicted"] if getattr(self.policy, "alpha_offset", 0) == NEVER else []
        else:
            words = ["vLLM", str(self.backend), f"{self.lanes} sequences"]
        return ", ".join(words + ([self.kv_dtype] if self.kv_dtype else []))


def short(policy: Policy) -> str:
    """Returns a policy's name and budget."""
    budget = getattr(policy, "budget", None)
    return type(policy).__name__ + (f"({budget})" if budget else "")


@dataclasses.dataclass(frozen=True)
class Load:
    """Simultaneous requests.

    Attributes:
      prompts: lengths of their prompts.
      new: tokens of each answer.
    """

    prompts: tuple[int, ...]
    new: int

    def draw(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Returns prompts of random tokens, which depend on the seed."""
        random = np.random.default_rng(seed)
        return [random.integers(0, vocabulary, size).tolist() for size in self.prompts]


class Ours:
    """An engine of dms_jax."""

    def __init__(self, config: Config, system: System):
        import jax.numpy as jnp

        assert config.model is not None
        adapter = config.adapter if system.adapter else None
        merged = system.adapter == "merged"
        model = dms_jax.load(config.model, dtype=jnp.bfloat16, adapter=adapter, merge=merged)
        # Answers end only at their length.
        endless = dataclasses.replace(model.generation, eos_token_ids=())
        model = dataclasses.replace(model, generation=endless, tokenizer=None)
        if adapter is None:
            model = shapes.with_scorer(model, system.policy)
        self._model, self._system = model, system
        self._engine: dms_jax.Engine | None = None

    def start(self) -> dict[str, Any]:
        """Returns its environment."""
        from experiments.benchmarks.timing import environment

        return environment()

    def _make(self, lanes: int) -> dms_jax.Engine:
        system = self._system
        return dms_jax.Engine(
            self._model,
            system.policy,
            num_lanes=lanes,
            max_tokens=system.longest,
            memory=system.cache,
            kv_dtype=system.kv_dtype,
        )

    def call(self, prompts: list[list[int]], new: int) -> int:
        """Answers prompts; returns the tokens of all answers."""
        lanes = min(len(prompts), self._system.lanes)  # as `dms_jax.generate` has it
        if self._engine is None or lanes != self._engine.options.num_lanes:
            self._engine = None  # two caches may not fit
            gc.collect()
            self._engine = self._make(lanes)
        sampling = dms_jax.Sampling(temperature=0.0, max_new_tokens=new)
        done = self._engine.generate(prompts, sampling=sampling)
        self.ratio = statistics.mean(each.usage.compression_ratio for each in done)
        return sum(len(each.tokens) for each in done)


class Theirs:
    """An engine of vLLM."""

    def __init__(self, config: Config, system: System):
        if config.vllm is not None:
            sys.path.insert(0, str(config.vllm))
            os.environ["PYTHONPATH"] = str(config.vllm)  # for the processes that it starts
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._config, self._system = config, system

    def start(self) -> dict[str, Any]:
        """Makes the engine; returns its versions."""
        import torch  # pyright: ignore[reportMissingImports]
        import vllm  # pyright: ignore[reportMissingImports]

        system, config = self._system, self._config
        self._llm = vllm.LLM(
            model=str(config.model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=system.longest,
            max_num_seqs=system.lanes,
            kv_cache_memory_bytes=int(system.cache),
            gpu_memory_utilization=0.1,  # of the free memory at the start
            kv_cache_dtype=system.kv_dtype or "auto",
            attention_backend=system.backend,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        return dict(torch=torch.__version__, vllm=importlib.metadata.version("vllm"))

    def call(self, prompts: list[list[int]], new: int) -> int:
        """Answers prompts; returns the tokens of all answers."""
        import vllm  # pyright: ignore[reportMissingImports]

        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        asked = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        done = self._llm.generate(asked, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in done)


def serve_loads(config: Config, system: System, pipe: Connection) -> None:
    """Answers loads from a pipe, in a separate process, until it receives None."""
    log = config.out.with_suffix(f".{os.getpid()}.log")
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        engine = (Ours if system.project == "dms_jax" else Theirs)(config, system)
        pipe.send(engine.start())
        while (load := pipe.recv()) is not None:
            seconds, expected = [], len(load.prompts) * load.new
            seed = 0
            while seed <= (config.runs if not seed or seconds[0] < 4 else min(config.runs, 2)):
                prompts = load.draw(vocabulary(config), seed)
                start = time.perf_counter()
                tokens = engine.call(prompts, load.new)
                seconds.append(time.perf_counter() - start)
                if tokens != expected:
                    raise RuntimeError(f"{tokens} tokens were written, {expected} asked for")
                seed += 1
            figures: dict[str, Any] = dict(first_call=seconds[0], seconds=seconds[1:])
            if isinstance(engine, Ours):
                figures["compression_ratio"] = engine.ratio
            pipe.send(figures)
    except BaseException as error:  # after any failure of a system the others are still timed
        pipe.send(f"{type(error).__name__}: {error}"[:500])
        raise


class Worker:
    """A system in a separate process, which starts at once and is awaited later."""

    def __init__(self, config: Config, system: System):
        self.system, self._minutes = system, config.start_minutes
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve_loads, args=(config, system, other))
        self._process.start()
        other.close()
        self.about: dict[str, Any] | None = None
        self.error: str | None = None

    def _receive(self, seconds: float | None = None) -> Any:
        try:
            if self._pipe.poll(seconds):
                got = self._pipe.recv()
                if isinstance(got, str):
                    self.error = got
                    return None
                return got
            self.error = f"nothing came for {seconds} s"
        except EOFError:
            self.error = "the process has ended"
        return None

    def started(self) -> bool:
        """Waits for its engine; returns False if it failed."""
        if self.about is None and self.error is None:
            self.about = self._receive(60 * self._minutes)
        return self.error is None

    def time(self, load: Load) -> dict[str, Any]:
        """Returns the figures of a load, or its error."""
        figures = None
        if self.started():
            self._pipe.send(load)
            figures = self._receive(600)
        if figures is None:
            return dict(error=self.error)
        median = statistics.median(figures["seconds"])
        rate = len(load.prompts) * load.new / median
        return figures | dict(median=median, tokens_per_second=rate)

    def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(15)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


@contextlib.contextmanager
def workers(config: Config, systems: Sequence[System]) -> Iterator[list[Worker]]:
    """Starts processes of these systems; vLLM's all at once, after ours have taken the card.

    jax takes its share of the memory at its start, so vLLM does not see it as free.
    """
    made: list[Worker] = []
    held = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    try:
        for system in systems:
            if system.project == "dms_jax":
                share = (system.cache + weight_bytes(config) + BESIDE) / 143e9
                os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
            made.append(Worker(config, system))
        for worker in made:
            worker.started()
        yield made
    finally:
        if held is None:
            os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        else:
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = held
        for worker in made:
            worker.stop()
        gc.collect()


def save_random(folder: pathlib.Path, shape: shapes.Shape) -> None:
    """Saves a model with random weights, in a separate process."""
    import jax.numpy as jnp

    dms_jax.save(shapes.model_of(shape, jnp.bfloat16), Vanilla(), folder)


@contextlib.contextmanager
def model_directory(config: Config) -> Iterator[pathlib.Path]:
    """The model's directory; one with random weights is deleted afterwards."""
    if config.model is not None:
        yield config.model
        return
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "model"
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=save_random, args=(place, config.shape))
        process.start()
        process.join()
        if process.exitcode:
            raise dms_jax.ConfigError(f"{config.shape}: no model could be written to {folder}.")
        yield place


def weight_bytes(config: Config) -> int:
    """Returns the bytes of the weights in bfloat16; starts no backend."""
    import jax

    return tree_bytes(jax.eval_shape(lambda: shapes.model_of(config.shape, "bfloat16").transformer))


def vocabulary(config: Config) -> int:
    """Returns the number of tokens that prompts are drawn from, without special ones."""
    return max(shapes.config_of(config.shape).vocab_size - 300, 16)


class Report:
    """Rows, written after each."""

    def __init__(self, config: Config):
        self._path = config.out
        settings = {name: str(each) for name, each in vars(config).items() if name != "out"}
        self.results: dict[str, Any] = dict(
            command=command(without=("--out",)), config=settings, systems={}, rows=[]
        )

    def about(self, worker: Worker) -> None:
        """Records a system's environment."""
        name = worker.system.project
        self.results["systems"].setdefault(name, worker.about)

    def add(self, part: str, load: str, system: str, **figures: Any) -> None:
        """Records the figures of a system under a load."""
        row = dict(part=part, load=load, system=system, **figures)
        self.results["rows"].append(row)
        write_json(self._path, self.results)
        shown = {
            key: figures[key] for key in ("median", "tokens_per_second", "error") if key in figures
        }
        print(part, "|", load, "|", system, "|", shown or figures, flush=True)

    def best(self) -> tuple[Any, ...]:
        """Returns the fastest backend over the plain loads, if they were timed."""
        rates: dict[str, list[float]] = {}
        for row in self.results["rows"]:
            if row["part"] == "plain" and row.get("backend") and "median" in row:
                rates.setdefault(row["backend"], []).append(-np.log(row["median"]))
        loads = max(map(len, rates.values()), default=0)
        whole = {name: sum(each) for name, each in rates.items() if len(each) == loads}
        order = sorted(whole.items(), key=lambda each: -each[1])
        return tuple(name for name, _ in order[:1])


def time_all(
    config: Config, report: Report, part: str, systems: Sequence[System], loads: dict[str, Load]
) -> None:
    """Times loads under systems, alternating the systems for each load."""
    with workers(config, systems) as made:
        for worker in made:
            report.about(worker)
        for name, load in loads.items():
            for worker in made:
                system = worker.system
                figures = worker.time(load)
                report.add(
                    part, name, system.label, cache=system.cache, backend=system.backend, **figures
                )


CHAT, ANSWER = 105, 300  # tokens of a question of GSM8K with its template, and of an answer


def chat_loads(counts: Sequence[int]) -> dict[str, Load]:
    """Returns simultaneous chats."""
    return {f"{count:,} chats": Load((CHAT,) * count, ANSWER) for count in counts}


def prompt_loads(config: Config) -> dict[str, Load]:
    """Returns long prompts with one new token."""
    return {
        f"{count} prompts of {length:,}": Load((length,) * count, 1)
        for count, length in config.prompts
    }


def room(config: Config) -> dict[str, Any]:
    """Returns lanes and a cache with room for every load of chats or prompts.

    Raises:
      ConfigError: a prompt and its token exceed the model's positions.
    """
    assert config.model is not None
    positions = json.loads((config.model / "config.json").read_text())["max_position_embeddings"]
    tokens = [count * (CHAT + ANSWER + PAGE) for count in config.chats]
    tokens += [count * (length + PAGE) for count, length in config.prompts]
    longest = max(CHAT + ANSWER, *(length + 1 for _, length in config.prompts))
    if longest > positions:
        raise dms_jax.ConfigError(
            f"--prompts: a prompt of {longest - 1:,} and its token exceed {positions:,} positions."
        )
    model = shapes.config_of(config.shape)
    token = model.num_layers * model.num_kv_heads * entry_bytes(model, "bfloat16")
    return dict(cache=max(tokens) * token, longest=min(longest + PAGE, positions))


def plain(config: Config, report: Report) -> None:
    """Chats and long prompts, with a plain cache."""
    lanes, common = max(config.chats), room(config)
    systems = [System("dms_jax", lanes, **common)]
    for backend in config.backends:
        systems.append(System("vllm", min(lanes, 256), backend=backend, **common))
    time_all(config, report, "plain", systems, chat_loads(config.chats) | prompt_loads(config))


def drawn_dms(ratio: float, tokens: int) -> dms_jax.DMS:
    """Returns DMS with an adapter that evicts at random, to this ratio at that length."""
    kept = kept_share(tokens, WINDOW, ratio)
    return dms_jax.DMS(
        window=WINDOW,
        source="adapter",
        decisions="bernoulli",
        alpha_scale=1.0,
        alpha_offset=math.log(kept / (1 - kept)),  # an untrained adapter outputs 0
    )


def binding(config: Config, report: Report) -> None:
    """Long reasoning requests in a cache too small for them."""
    requests, prompt, new = config.binding
    load = Load((prompt,) * requests, new)
    longest = prompt + new + PAGE
    backends = report.best() or config.backends[:1]
    policy = drawn_dms(config.ratio, prompt + new)
    for cache in config.caches:
        common: dict[str, Any] = dict(lanes=requests, cache=cache, longest=longest)
        systems = [
            System("dms_jax", **common),
            System("dms_jax", policy=policy, **common),
            System("dms_jax", policy=policy, kv_dtype="float8_e4m3", **common),
        ]
        for backend in backends:
            systems.append(System("vllm", backend=backend, **common))
            systems.append(System("vllm", backend=backend, kv_dtype="fp8", **common))
        name = f"{requests} requests of {prompt} + {new:,}, {cache / 1e9:g} GB"
        time_all(config, report, "binding", systems, {name: load})


def mixed(config: Config, report: Report) -> None:
    """Prompts of mixed lengths in too small a cache, under training-free policies."""
    requests, cache = config.mixed
    random = np.random.default_rng(0)
    lengths = tuple(random.integers(512, 4097, requests).tolist())
    common: dict[str, Any] = dict(lanes=requests, cache=cache, longest=4096 + 512 + PAGE)
    policies: list[Policy] = [Vanilla(), dms_jax.StreamingLLM(budget=512)]
    policies += [dms_jax.TOVA(budget=512), dms_jax.H2O(budget=512)]
    backends = report.best() or config.backends[:1]
    name = f"{requests} requests of 512 to 4,096 + 512, {cache / 1e9:g} GB"
    loads = {name: Load(lengths, 512)}
    systems = [System("vllm", backend=each, **common) for each in backends]
    time_all(config, report, "mixed", systems, loads)
    for policy in policies:
        time_all(config, report, "mixed", [System("dms_jax", policy=policy, **common)], loads)


def adapter(config: Config, report: Report) -> None:
    """Chats with a plain cache and with a trained adapter, its costs apart."""
    assert config.adapter is not None
    model = shapes.config_of(config.shape)
    token = model.num_layers * model.num_kv_heads * entry_bytes(model, "bfloat16")
    tokens = CHAT + ANSWER + PAGE
    lanes = max(config.chats)
    common: dict[str, Any] = dict(lanes=lanes, cache=lanes * tokens * token, longest=tokens)
    trained = read_adapter(config.adapter).policy
    if not isinstance(trained, dms_jax.DMS):
        raise dms_jax.ConfigError(f"--adapter {config.adapter}: it is one of {short(trained)}.")
    keeps_all = dataclasses.replace(trained, alpha_offset=NEVER)
    systems = [
        System("dms_jax", **common),
        System("dms_jax", adapter="beside", **common),
        System("dms_jax", adapter="merged", policy=keeps_all, **common),
        System("dms_jax", adapter="merged", policy=trained, **common),
        System("dms_jax", adapter="beside", policy=trained, **common),
    ]
    time_all(config, report, "adapter", systems, chat_loads(config.chats))


def main(config: Config) -> None:
    """Times the parts and writes the figures after each."""
    make_place("--out", config.out)
    report = Report(config)
    parts = dict(plain=plain, binding=binding, mixed=mixed, adapter=adapter)
    with model_directory(config) as folder:
        for part in config.parts:
            parts[part](dataclasses.replace(config, model=folder), report)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
