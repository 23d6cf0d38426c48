"""Times whole decode steps on the device: real model shapes, random weights, a filled cache.

For each shape: the plain cache, and random eviction to a quarter and an eighth of the tokens.
Reports milliseconds a step, tokens a second, cache bytes, the largest batch that fits, and the
share of the step's roofline: weights and live keys and values read once, at the rate of a large
read on this card in the same run. The roofline counts only experts that a step of so many tokens
reads (`Experts.read_by`), and the window of sliding layers.

`--heads` sets the distribution of live tokens over heads, at the same total: between empty and
twice the mean ("uneven", like learned eviction), equal ("even", like a fixed budget), or a few
heads near dense and only the window in the others ("few"). With `--model-parallel` heads,
feed-forward and vocabulary are split over that many devices, and the roofline is that of the device
that reads the most. `--profile-below 1` adds the times of the kernels of a step.

    python -m experiments.benchmarks.decode_steps --shapes llama-3.1-8b --cudnn
    python -m experiments.benchmarks.decode_steps --shapes llama-3.1-8b --context 4096 \
        --ratios 1 8 --model-parallel 1 2 --turns 3     # 95 GB: 61 of weights, 29 of cache
    python -m experiments.benchmarks.decode_steps --shapes qwen3-30b-a3b --batch 64 \
        --context 4096 --ratios 1 4 --profile-below 0.6 --out runs/decode/qwen3_30b_a3b.json
    python -m experiments.benchmarks.decode_steps --picture experiments/results/speed
"""

import dataclasses
import functools
import gc
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import run
from dms_jax.generation.programs import GPU_STEP_OPTIONS, Program
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.model.caching import entry_bytes
from dms_jax.model.layer_loop import window_policy
from dms_jax.model.rope import apply_rope, rope_tables
from dms_jax.policies import Policy
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.selective import SelectiveReading
from dms_jax.sharding import mesh_sizes
from experiments.benchmarks import traces
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, check_heads, meshes_of, model_of
from experiments.benchmarks.timing import about, median_seconds, read_rate, rounded

Heads = Literal["uneven", "even", "few"]
PAGE_SIZE = 64
NEAR_DENSE = 0.95  # share of the tokens beyond the window
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
    heads: tuple[Heads, ...] = ("uneven",)
    """Distribution of live tokens over heads, at the same total."""
    window: int = 128
    """Tokens that no head evicts."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs; the median counts."""
    model_parallel: tuple[int, ...] = (1,)
    """Devices over which heads, feed-forward and vocabulary are split; several values alternate."""
    data_parallel: tuple[int, ...] = (1,)
    """Devices, or groups of `model_parallel` devices, with separate sequences; likewise."""
    turns: int = 1
    """Timings of each row; the median turn counts."""
    cudnn: bool = False
    """Also time the step with cuDNN attention on a contiguous dense cache."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    profile_below: float = 0.0
    """Profile rows below this share of the roofline, and report their kernel times."""
    picture: pathlib.Path | None = None
    """A folder with reports, decode_steps*.json: time nothing, draw them into a PNG beside
    --out."""
    out: pathlib.Path = pathlib.Path("runs/decode/decode_steps.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("window", "profile_below"))
        check_ratios(self.ratios, self.context, self.window)
        for shape in self.shapes:
            check_heads(shape, self.model_parallel)
        if self.cudnn and (self.data_parallel, self.model_parallel) != ((1,), (1,)):
            raise dms_jax.ConfigError(
                "cuDNN's step is timed on one device: leave out --cudnn, or --data-parallel and "
                "--model-parallel."
            )


def check_ratios(ratios: Sequence[int], context: int, window: int) -> None:
    """Raises ConfigError if a ratio keeps fewer tokens than the window."""
    least = context / max(ratios)
    if max(ratios) > 1 and least < window + 1:
        raise dms_jax.ConfigError(
            f"A ratio of {max(ratios)} leaves {least:g} of {context} tokens, and a window of "
            f"{window} keeps {window + 1}. Give a smaller ratio or window, or more tokens."
        )


def row_lengths(
    config: Config, model: dms_jax.LanguageModel, ratio: int, spread: Heads = "uneven"
) -> np.ndarray:
    """Draws [L, B, K] live tokens with mean context / ratio, distributed over the heads.

    Rows of sliding layers hold their window.
    """
    sliding, window = np.array(model.config.windowed), model.config.window
    heads = (config.batch * parallel(model)[0], model.config.num_kv_heads)
    lengths = np.full((len(sliding), *heads), min(window or 0, config.context))
    rows = (model.config.num_full_layers, *heads)
    lengths[~sliding] = spread_lengths(rows, config.context, config.window, ratio, spread)
    return lengths


def kept_share(context: int, window: int, ratio: float) -> float:
    """The share of the tokens beyond the window that leaves context / ratio tokens in all."""
    return (context / ratio - window - 1) / (context - window - 1)


def spread_lengths(
    shape: tuple[int, int, int], context: int, window: int, ratio: float, spread: Heads = "uneven"
) -> np.ndarray:
    """Draws [L, B, K] live tokens with mean context / ratio, equal in all sequences."""
    if ratio == 1:
        return np.full(shape, context)
    least, far = window + 1, context - window - 1
    kept = kept_share(context, window, ratio)
    drawn = np.random.default_rng(0).uniform(0, 2 * kept, (shape[0], 1, shape[2]))
    drawn *= kept / drawn.mean()
    lengths = np.minimum(least + np.round(drawn * far), context).astype(np.int64)
    total, count = int(lengths.sum()), lengths.size
    if spread == "even":
        even = np.full(count, total // count)
        even[: total % count] += 1
        lengths = even.reshape(lengths.shape)
    elif spread == "few":
        # A few heads hold nearly everything, one the remainder, and the others the window.
        dense = least + round(NEAR_DENSE * far)
        few = np.full(count, least)
        full, rest = divmod(total - few.sum(), dense - least)
        few[:full] = dense
        few[full : full + 1] += rest
        lengths = np.random.default_rng(1).permutation(few).reshape(lengths.shape)
    return np.broadcast_to(lengths, shape)


def filled_runner(
    model: dms_jax.LanguageModel,
    policy: Policy,
    lengths: np.ndarray,
    context: int,
    *,
    steps: int,
    kv_dtype: str | None = None,
    spare: float = 1.0,
) -> Runner:
    """Returns a filled cache with random contents.

    Args:
      model: the model.
      policy: its policy, whose state is filled plausibly (`state_at`).
      lengths: [L, B, K] slots in use.
      context: tokens that each sequence has seen.
      steps: steps for which pages are reserved.
      kv_dtype: type of the cache; None for the model's.
      spare: pages of the pool for each one needed.
    """
    # Each device has as many pages as the one with the longest heads.
    each = by_device(np.ceil((lengths + steps) / PAGE_SIZE), model)
    lanes, pages = lengths.shape[1], int(spare * len(each) * each.max())
    options: dict[str, Any] = dict(page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    runner = Runner(model, policy, num_lanes=lanes, num_pages=pages, **options)
    runner.reservation.lengths[:] = lengths
    runner.reservation.reserve(np.full(lanes, steps))
    cache = runner.cache
    places = jax.tree.map(lambda x: x.sharding, cache)
    sliding = np.array(model.config.windowed)
    if sliding.any():
        windowed, _ = state_at(
            window_policy(model.config), cache.row_state.windowed, None, lengths[sliding], context
        )
        rows = cache.row_state.growing
    else:
        rows = cache.row_state
    rows, page_state = state_at(policy, rows, cache.page_state, lengths[~sliding], context)
    if sliding.any():
        rows = dataclasses.replace(cache.row_state, growing=rows, windowed=windowed)

    def draw(x, seed):
        # Block by block and in place, because a pool may take more than half of the memory.
        size = min(len(x), 4096)

        def block(index, x):
            key = jax.random.fold_in(jax.random.key(seed), index)
            new = jax.random.normal(key, (size, *x.shape[1:]), jnp.bfloat16)
            return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), index * size, 0)

        return jax.lax.fori_loop(0, -(-len(x) // size), block, x)

    pool = cache.pool
    fill = jax.jit(draw, static_argnums=1, donate_argnums=0, out_shardings=pool.k_pages.sharding)
    filled = dataclasses.replace(
        cache,
        pool=dataclasses.replace(
            pool,
            k_pages=fill(pool.k_pages, 1),
            v_pages=fill(pool.v_pages, 2),
            k_scales=None if pool.k_scales is None else jnp.ones_like(pool.k_scales),
            v_scales=None if pool.v_scales is None else jnp.ones_like(pool.v_scales),
        ),
        lengths=np.asarray(lengths, np.int32),
        seen=np.full(lanes, context, np.int32),
        row_state=rows,
        page_state=page_state,
    )
    # Placed as a program leaves them; for another placement it would compile again.
    runner.cache = jax.device_put(filled, places)
    return runner


def state_at(
    policy: Policy, rows: Any, pages: Any, lengths: np.ndarray, context: int
) -> tuple[Any, Any]:
    """A plausible (row state, page state) of the policy, for the given empty ones.

    Delayed eviction computes its rows' contents at a length; if it draws or scores, the marked
    share of the window equals the evicted share before it. In any other state slots and positions
    are random numbers in their range, and page state is random.
    """
    inner = policy.over if isinstance(policy, SelectiveReading) else policy
    if isinstance(inner, DelayedEviction):
        size = inner.visible_window + 1
        slots = jnp.asarray(np.maximum(lengths[..., None] - size + np.arange(size), 0), jnp.int32)
        rate = getattr(inner, "rate", 0.0)
        if isinstance(inner, dms_jax.StreamingLLM):
            rate = 1.0
        elif isinstance(inner, dms_jax.KVzap):
            rate = 1 - float(lengths.mean()) / context
        evicted = jnp.asarray(np.random.default_rng(1).random(slots.shape) < rate)
        rows = inner.rows_at(rows, slots, evicted, context)
    elif jax.tree.leaves(rows):
        rows = jax.tree.map(functools.partial(random_like, below=int(lengths.min())), rows)
    return rows, jax.tree.map(functools.partial(random_like, below=context, floats=True), pages)


@functools.partial(jax.jit, static_argnames=("below", "floats"))
def random_like(x: jax.Array, below: int, floats: bool = False) -> jax.Array:
    """Random numbers shaped like an array: integers from 0 to `below`, others normal or kept."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(2), x.shape, 0, below, x.dtype)
    return jax.random.normal(jax.random.key(3), x.shape, x.dtype) if floats else x


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
    return dms_jax.RandomEviction(window=window, rate=1 - kept_share(context, window, ratio))


def time_paged(
    config: Config,
    model: dms_jax.LanguageModel,
    ratio: int,
    rate: float,
    spread: Heads = "uneven",
) -> dict[str, Any]:
    """Times decode steps through the library's own loop."""
    lengths = row_lengths(config, model, ratio, spread)
    policy = policy_of(config.context, config.window, ratio)
    steps = (config.repeats + 3) * config.chunk
    runner = filled_runner(model, policy, lengths, config.context, steps=steps)
    data, split = parallel(model)
    seconds, live_reads, run = time_runner(runner, config.chunk, config.repeats)
    entry = entry_bytes(model.config, model.dtype)
    # A step takes as long as the device that reads the most.
    most = float(by_device(lengths, model).max() / lengths.sum())
    pages = by_device(np.ceil(lengths / PAGE_SIZE), model)
    sequence_bytes = float(pages.max()) * PAGE_SIZE * entry / config.batch
    figures = roofline(model, config.batch, most * live_reads * entry, rate, seconds)
    if figures["share_of_roofline"] < config.profile_below:
        with traces.traced() as trace:
            run()
        figures["kernels"] = traces.summarise(trace.of("decode"), config.chunk)
    return figures | dict(
        ratio=ratio,
        heads=spread,
        data_parallel=data,
        model_parallel=split,
        tokens_per_second=runner.num_lanes / seconds,
        live_tokens=float(lengths.mean()),
        longest=int(lengths.max()),
        cache_bytes=int(pages.sum()) * PAGE_SIZE * entry,
        largest_batch=largest_batch(model, sequence_bytes),
    )


def time_in_turns(
    config: Config, models: Mapping[Size, dms_jax.LanguageModel], ratio: int, rate: float
) -> dict[tuple[Size, Heads], dict[str, Any]]:
    """Returns the figures of the median turn of each model and spread, and all milliseconds.

    Each turn has a new cache, so that the memory holds one at a time.
    """
    spreads = config.heads if ratio > 1 else config.heads[:1]
    turns = {key: list[dict[str, Any]]() for key in itertools.product(models, spreads)}
    for _ in range(config.turns):
        for (size, spread), each in turns.items():
            each.append(time_paged(config, models[size], ratio, rate, spread))
            gc.collect()
    found = {}
    for key, each in turns.items():
        ordered = sorted(each, key=lambda figures: figures["step_ms"])
        times = [figures["step_ms"] for figures in each]
        found[key] = ordered[len(ordered) // 2] | dict(turns_ms=times)
    return found


def time_runner(runner: Runner, chunk: int, repeats: int) -> tuple[float, float, Callable[[], Any]]:
    """Times the steps of a filled cache.

    Returns:
      The seconds of a step, the entries that it reads, and a function that runs one more program.
    """
    # All different, because equal tokens would go to the same experts.
    lanes = runner.num_lanes
    tokens = np.arange(lanes, dtype=np.int32)
    remaining = np.full(lanes, 10**6, np.int32)
    reads = []

    def run() -> np.ndarray:
        rule = Sampling(temperature=0).filter
        launched = runner.decode(tokens, remaining, rule, num_steps=chunk, end_tokens=())
        steps = runner.collect(launched)
        tokens[:] = steps.tokens[-1]
        reads.append(steps.reads.sum(1).mean())
        return steps.tokens

    run()
    seconds = median_seconds(run, repeats, warmup=1) / chunk
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


def device_memory() -> int | None:
    """Returns the bytes that the first device has for arrays; None if it does not tell."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else None


def largest_batch(
    model: dms_jax.LanguageModel, sequence_bytes: float, share: float = 0.9
) -> int | None:
    """Sequences of so many bytes that fit with the weights in a share of a device's memory."""
    if (limit := device_memory()) is None:
        return None
    return math.floor((share * limit - device_bytes(model.transformer)) / sequence_bytes)


def time_cudnn(config: Config, model: dms_jax.LanguageModel, rate: float) -> dict:
    """Times the same layers over a contiguous dense cache with cuDNN attention."""
    shape = model.config
    size = config.context + (config.repeats + 3) * config.chunk
    size = -(-size // 64) * 64
    # A separate array per layer, so that nothing is sliced out of a stack for cuDNN.
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
            cos, sin = rope_tables(shape.rope, shape.head_dim, position[:, None], dtype=x.dtype)
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
    entry = entry_bytes(shape, model.dtype)
    rows = shape.num_layers * config.batch * shape.num_kv_heads
    return roofline(model, config.batch, rows * config.context * entry, rate, seconds)


def draw_picture(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Draws every row of a folder's reports beside its roofline.

    Raises:
      ConfigError: there is no report.
    """
    from matplotlib.figure import Figure

    reports = [json.loads(each.read_text()) for each in sorted(folder.glob("decode_steps*.json"))]
    if not reports:
        raise dms_jax.ConfigError(f"--picture {folder}: there is no decode_steps.json.")
    rows = [row for report in reports for row in report["rows"]]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(9, 1.9 * len(shapes) + 0.8), layout="constrained")
    axes = figure.subplots(len(shapes), 1, sharex=True, squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        colors = ["tab:blue" if "ratio" in row else "tab:gray" for row in own]
        steps = axis.barh(
            range(len(own)), [row["step_ms"] for row in own], color=colors, alpha=0.45
        )
        bounds = [row.get("roofline_ms", math.nan) for row in own]
        axis.barh(range(len(own)), bounds, height=0.35, color=colors)
        texts = [f"{row['step_ms']:.2f} ms" for row in own]
        for place, row in enumerate(own):
            if "roofline_ms" in row:
                texts[place] += f", {row['share_of_roofline']:.0%} of its roofline"
        axis.bar_label(steps, texts, padding=3, fontsize=8)
        axis.set_yticks(range(len(own)), [row["name"] for row in own], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(shape, fontsize=9, loc="left")
    axes[-1, 0].set(xscale="log", xlim=(0.5, 250))
    axes[-1, 0].set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes[-1, 0].set_xlabel(
        "ms a step, logarithmic; the narrow bar is the time to read weights and live cache once"
    )
    told = reports[0]["config"]
    figure.suptitle(
        f"Decode steps on {reports[0]['device']}: batch {told['batch']}, context "
        f"{told['context']}, {told['dtype']}, jax {reports[0]['versions']['jax']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def main(config: Config) -> None:
    """Times everything and writes the figures, or draws earlier ones."""
    make_place("--out", config.out)
    if config.picture is not None:
        draw_picture(config.picture, config.out.with_suffix(".png"))
        return
    meshes = meshes_of(config.model_parallel, config.data_parallel)
    rate = read_rate()
    results: dict[str, Any] = about(config) | dict(read_rate=rate, rows=[])

    print(f"{results['device']}: a large read reaches {rate / 1e12:.2f} TB/s", flush=True)

    def add(shape: str, name: str, figures: dict) -> None:
        results["rows"].append(dict(shape=shape, name=name, **figures))
        print(shape, name, rounded(figures), flush=True)
        write_json(config.out, results)

    for shape in config.shapes:
        dtype = jnp.dtype(config.dtype)
        models = {size: model_of(shape, dtype, mesh) for size, mesh in meshes.items()}
        for ratio in config.ratios:
            name = "plain cache" if ratio == 1 else f"live = context / {ratio}"
            for ((data, split), spread), figures in time_in_turns(
                config, models, ratio, rate
            ).items():
                heads = f", {spread} heads" if ratio > 1 and len(config.heads) > 1 else ""
                groups = f"{data} x " if data > 1 else ""
                devices = f", {groups}{split} devices" if data * split > 1 else ""
                add(shape, name + heads + devices, figures)
        if config.cudnn:
            add(shape, "cuDNN, dense contiguous cache", time_cudnn(config, models[1, 1], rate))
        del models
        gc.collect()


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
