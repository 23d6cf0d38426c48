"""Times whole decode steps on the device: real model shapes, random weights, a filled cache.

For each shape: the plain cache, and random eviction to a quarter and an eighth of the tokens.
Reports milliseconds a step, tokens a second, cache bytes, the largest batch that fits, and the
share of the step's roofline: weights and live keys and values read once, at the rate of a large
read on this card in the same run. The roofline counts only experts that a step of so many tokens
reads (`Experts.read_by`), and the window of sliding layers.

Live tokens are spread over the heads between the window and twice the mean, like learned eviction.
With `--model-parallel` heads, feed-forward and vocabulary are split over that many devices, and the
roofline is that of the device that reads the most. `--profile-below 1` adds the times of the
kernels of a step.

    python -m experiments.benchmarks.decode_steps --shapes llama-3.1-8b
    python -m experiments.benchmarks.decode_steps --shapes llama-3.1-8b --memory 0.8 --chunk 16 \
        --context 32768 --ratios 1 2 4 8                # figure 5 of the DMC paper
    python -m experiments.benchmarks.decode_steps --shapes llama-3.1-8b --context 4096 \
        --ratios 1 8 --model-parallel 1 2     # 95 GB: 61 of weights, 29 of cache
    python -m experiments.benchmarks.decode_steps --shapes qwen3-30b-a3b --batch 64 \
        --context 4096 --ratios 1 4 --profile-below 0.6 --out runs/decode/qwen3_30b_a3b.json
"""

import dataclasses
import gc
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.cache import Pool
from dms_jax.checks import Range, check
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import run
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.model.layer_loop import window_policy
from dms_jax.policies import Policy
from dms_jax.sharding import mesh_sizes
from experiments.benchmarks import traces
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, check_heads, meshes_of, model_of
from experiments.benchmarks.timing import about

Size = tuple[int, int]  # devices over which sequences and heads are split


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode steps."""

    shapes: tuple[Shape, ...] = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b")
    """Model shapes to time, with random weights."""
    batch: int = 32
    """Sequences decoded at a time, on each of `data_parallel`."""
    context: int = 8192
    """Earlier tokens of each sequence."""
    ratios: tuple[int, ...] = (1, 4, 8)
    """Compression ratios of the live tokens; 1 is the plain cache."""
    window: int = 128
    """Tokens that no head evicts."""
    memory: float | None = None
    """Time the largest batch whose cache and weights take this share of the devices' memory, in
    place of --batch."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs; the median counts."""
    model_parallel: tuple[int, ...] = (1,)
    """Devices over which heads, feed-forward and vocabulary are split; several values alternate."""
    data_parallel: tuple[int, ...] = (1,)
    """Devices, or groups of `model_parallel` devices, with separate sequences; likewise."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    profile_below: float = 0.0
    """Profile rows below this share of the roofline, and report their kernel times."""
    out: pathlib.Path = pathlib.Path("runs/decode/decode_steps.json")
    """JSON file for the figures."""

    def __post_init__(self):
        if self.memory is not None:
            check("memory", self.memory, Annotated[float, Range(0, 1, above=True)])
        check_numbers(self, may_be_zero=("window", "profile_below"))
        check_ratios(self.ratios, self.context, self.window)
        for shape in self.shapes:
            check_heads(shape, self.model_parallel)


def check_ratios(ratios: Sequence[int], context: int, window: int) -> None:
    """Raises ConfigError if a ratio keeps fewer tokens than the window."""
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
        # Each sum depends on the previous one, so that none can be skipped or run in parallel.
        return jax.lax.fori_loop(
            0, 16, lambda _, c: jnp.sum(x * c.astype(x.dtype), dtype=jnp.float32) * 1e-9 + 1, 1.0
        )

    return 16 * x.nbytes / median_seconds(lambda: read(x), 5)


def median_seconds(call: Callable[[], Any], repeats: int, warmup: int = 2) -> float:
    """Median wall-clock seconds of a call, including waiting for its result."""
    for _ in range(warmup):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def row_lengths(config: Config, model: dms_jax.LanguageModel, ratio: int) -> np.ndarray:
    """Draws [L, B, K] live tokens with mean context / ratio, unevenly over the heads.

    Rows of sliding layers hold their window.
    """
    sliding, window = np.array(model.config.windowed), model.config.window
    heads = (config.batch * parallel(model)[0], model.config.num_kv_heads)
    lengths = np.full((len(sliding), *heads), min(window or 0, config.context))
    rows = (model.config.num_full_layers, *heads)
    lengths[~sliding] = _growing_lengths(config, rows, ratio)
    return lengths


def _growing_lengths(config: Config, shape: tuple[int, int, int], ratio: int) -> np.ndarray:
    if ratio == 1:
        return np.full(shape, config.context)
    least, far = config.window + 1, config.context - config.window - 1
    kept = (config.context / ratio - config.window - 1) / far
    drawn = np.random.default_rng(0).uniform(0, 2 * kept, (shape[0], 1, shape[2]))
    drawn *= kept / drawn.mean()
    lengths = least + np.round(drawn * far).astype(np.int64)
    return np.broadcast_to(lengths, shape)


def filled_runner(
    config: Config, model: dms_jax.LanguageModel, policy: Any, lengths: np.ndarray, ratio: int
) -> Runner:
    """Returns a filled cache with random contents."""
    steps = (config.repeats + 3) * config.chunk
    # Each device has as many pages as the one with the longest heads.
    each = by_device(np.ceil((lengths + steps) / 64), model)
    lanes, pages = lengths.shape[1], len(each) * int(each.max())
    runner = Runner(model, policy, num_lanes=lanes, num_pages=pages, page_size=64)
    runner.reservation.lengths = lengths.copy()
    runner.reservation.reserve(np.full(lanes, steps))
    cache = runner.cache
    fill = jax.jit(
        lambda x, key: x + jax.random.normal(jax.random.key(key), x.shape, x.dtype) * 0.3,
        static_argnums=1,
        donate_argnums=0,
        out_shardings=cache.k_pages.sharding,
    )
    places = jax.tree.map(lambda x: x.sharding, cache)

    def rows_at(policy: Any, rows: Any, lengths: np.ndarray, rate: float) -> Any:
        size = policy.visible_window + 1
        slots = jnp.asarray(np.maximum(lengths[..., None] - size + np.arange(size), 0), jnp.int32)
        evicted = jax.random.uniform(jax.random.key(1), slots.shape) < rate
        return policy.rows_at(rows, slots, evicted, config.context)

    sliding = np.array(model.config.windowed)
    row_state = cache.row_state
    growing = row_state.growing if sliding.any() else row_state
    if ratio != 1:
        growing = rows_at(policy, growing, lengths[~sliding], policy.rate)
    row_state = growing
    if sliding.any():
        windowed = cache.row_state.windowed
        windowed = rows_at(window_policy(model.config), windowed, lengths[sliding], 1.0)
        row_state = dataclasses.replace(cache.row_state, growing=growing, windowed=windowed)
    filled = dataclasses.replace(
        cache,
        pool=Pool(k_pages=fill(cache.k_pages, 1), v_pages=fill(cache.v_pages, 2)),
        lengths=np.asarray(lengths, np.int32),
        seen=np.full(lanes, config.context, np.int32),
        row_state=row_state,
    )
    # Placed as a program leaves them; for another placement it would compile again.
    runner.cache = jax.device_put(filled, places)
    return runner


def parallel(model: dms_jax.LanguageModel) -> tuple[int, int]:
    """Returns the numbers of devices over which sequences and heads are split: (data, model)."""
    data, _, split = mesh_sizes(model.mesh)
    return data, split


def by_device(rows: np.ndarray, model: dms_jax.LanguageModel) -> np.ndarray:
    """Returns the sums of [L, B, K] numbers over the rows of each device."""
    data, split = parallel(model)
    groups = np.split(rows, data, axis=1)
    return np.asarray([part.sum() for group in groups for part in np.split(group, split, axis=2)])


def policy_of(context: int, window: int, ratio: int) -> Policy:
    """Random eviction that leaves context / ratio tokens; the plain cache at a ratio of 1."""
    if ratio == 1:
        return dms_jax.Vanilla()
    kept = (context / ratio - window - 1) / (context - window - 1)
    return dms_jax.RandomEviction(window=window, rate=1 - kept)


def time_paged(
    config: Config,
    model: dms_jax.LanguageModel,
    ratio: int,
    rate: float,
) -> dict[str, Any]:
    """Times decode steps through the library's own loop."""
    if config.memory is not None:
        tokens = config.context / ratio + config.chunk * (config.repeats + 3)
        config = dataclasses.replace(config, batch=fitting_batch(config.memory, model, tokens))
    lengths = row_lengths(config, model, ratio)
    policy = policy_of(config.context, config.window, ratio)
    runner = filled_runner(config, model, policy, lengths, ratio)
    data, split = parallel(model)
    seconds, live_reads, run = time_runner(config, runner)
    entry = 2 * model.config.head_dim * jnp.dtype(model.dtype).itemsize
    # A step takes as long as the device that reads the most.
    most = float(by_device(lengths, model).max() / lengths.sum())
    pages = by_device(np.ceil(lengths / 64), model)
    sequence_bytes = float(pages.max()) * 64 * entry / config.batch
    figures = roofline(model, config.batch, most * live_reads * entry, rate, seconds)
    if figures["share_of_roofline"] < config.profile_below:
        with traces.traced() as trace:
            run()
        figures["kernels"] = traces.summarise(trace.of("decode"), config.chunk)
    return figures | dict(
        ratio=ratio,
        batch=config.batch,
        data_parallel=data,
        model_parallel=split,
        tokens_per_second=runner.num_lanes / seconds,
        live_tokens=float(lengths.mean()),
        longest=int(lengths.max()),
        cache_bytes=int(pages.sum()) * 64 * entry,
        largest_batch=largest_batch(model, sequence_bytes),
    )


def time_runner(config: Config, runner: Runner) -> tuple[float, float, Callable[[], Any]]:
    """Times the steps of a filled cache.

    Returns:
      The seconds of a step, the entries that it reads, and a function that runs one more program.
    """
    # All different, because equal tokens would go to the same experts.
    lanes = runner.num_lanes
    tokens = np.arange(lanes, dtype=np.int32)
    remaining = np.full(lanes, 10**6, np.int32)
    seeds = np.zeros((lanes, 2), np.uint32)
    reads = []

    def run() -> np.ndarray:
        launched = runner.decode(
            tokens,
            remaining,
            seeds,
            Sampling(temperature=0).filter,
            num_steps=config.chunk,
            end_tokens=(),
        )
        steps = runner.collect(launched)
        tokens[:] = steps.tokens[-1]
        reads.append(steps.reads.sum(1).mean())
        return steps.tokens

    run()
    seconds = median_seconds(run, config.repeats, warmup=1) / config.chunk
    return seconds, float(np.mean(reads[1:])), run


def roofline(
    model: dms_jax.LanguageModel, batch: int, cache_bytes: float, rate: float, seconds: float
) -> dict:
    """Compares a step with reading its weights and the live cache once.

    It reads the experts of the batch's tokens, with random routes.

    All bytes are those of one device.
    """
    weights = device_bytes(model.transformer)
    if not model.config.tie_embeddings:
        weights -= device_bytes(model.transformer.embedding)  # a step reads only a few rows of it
    if (experts := model.config.experts) is not None:
        mlp = model.transformer.layers.mlp
        matrices = device_bytes((mlp.gate_up_proj, mlp.down_proj))
        weights -= round(matrices * (1 - experts.read_by(batch)))
    bound = (weights + cache_bytes) / rate
    return dict(
        step_ms=1e3 * seconds,
        roofline_ms=1e3 * bound,
        share_of_roofline=bound / seconds,
        weight_bytes_a_device=weights,
        read_cache_bytes_a_device=round(cache_bytes),
    )


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def largest_batch(model: dms_jax.LanguageModel, sequence_bytes: float) -> int | None:
    """Sequences of this length that fit with the weights in nine tenths of a device's memory."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return None
    free = 0.9 * stats["bytes_limit"] - device_bytes(model.transformer)
    return math.floor(free / sequence_bytes)


def fitting_batch(share: float, model: dms_jax.LanguageModel, tokens: float) -> int:
    """Sequences of each group of devices that fit with the weights in a share of the memory.

    Args:
      share: the share; of 4 GiB on a device that does not tell its memory.
      model: the model.
      tokens: mean live tokens of a row.
    """
    stats = jax.devices()[0].memory_stats()
    limit = share * (stats["bytes_limit"] if stats else 4 * 2**30)
    shape, (_, split) = model.config, parallel(model)
    entry = 2 * shape.head_dim * jnp.dtype(model.dtype).itemsize
    rows = shape.num_layers * shape.num_kv_heads // split
    sequence = rows * math.ceil(tokens / 64 + 0.5) * 64 * entry  # half a page is open
    return max(1, min(int((limit - device_bytes(model.transformer)) // sequence), 1024))


def main(config: Config) -> None:
    """Times everything and writes the figures."""
    make_place("--out", config.out)
    meshes = meshes_of(config.model_parallel, config.data_parallel)
    rate = read_rate()
    results: dict[str, Any] = about(config) | dict(read_rate=rate, rows=[])

    print(f"{results['device']}: a large read reaches {rate / 1e12:.2f} TB/s", flush=True)

    def add(shape: str, name: str, figures: dict) -> None:
        results["rows"].append(dict(shape=shape, name=name, **figures))
        shown = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        print(shape, name, shown, flush=True)
        write_json(config.out, results)

    for shape in config.shapes:
        dtype = jnp.dtype(config.dtype)
        models = {size: model_of(shape, dtype, mesh) for size, mesh in meshes.items()}
        for ratio in config.ratios:
            name = "plain cache" if ratio == 1 else f"live = context / {ratio}"
            for (data, split), model in models.items():
                groups = f"{data} x " if data > 1 else ""
                devices = f", {groups}{split} devices" if data * split > 1 else ""
                add(shape, name + devices, time_paged(config, model, ratio, rate))
                gc.collect()
        del models
        gc.collect()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
