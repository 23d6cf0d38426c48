"""Times whole decode steps on the device: real model shapes, random weights, a cache at its length.

For each shape: the plain cache and eviction drawn at random to leave a quarter and an eighth of
the tokens, with uneven heads. Beside them, where asked, the same step with cuDNN attention on a
contiguous dense cache, and transformers (PyTorch) on the same card. Reports milliseconds a step,
tokens a second, cache bytes, the largest batch that fits, and the share of the step's own
roofline: weights and live keys and values read once, at the rate that a large read on this card
reaches in the same run.

    python -m experiments.benchmarks.decode_steps --help
"""

import concurrent.futures
import dataclasses
import gc
import math
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.cache import Pool
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.generation.compiling import GPU_STEP_OPTIONS, Program
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.json_text import json_text
from dms_jax.model.caching import tree_bytes
from dms_jax.model.rope import apply_rope, rope_tables
from experiments.benchmarks import traces
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, model_of


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode steps."""

    shapes: tuple[Shape, ...] = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b")
    """Models whose shapes are timed, with random weights."""
    batch: int = 32
    """Sequences that are decoded at a time."""
    context: int = 8192
    """Tokens that each sequence has seen."""
    ratios: tuple[int, ...] = (1, 4, 8)
    """Compression ratios of the live tokens; 1 is the plain cache."""
    window: int = 128
    """Tokens that no head evicts."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs; the median counts."""
    cudnn: bool = False
    """Also time the step with cuDNN attention on a contiguous dense cache."""
    transformers: bool = False
    """Also time transformers (needs PyTorch)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    profile: pathlib.Path | None = None
    """Write a profiler trace of the last program of each row here."""
    out: pathlib.Path = pathlib.Path("runs/decode/decode_steps.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("window",))
        check_ratios(self.ratios, self.context, self.window)


def check_ratios(ratios: Sequence[int], context: int, window: int) -> None:
    """Raises ConfigError if a ratio asks for fewer tokens than the window keeps."""
    least = context / max(ratios)
    if max(ratios) > 1 and least < window + 1:
        raise dms_jax.ConfigError(
            f"A ratio of {max(ratios)} leaves {least:g} of {context} tokens, and a window of "
            f"{window} keeps {window + 1}. Give a smaller ratio or window, or more tokens."
        )


def read_rate() -> float:
    """Bytes a second of a large read: sums over 4 GB, 16 in one program, median of 5."""
    size = 2**31 if jax.default_backend() != "cpu" else 2**20
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)

    @jax.jit
    def read(x):
        # Each sum needs the one before, so that none can be left out or run at the same time.
        return jax.lax.fori_loop(
            0, 16, lambda _, c: jnp.sum(x * c.astype(x.dtype), dtype=jnp.float32) * 1e-9 + 1, 1.0
        )

    return 16 * x.nbytes / median_seconds(lambda: read(x), 5)


def median_seconds(call: Callable[[], Any], repeats: int, warmup: int = 2) -> float:
    """Median wall-clock seconds of a call, its result awaited."""
    for _ in range(warmup):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def row_lengths(config: Config, model: dms_jax.LanguageModel, ratio: int) -> np.ndarray:
    """Draws [L, B, K] live tokens with mean context / ratio; heads keep between 0 and twice it."""
    shape = (model.config.num_layers, config.batch, model.config.num_kv_heads)
    if ratio == 1:
        return np.full(shape, config.context)
    far = config.context - config.window - 1
    kept = (config.context / ratio - config.window - 1) / far
    heads = np.random.default_rng(0).uniform(0, 2 * kept, (shape[0], 1, shape[2]))
    heads *= kept / heads.mean()
    lengths = config.window + 1 + np.round(heads * far)
    return np.broadcast_to(lengths, shape).astype(np.int64)


def filled_runner(
    config: Config, model: dms_jax.LanguageModel, policy: Any, lengths: np.ndarray, ratio: int
) -> Runner:
    """Returns a cache at its length, with random contents."""
    steps = (config.repeats + 3) * config.chunk
    pages = int(np.ceil((lengths + steps) / 64).sum())
    runner = Runner(model, policy, num_lanes=config.batch, num_pages=pages, page_size=64)
    runner.lengths = lengths.copy()
    runner.reserve(np.full(config.batch, steps))
    cache = runner.cache
    fill = jax.jit(
        lambda x, key: x + jax.random.normal(jax.random.key(key), x.shape, x.dtype) * 0.3,
        static_argnums=1,
        donate_argnums=0,
    )
    row_state = cache.row_state
    if ratio != 1:
        size = policy.visible_window + 1
        slots = jnp.asarray(lengths[..., None] - size + np.arange(size), jnp.int32)
        evicted = jax.random.uniform(jax.random.key(1), slots.shape) < policy.rate
        row_state = policy.rows_at(row_state, slots, evicted, config.context)
    runner.cache = dataclasses.replace(
        cache,
        pool=Pool(k_pages=fill(cache.k_pages, 1), v_pages=fill(cache.v_pages, 2)),
        lengths=jnp.asarray(lengths, jnp.int32),
        seen=jnp.full(config.batch, config.context, jnp.int32),
        row_state=row_state,
    )
    return runner


def time_paged(config: Config, model: dms_jax.LanguageModel, ratio: int, rate: float) -> dict:
    """Times decode steps through the library's own loop."""
    lengths = row_lengths(config, model, ratio)
    far = config.context - config.window - 1
    evicted = 1 - (config.context / ratio - config.window - 1) / far
    policy = (
        dms_jax.Vanilla()
        if ratio == 1
        else dms_jax.RandomEviction(window=config.window, rate=evicted)
    )
    runner = filled_runner(config, model, policy, lengths, ratio)
    seconds, live_reads = time_runner(config, runner, f"ratio{ratio}")
    entry = 2 * model.config.head_dim * jnp.dtype(model.dtype).itemsize
    figures = roofline(model, live_reads * entry, rate, seconds)
    pages = int(np.ceil(lengths / 64).sum())
    sequence_bytes = pages * 64 * entry / config.batch
    return figures | dict(
        ratio=ratio,
        tokens_per_second=config.batch / seconds,
        live_tokens=float(lengths.mean()),
        cache_bytes=pages * 64 * entry,
        largest_batch=largest_batch(model, sequence_bytes),
    )


def time_runner(config: Config, runner: Runner, profile: str = "steps") -> tuple[float, float]:
    """Returns the seconds of a step of a filled cache, and the entries that it reads."""
    tokens = np.zeros(config.batch, np.int32)
    remaining = np.full(config.batch, 10**6, np.int32)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), config.batch)))
    reads = []

    def run() -> np.ndarray:
        launched = runner.decode(
            tokens,
            remaining,
            keys,
            Sampling(temperature=0).filter,
            num_steps=config.chunk,
            end_tokens=(),
        )
        steps = runner.read(launched)
        tokens[:] = steps.tokens[-1]
        reads.append(steps.reads.sum(1).mean())
        return steps.tokens

    run()
    seconds = median_seconds(run, config.repeats, warmup=1) / config.chunk
    if config.profile is not None:
        with traces.profiled(config.profile / profile):
            run()
    return seconds, float(np.mean(reads[1:]))


def roofline(model: dms_jax.LanguageModel, cache_bytes: float, rate: float, seconds: float) -> dict:
    """Compares a step with reading every weight that it uses, and the live cache, once."""
    weights = tree_bytes(model.transformer)
    if not model.config.tie_embeddings:
        weights -= tree_bytes(model.transformer.embedding)  # a step looks up a few rows of it
    bound = (weights + cache_bytes) / rate
    return dict(step_ms=1e3 * seconds, roofline_ms=1e3 * bound, share_of_roofline=bound / seconds)


def largest_batch(model: dms_jax.LanguageModel, sequence_bytes: float) -> int | None:
    """Sequences at this length that fit beside the weights in nine tenths of the memory."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return None
    return math.floor((0.9 * stats["bytes_limit"] - tree_bytes(model.transformer)) / sequence_bytes)


def time_cudnn(config: Config, model: dms_jax.LanguageModel, rate: float) -> dict:
    """Times the same layers over a contiguous dense cache with cuDNN attention."""
    shape = model.config
    size = config.context + (config.repeats + 3) * config.chunk
    size = -(-size // 64) * 64
    # Arrays and layers of their own: nothing is sliced out of a stack before cuDNN reads it.
    layer_shape = (config.batch, size, shape.num_kv_heads, shape.head_dim)
    keys = jax.random.split(jax.random.key(1), 2 * shape.num_layers)
    fill = jax.jit(lambda key: jax.random.normal(key, layer_shape, model.dtype))
    caches = [(fill(keys[2 * i]), fill(keys[2 * i + 1])) for i in range(shape.num_layers)]

    def chunk(transformer, caches, tokens, position):
        layers = [
            jax.tree.map(lambda x, i=i: x[i], transformer.layers) for i in range(shape.num_layers)
        ]

        def step(carry, _):
            caches, tokens, position = carry
            x = transformer.embed(tokens[:, None])
            cos, sin = rope_tables(shape, position[:, None], dtype=x.dtype)
            after = []
            for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):
                q, k, v = layer.attention.project(layer.attention_norm(x))
                start = (0, position[0], 0, 0)
                k_cache = jax.lax.dynamic_update_slice(k_cache, apply_rope(k, cos, sin), start)
                v_cache = jax.lax.dynamic_update_slice(v_cache, v, start)
                out = jax.nn.dot_product_attention(
                    apply_rope(q, cos, sin),
                    k_cache,
                    v_cache,
                    key_value_seq_lengths=position + 1,
                    implementation="cudnn",
                )
                x = layer.finish(x, out)
                after.append((k_cache, v_cache))
            logits = transformer.unembed(transformer.final_norm(x)[:, 0])
            return (after, logits.argmax(-1).astype(jnp.int32), position + 1), None

        return jax.lax.scan(step, (caches, tokens, position), length=config.chunk)[0]

    run_chunk = Program(chunk, gpu_options=GPU_STEP_OPTIONS, donate_argnums=1)
    state = (
        caches,
        jnp.zeros(config.batch, jnp.int32),
        jnp.full(config.batch, config.context, jnp.int32),
    )
    del caches

    def run() -> jax.Array:
        nonlocal state
        state = run_chunk(model.transformer, *state)
        return state[1]

    seconds = median_seconds(run, config.repeats) / config.chunk
    entry = 2 * shape.head_dim * jnp.dtype(model.dtype).itemsize
    rows = shape.num_layers * config.batch * shape.num_kv_heads
    return roofline(model, rows * config.context * entry, rate, seconds)


def time_transformers(config: Config, shape: Shape) -> dict:
    """Times transformers' own decode step with a cache of the same length."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    fields = dict(SHAPES[shape])
    kind = fields.pop("model_type")
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    make_config, make_model = classes[kind]
    torch.set_default_dtype(torch.bfloat16)
    settings = make_config(**fields, max_position_embeddings=131072)
    with torch.device("cuda"), torch.no_grad():
        model = make_model(settings).eval()
        cache = transformers.DynamicCache()
        size = (config.batch, fields["num_key_value_heads"], config.context, fields["head_dim"])
        for layer in range(fields["num_hidden_layers"]):
            cache.update(torch.randn(size), torch.randn(size), layer)
        token = torch.zeros((config.batch, 1), dtype=torch.long)
        times = []
        for step in range(13):
            torch.cuda.synchronize()
            start = time.perf_counter()
            position = torch.full((1,), config.context + step, dtype=torch.long)
            out = model(token, past_key_values=cache, cache_position=position, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    seconds = float(np.median(times[3:]))
    return dict(
        step_ms=1e3 * seconds,
        tokens_per_second=config.batch / seconds,
        versions=dict(torch=torch.__version__, transformers=transformers.__version__),
    )


def main(config: Config) -> None:
    """Times everything and writes the figures."""
    make_place("--out", config.out)
    torch_rows = []
    if config.transformers:  # in a process of its own, before jax takes the memory
        spawn = multiprocessing.get_context("spawn")
        for shape in config.shapes:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                torch_rows.append((shape, pool.submit(time_transformers, config, shape).result()))
    rate = read_rate()
    results: dict[str, Any] = environment() | dict(
        read_rate=rate,
        command=command(),
        config={f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config)},
        rows=[],
    )

    print(f"{results['device']}: a large read reaches {rate / 1e12:.2f} TB/s", flush=True)

    def add(shape: str, name: str, figures: dict) -> None:
        results["rows"].append(dict(shape=shape, name=name, **figures))
        shown = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        print(shape, name, shown, flush=True)
        config.out.write_text(json_text(results, indent=1) + "\n")

    for shape in config.shapes:
        model = model_of(shape, jnp.dtype(config.dtype))
        for ratio in config.ratios:
            name = "plain cache" if ratio == 1 else f"live = context / {ratio}"
            add(shape, name, time_paged(config, model, ratio, rate))
            gc.collect()
        if config.cudnn:
            add(shape, "cuDNN, dense contiguous cache", time_cudnn(config, model, rate))
        del model
        gc.collect()
    for shape, figures in torch_rows:
        add(shape, "transformers", figures)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
