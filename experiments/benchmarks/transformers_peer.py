"""Times a batch of equal requests beside transformers with a static cache and `torch.compile`.

Both draw at a temperature from prompts of random tokens, with random weights of one shape. Of
transformers there are two forms: a loop of ours over its compiled step (mode "reduce-overhead", so
CUDA graphs; the draw is part of the step), which is the fairest, and its own `generate` with
`cache_implementation="static"`, which compiles by itself. PyTorch runs in a process of its own,
before jax takes the memory. What does not run is reported as such.

    python -m experiments.benchmarks.transformers_peer --out runs/peer.json
"""

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import run
from dms_jax.generation import Engine, Sampling
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import command_line, environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, model_of


@dataclasses.dataclass(frozen=True)
class Config:
    """Time a batch of requests beside transformers."""

    shape: Shape = "qwen2.5-0.5b"
    """Model whose shape is timed, with random weights."""
    batch: int = 256
    """Requests, all of them at once."""
    prompt: int = 128
    """Tokens of a prompt."""
    new_tokens: int = 256
    """Tokens of an answer."""
    temperature: float = 0.7
    """Temperature that tokens are drawn at."""
    runs: int = 2
    """Timed calls after the first, which compiles; the best counts."""
    forms: tuple[Literal["loop", "generate"], ...] = ("loop", "generate")
    """Forms of transformers: "loop" over its compiled step, "generate" as users call it."""
    most_seconds: float = 55
    """Seconds after which a form of transformers is given up."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/peer.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


def timed(config: Config, call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the seconds of the first call, and of the best of those after it."""
    seconds = []
    for _ in range(1 + config.runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:])
    return dict(
        first_call=seconds[0],
        seconds=seconds[1:],
        tokens_per_second=config.batch * config.new_tokens / best,
        step_ms_with_prompts=1e3 * best / config.new_tokens,
    )


def time_transformers(config: Config, form: str) -> dict[str, Any]:
    """Times one form of transformers, in a process of its own."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fields = dict(SHAPES[config.shape])
    kinds = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    kind = kinds[fields.pop("model_type")]
    settings = getattr(transformers, f"{kind}Config")(**fields, max_position_embeddings=131072)
    torch.set_default_dtype(getattr(torch, config.dtype))
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
        prompts = torch.randint(0, fields["vocab_size"], (config.batch, config.prompt))

    def generate() -> None:
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=config.new_tokens,
            min_new_tokens=config.new_tokens,
            do_sample=True,
            temperature=config.temperature,
            top_k=0,
            cache_implementation="static",
        )
        assert out.shape[1] == config.prompt + config.new_tokens
        out.cpu()

    cache = transformers.StaticCache(
        config=settings, max_cache_len=config.prompt + config.new_tokens
    )

    def draw(tokens: Any) -> Any:
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        odds = torch.softmax(out.logits[:, -1].float() / config.temperature, -1)
        return torch.multinomial(odds, 1)

    step = torch.compile(draw, mode="reduce-overhead", dynamic=False)

    def loop() -> None:
        cache.reset()
        drawn = [draw(prompts)]
        for _ in range(config.new_tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            drawn.append(step(drawn[-1]).clone())
        torch.cat(drawn, 1).cpu()

    with torch.no_grad():
        figures = timed(config, dict(loop=loop, generate=generate)[form])
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    return figures | dict(device=device, versions=versions)


def time_ours(config: Config) -> dict[str, Any]:
    """Times the same requests with an engine."""
    model = model_of(config.shape, jnp.dtype(config.dtype))
    engine = Engine(
        model,
        dms_jax.Vanilla(),
        num_lanes=config.batch,
        max_tokens=config.prompt + config.new_tokens,
    )
    sampling = Sampling(temperature=config.temperature, max_new_tokens=config.new_tokens)
    random = np.random.default_rng(0)
    size = (config.batch, config.prompt)

    def call() -> None:
        engine.generate(
            random.integers(0, model.config.vocab_size, size).tolist(), sampling=sampling
        )

    return timed(config, call)


def main(config: Config) -> dict[str, Any]:
    """Times everything, and writes the figures as they come."""
    make_place("--out", config.out)
    results: dict[str, Any] = dict(
        command=command_line(),
        config={name: each for name, each in vars(config).items() if name != "out"},
    )
    rows = results["rows"] = []

    def add(name: str, figures: dict[str, Any]) -> None:
        rows.append(dict(name=name, **figures))
        print(rows[-1], flush=True)
        config.out.write_text(json_text(results, indent=1) + "\n", encoding="utf-8")

    spawn = multiprocessing.get_context("spawn")
    for form in config.forms:
        pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)
        try:
            figures = pool.submit(time_transformers, config, form).result(config.most_seconds)
        except Exception as error:  # whatever it fails with, the others are timed
            figures = dict(error=f"{type(error).__name__}: {error}"[:500])
            for process in (pool._processes or {}).values():
                process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        add(f"transformers, {form}", figures)
    results |= environment()
    add("dms_jax", time_ours(config))
    return results


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
