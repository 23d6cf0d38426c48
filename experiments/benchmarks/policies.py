"""Times every policy: decode steps at a given length, or whole prompts to their first tokens.

Weights, keys and values are random; a policy's state is filled plausibly for that length.
`RandomEviction` with uneven heads stands for learned eviction: the same kernels, the same ring, a
known ratio. Policies that cut rows at intervals do so after the timed steps; the cut is timed
separately. Each call prefills different prompts, all at once.

    python -m experiments.benchmarks.policies --batch 24 --ratios 8 --only DMC TOVA
    python -m experiments.benchmarks.policies --what prompts --shape qwen2.5-1.5b --context 8192 \
        --batch 16 --ratios 4 --only Vanilla --profile
"""

import dataclasses
import functools
import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.candidates import FAILURES, gave_up
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation import Completion
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.model.caching import entry_bytes
from dms_jax.policies import POLICIES, Policy
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.selective import SelectiveReading
from experiments.benchmarks import traces
from experiments.benchmarks.decode_steps import median_seconds, read_rate, roofline
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of, with_scorer

CHUNK, WARMUP, REPEATS, WINDOW, PAGE_SIZE = 32, 2, 3, 256, 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Time every policy, with random weights."""

    what: Literal["steps", "prompts"] = "steps"
    """Steps or prompts."""
    shape: Shape = "llama-3.1-8b"
    """Model shape to time, with random weights."""
    context: int = 32768
    """Earlier tokens of each sequence, or tokens of each prompt."""
    batch: int = 8
    """Sequences decoded at a time, or prompts of a call."""
    ratios: tuple[int, ...] = (2, 3, 4, 8)
    """Compression ratios of the budgets."""
    only: tuple[str, ...] = ()
    """Labels to time; all unless given."""
    profile: bool = False
    """Also profile a call of prompts. A profiler has room for a million kernels: give few
    tokens."""
    out: pathlib.Path = pathlib.Path("runs/policies")
    """Folder for the figures: speed.json of steps, prompts.json of prompts."""

    def __post_init__(self):
        check_numbers(self)
        for ratio in self.ratios:
            if self.context // ratio <= WINDOW:
                raise dms_jax.ConfigError(
                    f"--context {self.context:,} leaves {self.context // ratio} tokens at a ratio "
                    f"of {ratio}, and those in a window of {WINDOW} always stay: give --context at "
                    f"least {ratio * (WINDOW + 1):,}."
                )


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy at a length.

    Attributes:
      label: for the table.
      policy: the policy.
      live: mean slots of a row.
      uneven: whether heads hold between zero and twice the mean beyond the window.
      kv_dtype: dtype of the cache.
      cuts: whether rows are cut in the chunk after the timed ones.
    """

    label: str
    policy: Policy
    live: int
    uneven: bool = False
    kv_dtype: str | None = None
    cuts: bool = False


def contenders(context: int, ratio: int) -> Iterator[Contender]:
    """Every policy, with a budget of context / ratio; KCache fetches 128 values at any ratio."""
    budget = context // ratio
    kept = (budget - WINDOW - 1) / (context - WINDOW - 1)
    drawn = dms_jax.RandomEviction(window=WINDOW, rate=1 - kept)
    float8 = "float8_e4m3"
    yield Contender("Vanilla", dms_jax.Vanilla(), context)
    yield Contender("Vanilla + float8", dms_jax.Vanilla(), context, kv_dtype=float8)
    yield Contender("DMS (drawn)", drawn, budget, uneven=True)
    yield Contender("DMS (drawn) + float8", drawn, budget, uneven=True, kv_dtype=float8)
    half = max(budget // 2, PAGE_SIZE)
    quest = dms_jax.Quest(budget=half, over=drawn)
    yield Contender("DMS (drawn) + Quest", quest, budget, uneven=True)
    yield Contender("DMC", dms_jax.DMC(), budget, uneven=True)
    yield Contender("StreamingLLM", dms_jax.StreamingLLM(budget=budget), budget)
    by_token: Any = dict(prefill="evict_past_budget")  # policies for whole prompts
    yield Contender("TOVA", dms_jax.TOVA(budget=budget, **by_token), budget + 1)
    yield Contender("H2O", dms_jax.H2O(budget=budget, **by_token), budget + 1)
    yield Contender("KVzap", dms_jax.KVzap(window=WINDOW), budget, uneven=True)
    kvpop = dms_jax.KVpop(budget=budget, window=WINDOW, **by_token)
    yield Contender("KVpop", kvpop, budget + 1)
    yield Contender("Quest", dms_jax.Quest(budget=budget), context)
    yield Contender("FixedPooling", dms_jax.policies.FixedPooling(every=ratio), budget)
    interval = min(512, budget // 4)
    before = (REPEATS + WARMUP) * CHUNK + min(CHUNK, interval) // 2  # steps until the cut
    fields = dict(budget=max(budget + before - interval, 2), interval=interval)
    window = dict(window=min(64, budget // 2))
    scorers = {"SnapKV": window, "ExpectedAttention": {}, "KeyDiff": {}, "Knorm": {}}
    for name, more in (scorers | {"RandomSelection": {}}).items():
        yield Contender(name, POLICIES[name](**fields, **more), budget, cuts=True)
    snapkv = dms_jax.SnapKV(**fields, **window)
    yield Contender("AdaKV", dms_jax.AdaKV(scorer=snapkv), budget, cuts=True)
    yield Contender("PyramidKV", dms_jax.PyramidKV(scorer=snapkv), budget, cuts=True)
    yield Contender("KCache", dms_jax.KCache(top=128), context)
    kcache = dms_jax.KCache(top=128, over=drawn)
    yield Contender("DMS (drawn) + KCache", kcache, budget, uneven=True)


def row_lengths(contender: Contender, shape: tuple[int, int, int], context: int) -> np.ndarray:
    """[L, B, K] slots in use."""
    if isinstance(contender.policy, dms_jax.PyramidKV):
        return np.broadcast_to(pyramid(contender, shape[0])[:, None, None], shape)
    if not contender.uneven:
        return np.full(shape, contender.live)
    heads = np.random.default_rng(0).uniform(0, 2, (shape[0], 1, shape[2]))
    heads *= (contender.live - WINDOW - 1) / heads.mean()
    lengths = np.minimum(WINDOW + 1 + np.round(heads), context)
    return np.broadcast_to(lengths, shape).astype(np.int64)


def pyramid(contender: Contender, num_layers: int) -> np.ndarray:
    """[L] slots of each layer, all as far from their cut as the mean is."""
    policy: Any = contender.policy
    beside = policy.scorer.budget - policy.protected
    low = beside // policy.beta
    high = 2 * beside - low
    fall = -(-np.arange(num_layers) * (high - low) // max(num_layers - 1, 1))
    return contender.live - policy.scorer.budget + policy.protected + high - fall


def state_at(policy: Policy, cache: Any, lengths: np.ndarray, context: int) -> tuple[Any, Any]:
    """A plausible (row state, page state) of the policy.

    Delayed eviction computes its rows' contents at a length; if it draws or scores, the marked
    share of the window equals the evicted share before it. In any other state slots and positions
    are random numbers in their range, and page state is random.
    """
    rows, random = cache.row_state, np.random.default_rng(1)
    inner = policy.over if isinstance(policy, SelectiveReading) else policy
    if isinstance(inner, DelayedEviction):
        size = inner.visible_window + 1
        slots = jnp.asarray(np.maximum(lengths[..., None] - size + np.arange(size), 0), jnp.int32)
        rate = getattr(inner, "rate", 0.0)
        if isinstance(inner, dms_jax.StreamingLLM):
            rate = 1.0
        elif isinstance(inner, dms_jax.KVzap):
            rate = 1 - float(lengths.mean()) / context
        evicted = jnp.asarray(random.random(slots.shape) < rate)
        rows = inner.rows_at(rows, slots, evicted, context)
    else:
        rows = jax.tree.map(functools.partial(draw, below=int(lengths.min()), floats=False), rows)
    return rows, jax.tree.map(functools.partial(draw, below=context), cache.page_state)


@functools.partial(jax.jit, static_argnames=("below", "floats"))
def draw(x: jax.Array, below: int, floats: bool = True) -> jax.Array:
    """Random numbers shaped like an array: integers from 0 to `below`, others normal."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(2), x.shape, 0, below, x.dtype)
    return jax.random.normal(jax.random.key(3), x.shape, x.dtype) if floats else x


def filled_runner(
    model: dms_jax.LanguageModel, contender: Contender, lengths: np.ndarray, context: int
) -> tuple[Runner, dict[str, int]]:
    """A filled cache with random contents, and its bytes so far."""
    steps, batch = (WARMUP + REPEATS + 1) * CHUNK, lengths.shape[1]
    num_pages = int(np.ceil((lengths + steps) / PAGE_SIZE).sum())
    if contender.uneven:  # layers with a fixed share of the pages need spare ones
        num_pages = int(1.5 * num_pages)
    runner = Runner(
        model,
        contender.policy,
        num_lanes=batch,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_dtype=contender.kv_dtype,
    )
    runner.reservation.lengths = lengths.copy()
    sequences = [runner.reservation.bytes_of(lengths[:, lane]) for lane in range(batch)]
    held = {name: sum(each[name] for each in sequences) for name in sequences[0]}
    runner.reservation.reserve(np.full(batch, steps))
    cache = runner.cache
    rows, pages = state_at(contender.policy, cache, lengths, context)

    def draw(
        x, seed
    ):  # block by block and in place, because a pool may take more than half of the memory
        size = min(len(x), 4096)

        def block(index, x):
            key = jax.random.fold_in(jax.random.key(seed), index)
            new = jax.random.normal(key, (size, *x.shape[1:]), jnp.bfloat16)
            return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), index * size, 0)

        return jax.lax.fori_loop(0, -(-len(x) // size), block, x)

    fill = jax.jit(draw, static_argnums=1, donate_argnums=0)
    pool = cache.pool
    runner.cache = dataclasses.replace(
        cache,
        pool=dataclasses.replace(
            pool,
            k_pages=fill(pool.k_pages, 1),
            v_pages=fill(pool.v_pages, 2),
            k_scales=None if pool.k_scales is None else jnp.ones_like(pool.k_scales),
            v_scales=None if pool.v_scales is None else jnp.ones_like(pool.v_scales),
        ),
        lengths=jnp.asarray(lengths, jnp.int32),
        seen=jnp.full(batch, context, jnp.int32),
        row_state=rows,
        page_state=pages,
    )
    return runner, held


def time_steps(
    model: dms_jax.LanguageModel, contender: Contender, *, batch: int, context: int, rate: float
) -> dict[str, Any]:
    """Times decode steps through the library's own loop.

    A policy with a scorer gets an untrained one, which takes as long as any other.
    """
    config, model = model.config, with_scorer(model, contender.policy)
    lengths = row_lengths(contender, (config.num_layers, batch, config.num_kv_heads), context)
    runner, held = filled_runner(model, contender, lengths, context)
    tokens = np.zeros(batch, np.int32)
    seeds = np.zeros((batch, 2), np.uint32)
    reads = []

    def run() -> np.ndarray:
        launched = runner.decode(
            tokens,
            np.full(batch, 10**6, np.int32),
            seeds,
            Sampling(temperature=0).filter,
            num_steps=CHUNK,
            end_tokens=(),
        )
        steps = runner.collect(launched)
        tokens[:] = steps.tokens[-1]
        reads.append(steps.reads.sum(1).mean())
        return steps.tokens

    try:
        seconds = median_seconds(run, REPEATS, warmup=WARMUP) / CHUNK
        entry = entry_bytes(config, model.dtype, contender.kv_dtype)
        figures = roofline(model, batch, float(np.mean(reads)) * entry, rate, seconds) | dict(
            tokens_per_second=batch / seconds,
            live=float(lengths.mean()),
            reads_a_step=float(np.mean(reads)) / lengths[:, 0].size / batch,
            **held,
            policy=contender.policy.to_dict(),
            kv_dtype=contender.kv_dtype,
        )
        if contender.cuts:
            start, rows = time.perf_counter(), runner.reservation.lengths.sum()
            run()
            figures["cut_ms"] = 1e3 * (time.perf_counter() - start - CHUNK * seconds)
            freed = float(rows - runner.reservation.lengths.sum())
            figures["cut_slots"] = freed / lengths.size + CHUNK
    finally:
        for leaf in jax.tree.leaves(runner.cache):
            leaf.delete()
        if runner.host is not None:
            runner.host.delete()
    return figures


def time_prompts(
    config: Config, model: dms_jax.LanguageModel, contender: Contender
) -> dict[str, Any]:
    """Times calls that prefill a batch of prompts, and profiles one on request."""
    engine = dms_jax.Engine(
        with_scorer(model, contender.policy),
        contender.policy,
        num_lanes=config.batch,
        max_tokens=config.context + 1,
        kv_dtype=contender.kv_dtype,
    )
    random = np.random.default_rng(0)
    sampling = dms_jax.Sampling(temperature=0.0, max_new_tokens=1)

    def call() -> tuple[float, list[Completion]]:
        shape = config.batch, config.context
        prompts = random.integers(0, model.config.vocab_size, shape).tolist()
        start = time.perf_counter()
        answers = engine.generate(prompts, sampling=sampling)
        return time.perf_counter() - start, answers

    first, answers = call()
    seconds = [call()[0] for _ in range(REPEATS)]
    figures: dict[str, Any] = dict(
        seconds=statistics.median(seconds),
        all_seconds=seconds,
        first_call=first,
        tokens_per_second=config.batch * config.context / statistics.median(seconds),
        peak_cache_bytes=max(each.usage.peak_cache_bytes for each in answers),
        policy=contender.policy.to_dict(),
        kv_dtype=contender.kv_dtype,
    )
    if config.profile:
        with traces.traced() as trace:
            call()
        figures["programs"] = trace.programs()
    return figures


def described(figures: dict[str, Any]) -> str:
    """Formats the figures of a policy as a line."""
    if "failed" in figures:
        return figures["failed"]
    if "seconds" in figures:
        return (
            f"{figures['seconds']:.3f} s, {figures['tokens_per_second']:,.0f} tokens/s, "
            f"{figures['peak_cache_bytes'] / 1e9:.2f} GB"
        )
    cut = f", a cut {figures['cut_ms']:.0f} ms" if "cut_ms" in figures else ""
    return (
        f"{figures['step_ms']:.2f} ms a step, {figures['cache_bytes'] / 1e9:.2f} GB, "
        f"reads {figures['reads_a_step']:,.0f}{cut}"
    )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every policy at every ratio; writes rows after each.

    Raises:
      ConfigError: there is no such label.
    """
    known = [each.label for each in contenders(config.context, config.ratios[0])]
    check_names("--only", config.only, known)
    make_folder("--out", config.out)
    model = model_of(config.shape, jnp.float32 if config.shape == "tiny" else jnp.bfloat16)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"rows": rows}
    if config.what == "steps":
        rate = read_rate()
        report = {"read_gb_a_second": rate / 1e9} | report
        settings: Any = dict(batch=config.batch, context=config.context, rate=rate)
        measure = functools.partial(time_steps, model, **settings)
    else:
        measure = functools.partial(time_prompts, config, model)
    path = config.out / ("speed.json" if config.what == "steps" else "prompts.json")
    for number, ratio in enumerate(config.ratios):
        for contender in contenders(config.context, ratio):
            dense, lost = contender.label.startswith("Vanilla"), False
            if (number and dense) or contender.label not in (config.only or known):
                continue
            try:
                figures = measure(contender)
            except FAILURES as error:
                figures, lost = {"failed": str(error)[:400]}, gave_up(error)
            gc.collect()  # the exception held its cache
            rows.append(dict(label=contender.label, ratio=1 if dense else ratio, **figures))
            print(f"{contender.label} at {rows[-1]['ratio']}: {described(figures)}", flush=True)
            write_json(path, provenance(config) | report)
            if lost:
                print("The device gave up. Start again with --only for the rows that are left.")
                return rows
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
