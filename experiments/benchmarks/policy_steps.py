"""Milliseconds a decode step under every policy, at a length that is set rather than reached.

    python -m experiments.benchmarks.policy_steps --out runs/policy_steps
    python -m experiments.benchmarks.policy_steps --batch 24 --ratios 8 --only DMC TOVA

Weights, keys and values are random; a policy's state is filled with what it could be at that
length. Learned eviction is played by draws (`RandomEviction`), with uneven heads: the same kernels,
the same ring, a ratio that is known. What cuts its rows every so often does so after the steps that
are timed; the cut is timed by itself.
"""

import dataclasses
import functools
import gc
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.candidates import FAILURES, gave_up
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.model.caching import entry_bytes, layer_page_bytes, tree_bytes
from dms_jax.policies import POLICIES, Policy
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.selective import SelectiveReading
from experiments.benchmarks.decode_steps import (
    median_seconds,
    read_rate,
    roofline,
)
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import SHAPES, Shape, model_of, with_scorer

CHUNK, WARMUP, REPEATS, WINDOW, PAGE_SIZE = 32, 2, 3, 256, 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode steps under every policy, with random weights."""

    shape: Shape = "llama-3.1-8b"
    """Model whose shape is timed, with random weights."""
    context: int = 32768
    """Tokens that each sequence has seen."""
    batch: int = 8
    """Sequences that are decoded at a time."""
    ratios: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0)
    """Compression ratios of the budgets; whole numbers."""
    only: tuple[str, ...] = ()
    """Labels to time; all unless given."""
    deadline_minutes: float = 1e6
    """No row is begun later than this after the start."""
    out: pathlib.Path = pathlib.Path("runs/policy_steps")
    """Folder for the figures, speed.json."""

    def __post_init__(self):
        check_numbers(self)


@dataclasses.dataclass(frozen=True)
class Racer:
    """A policy at a length.

    Attributes:
      label: for the table.
      policy: what runs.
      live: mean slots of a row.
      uneven: whether heads hold between nothing and twice that beyond the window.
      kv_dtype: of the cache.
      cuts: whether rows are cut in the chunk after the timed ones.
    """

    label: str
    policy: Policy
    live: int
    uneven: bool = False
    kv_dtype: str | None = None
    cuts: bool = False


def racers(context: int, ratio: int) -> Iterator[Racer]:
    """Every policy, with a budget of context / ratio; KCache fetches 128 values at any ratio."""
    budget = context // ratio
    kept = (budget - WINDOW - 1) / (context - WINDOW - 1)
    drawn = dms_jax.RandomEviction(window=WINDOW, rate=1 - kept)
    float8 = "float8_e4m3"
    yield Racer("Vanilla", dms_jax.Vanilla(), context)
    yield Racer("Vanilla + float8", dms_jax.Vanilla(), context, kv_dtype=float8)
    yield Racer("DMS (drawn)", drawn, budget, uneven=True)
    yield Racer("DMS (drawn) + float8", drawn, budget, uneven=True, kv_dtype=float8)
    half = max(budget // 2, PAGE_SIZE)
    quest = dms_jax.Quest(budget=half, over=drawn)
    yield Racer("DMS (drawn) + Quest", quest, budget, uneven=True)
    yield Racer("DMC", dms_jax.DMC(), budget, uneven=True)
    yield Racer("StreamingLLM", dms_jax.StreamingLLM(budget=budget), budget)
    by_token: Any = dict(prefill="evict_past_budget")  # what `policy_prompts` has timed
    yield Racer("TOVA", dms_jax.TOVA(budget=budget, **by_token), budget + 1)
    yield Racer("H2O", dms_jax.H2O(budget=budget, **by_token), budget + 1)
    yield Racer("KVzap", dms_jax.KVzap(window=WINDOW), budget, uneven=True)
    kvpop = dms_jax.KVpop(budget=budget, window=WINDOW, **by_token)
    yield Racer("KVpop", kvpop, budget + 1)
    yield Racer("Quest", dms_jax.Quest(budget=budget), context)
    yield Racer("FixedPooling", dms_jax.policies.FixedPooling(every=ratio), budget)
    interval = min(512, budget // 4)
    before = (REPEATS + WARMUP) * CHUNK + min(CHUNK, interval) // 2  # steps until the cut
    fields = dict(budget=max(budget + before - interval, 2), interval=interval)
    window = dict(window=min(64, budget // 2))
    scorers = {"SnapKV": window, "ExpectedAttention": {}, "KeyDiff": {}, "Knorm": {}}
    for name, more in (scorers | {"RandomSelection": {}}).items():
        yield Racer(name, POLICIES[name](**fields, **more), budget, cuts=True)
    snapkv = dms_jax.SnapKV(**fields, **window)
    yield Racer("AdaKV", dms_jax.AdaKV(scorer=snapkv), budget, cuts=True)
    yield Racer("PyramidKV", dms_jax.PyramidKV(scorer=snapkv), budget, cuts=True)
    yield Racer("KCache", dms_jax.KCache(top=128), context)
    kcache = dms_jax.KCache(top=128, over=drawn)
    yield Racer("DMS (drawn) + KCache", kcache, budget, uneven=True)


def row_lengths(racer: Racer, shape: tuple[int, int, int], context: int) -> np.ndarray:
    """[L, B, K] slots in use."""
    if isinstance(racer.policy, dms_jax.PyramidKV):
        return np.broadcast_to(pyramid(racer, shape[0])[:, None, None], shape)
    if not racer.uneven:
        return np.full(shape, racer.live)
    heads = np.random.default_rng(0).uniform(0, 2, (shape[0], 1, shape[2]))
    heads *= (racer.live - WINDOW - 1) / heads.mean()
    lengths = np.minimum(WINDOW + 1 + np.round(heads), context)
    return np.broadcast_to(lengths, shape).astype(np.int64)


def pyramid(racer: Racer, num_layers: int) -> np.ndarray:
    """[L] slots of each layer, all as far from their cut as the mean is."""
    policy: Any = racer.policy
    beside = policy.scorer.budget - policy.protected
    low = beside // policy.beta
    high = 2 * beside - low
    fall = -(-np.arange(num_layers) * (high - low) // max(num_layers - 1, 1))
    return racer.live - policy.scorer.budget + policy.protected + high - fall


def state_at(policy: Policy, cache: Any, lengths: np.ndarray, context: int) -> tuple[Any, Any]:
    """(row state, page state) that the policy could have come to.

    Delayed eviction says itself what its rows hold at a length; where it draws, or scores, as large
    a share of the window is marked as was evicted before it. Of any other state, slots and
    positions are random numbers in their range, and what is kept per page is random too.
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
    """Random numbers like those of an array: integers from 0 to `below`, others normal."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(2), x.shape, 0, below, x.dtype)
    return jax.random.normal(jax.random.key(3), x.shape, x.dtype) if floats else x


def filled_runner(
    model: dms_jax.LanguageModel, racer: Racer, lengths: np.ndarray, context: int
) -> tuple[Runner, dict[str, int]]:
    """A cache at its length, with random contents, and what it takes so far."""
    steps, batch = (WARMUP + REPEATS + 1) * CHUNK, lengths.shape[1]
    num_pages = int(np.ceil((lengths + steps) / PAGE_SIZE).sum())
    if racer.uneven:  # layers that share the pages out beforehand need some to spare
        num_pages = int(1.5 * num_pages)
    of_layer = layer_page_bytes(model.config, racer.policy, PAGE_SIZE, model.dtype, racer.kv_dtype)
    check_room(num_pages * float(of_layer.mean()), f"{batch} sequences of {context:,} tokens")
    runner = Runner(
        model,
        racer.policy,
        num_lanes=batch,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_dtype=racer.kv_dtype,
    )
    runner.reservation.lengths = lengths.copy()
    sequences = [runner.reservation.bytes_of(lengths[:, lane]) for lane in range(batch)]
    held = {name: sum(each[name] for each in sequences) for name in sequences[0]}
    runner.reservation.reserve(np.full(batch, steps))
    cache = runner.cache
    rows, pages = state_at(racer.policy, cache, lengths, context)

    def draw(x, seed):  # block by block and in place: a pool may take more than half of the memory
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


def tried(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Returns figures, or those of a failure; and whether the device is lost."""
    try:
        return measure(), False
    except FAILURES as error:
        failed, lost = {"failed": str(error)[:400]}, gave_up(error)
    gc.collect()  # what was raised held on to its cache
    return failed, lost


def time_steps(
    model: dms_jax.LanguageModel, racer: Racer, *, batch: int, context: int, rate: float
) -> dict[str, Any]:
    """Times decode steps through the library's own loop.

    A policy with a scorer gets one that scores nothing yet, which takes as long as any other.
    """
    config, model = model.config, with_scorer(model, racer.policy)
    lengths = row_lengths(racer, (config.num_layers, batch, config.num_kv_heads), context)
    runner, held = filled_runner(model, racer, lengths, context)
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
        entry = entry_bytes(config, model.dtype, racer.kv_dtype)
        figures = roofline(model, batch, float(np.mean(reads)) * entry, rate, seconds) | dict(
            tokens_per_second=batch / seconds,
            live=float(lengths.mean()),
            reads_a_step=float(np.mean(reads)) / lengths[:, 0].size / batch,
            **held,
            policy=racer.policy.to_dict(),
            kv_dtype=racer.kv_dtype,
        )
        if racer.cuts:
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


def check(shape: str, context: int, ratios: Sequence[float], only: Sequence[str]) -> None:
    """Refuses what cannot be timed.

    Raises:
      ConfigError: there is no such shape or label, or a ratio leaves less than the window.
    """
    if shape not in SHAPES:
        raise dms_jax.ConfigError(f"--shape {shape}: there are {', '.join(SHAPES)}.")
    for ratio in ratios:
        if ratio != int(ratio):
            raise dms_jax.ConfigError(f"--ratios {ratio:g} is no whole number.")
        if context // int(ratio) <= WINDOW:
            raise dms_jax.ConfigError(
                f"--context {context:,} leaves {context // int(ratio)} tokens at a ratio of "
                f"{int(ratio)}, and those in a window of {WINDOW} always stay: give --context at "
                f"least {int(ratio) * (WINDOW + 1):,}."
            )
    known = [racer.label for racer in racers(context, int(ratios[0]))]
    if unknown := [label for label in only if label not in known]:
        raise dms_jax.ConfigError(f"--only {', '.join(unknown)}: there are {', '.join(known)}.")


def check_room(size: float, what: str) -> None:
    """Refuses what a CPU's memory does not hold: its system would end the process without a word.

    A GPU says so itself.

    Raises:
      CapacityError: it is more than half of the memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if jax.default_backend() == "cpu" and size > memory / 2:
        raise dms_jax.CapacityError(
            f"{what} take {size / 1e9:,.1f} GB, and there are {memory / 1e9:,.1f} in all, of which "
            "half is taken at most; give a smaller --shape, --batch or --context"
        )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every policy at every ratio; rows are written as they come.

    Raises:
      ConfigError: a shape, length, ratio or label is not to be had.
      CapacityError: the weights do not fit a CPU's memory.
    """
    check(config.shape, config.context, config.ratios, config.only)
    make_folder("--out", config.out)
    dtype = jnp.bfloat16 if config.shape != "tiny" else jnp.float32
    shapes = jax.eval_shape(lambda: model_of(config.shape, dtype).transformer)
    check_room(tree_bytes(shapes), f"the weights of {config.shape}")
    model = model_of(config.shape, dtype)
    end = time.monotonic() + 60 * config.deadline_minutes
    rate = read_rate()
    rows: list[dict[str, Any]] = []
    for number, ratio in enumerate(config.ratios):
        for racer in racers(config.context, int(ratio)):
            if number and racer.label.startswith("Vanilla"):
                continue
            if config.only and racer.label not in config.only:
                continue
            if time.monotonic() > end:
                print("The time is over.")
                return rows
            settings = dict(batch=config.batch, context=config.context, rate=rate)
            figures, lost = tried(functools.partial(time_steps, model, racer, **settings))
            told = figures.get("failed") or (
                f"{figures['step_ms']:.2f} ms a step, {figures['cache_bytes'] / 1e9:.2f} GB, "
                f"reads {figures['reads_a_step']:,.0f}"
            )
            if "cut_ms" in figures:
                told += f", a cut {figures['cut_ms']:.0f} ms"
            dense = racer.label.startswith("Vanilla")
            rows.append(dict(label=racer.label, ratio=1 if dense else ratio, **figures))
            print(f"{racer.label} at {rows[-1]['ratio']:g}: {told}")
            content = {"read_gb_a_second": rate / 1e9, "rows": rows}
            write_json(config.out / "speed.json", provenance(config) | content)
            if lost:
                print("The device gave up. Start again with --only for the rows that are left.")
                return rows
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
