"""The gain of a smaller cache for a server: decoding at the largest batch that fits.

- **batch**: decode steps at the largest batch that fits, for each context and compression ratio
  (figure 5 of the DMC paper; the DMS paper's 5 times at a ratio of 8). Rows are uneven, as in
  `decode_steps`.
- **kcache**: tokens a second of decoding after the prompt, at KCache's own shape (Llama-2-7B: a KV
  head for every query head, 15K tokens), at the largest batch that fits with the values on the
  device and with the values in host memory.

Weights are random; the model is Llama-3.1-8B's shape except for KCache.

    python -m experiments.benchmarks.throughput --out experiments/results/speed/throughput.json
"""

import dataclasses
import gc
import math
import pathlib
import sys
import time
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.checks import Range, check
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import run
from dms_jax.command_line.shapes import SHAPES
from dms_jax.model.caching import entry_bytes
from dms_jax.policies import Policy
from experiments.benchmarks import decode_steps, shapes
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.timing import about, read_rate, rounded

Part = Literal["batch", "kcache"]
PAGE = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure throughput at the largest batch that fits."""

    parts: tuple[Part, ...] = ("batch", "kcache")
    """Parts: compression ratios, KCache at its paper's shape."""
    shape: shapes.Shape = "llama-3.1-8b"
    """Model shape of the first part."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Earlier tokens of each sequence of a batch."""
    ratios: tuple[int, ...] = (1, 2, 4, 8)
    """Compression ratios; 1 is the plain cache."""
    memory: float = 0.8
    """Share of the device's memory for weights and cache; the rest is for activations."""
    most: int = 1024
    """Most sequences of a batch."""
    window: int = 128
    """Tokens that no head evicts."""
    kcache_context: int = 15_000
    """Tokens of a prompt of the KCache part."""
    kcache_tops: tuple[int, ...] = (32, 128)
    """N, values that KCache fetches per head and step."""
    kcache_tokens: int = 128
    """Tokens that each sequence of the KCache part generates."""
    repeats: int = 3
    """Timed runs; the median counts."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/throughput/throughput.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check("memory", self.memory, Annotated[float, Range(0, 1, above=True)])
        check_numbers(self, may_be_zero=("window",))
        for tokens in self.contexts if "batch" in self.parts else ():
            decode_steps.check_ratios(self.ratios, tokens, self.window)


def largest(config: Config, model: dms_jax.LanguageModel, tokens: float) -> int:
    """Sequences of that many live tokens per row that fit beside the weights."""
    shape = model.config
    rows = shape.num_layers * shape.num_kv_heads
    slots = math.ceil(tokens / PAGE + 0.5) * PAGE  # half a page is open
    sequence = rows * slots * entry_bytes(shape, model.dtype)
    fits = decode_steps.largest_batch(model, sequence, config.memory)
    return config.most if fits is None else max(1, min(fits, config.most))


def measure_batch(config: Config, add: Any) -> None:
    """Decode steps at the largest batch, for each context and ratio."""
    model = shapes.model_of(config.shape, jnp.dtype(config.dtype))
    rate = read_rate()
    for context in config.contexts:
        for ratio in config.ratios:
            settings = decode_steps.Config(
                shapes=(config.shape,),
                context=context,
                window=config.window,
                repeats=config.repeats,
                dtype=config.dtype,
                chunk=16,
                ratios=config.ratios,
            )
            ahead = settings.chunk * (settings.repeats + 3)
            batch = largest(config, model, context / ratio + ahead)
            settings = dataclasses.replace(settings, batch=batch)
            figures = decode_steps.time_paged(settings, model, ratio, rate)
            add("batch", context=context, batch=batch, **figures)
            gc.collect()


def measure_kcache(config: Config, add: Any) -> None:
    """Decoding at KCache's shape: the time between first and last tokens."""
    fields = shapes.fields_of(SHAPES["llama-2-7b"])
    if config.shape == "tiny":
        fields = shapes.SHAPES["tiny"]
    model = shapes.random_model(fields, jnp.dtype(config.dtype))
    context, new = config.kcache_context, config.kcache_tokens
    random = np.random.default_rng(0)
    whole = largest(config, model, context + new)
    policies: list[tuple[str, Policy, int]] = []
    policies.append(("values on the device", dms_jax.Vanilla(), whole))
    for top in config.kcache_tops:
        # Keys and the values of the first layers stay on the device: about half of the bytes.
        policies.append((f"N = {top}", dms_jax.KCache(top=top), int(1.85 * whole)))
    for name, policy, batch in policies:
        prompts = random.integers(0, model.config.vocab_size, (batch, context)).tolist()
        engine = dms_jax.Engine(model, policy, num_lanes=batch, max_tokens=context + new)
        stamps: list[float] = []
        engine.generate(
            prompts,
            sampling=dms_jax.Sampling(temperature=0.0, max_new_tokens=new),
            on_tokens=lambda update, stamps=stamps: stamps.append(time.perf_counter()),
        )
        # The first report holds the first tokens, the next ones a chunk of steps each; the first
        # chunk compiles.
        times = sorted(stamps)
        ends = [times[i] for i in range(batch - 1, len(times), batch)]
        chunks = np.diff(ends)
        seconds = float(np.median(chunks[1:])) if len(chunks) > 1 else float("nan")
        add(
            "kcache",
            policy=name,
            context=context,
            batch=batch,
            chunk=engine.chunk,
            chunk_seconds=chunks.tolist(),
            tokens_per_second=batch * engine.chunk / seconds,
        )
        del engine
        gc.collect()


def main(config: Config) -> None:
    """Measures the parts and writes the figures after each."""
    make_place("--out", config.out)
    results: dict[str, Any] = about(config) | dict(rows=[])

    def add(part: str, **figures: Any) -> None:
        results["rows"].append(dict(part=part, **figures))
        print(part, rounded(figures), flush=True)
        write_json(config.out, results)

    if "batch" in config.parts:
        measure_batch(config, add)
        gc.collect()
    if "kcache" in config.parts:
        measure_kcache(config, add)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
