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
from dms_jax.model.caching import entry_bytes
from dms_jax.policies import POLICIES, Policy
from experiments.benchmarks import traces
from experiments.benchmarks.decode_steps import (
    PAGE_SIZE,
    filled_runner,
    kept_share,
    roofline,
    spread_lengths,
    time_runner,
)
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of, with_scorer
from experiments.benchmarks.timing import read_rate

CHUNK, WARMUP, REPEATS, WINDOW = 32, 2, 3, 256


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
    drawn = dms_jax.RandomEviction(window=WINDOW, rate=1 - kept_share(context, WINDOW, ratio))
    float8 = "float8_e4m3"
    yield Contender("Vanilla", dms_jax.Vanilla(), context)
    yield Contender("Vanilla + float8", dms_jax.Vanilla(), context, kv_dtype=float8)
    yield Contender("DMS (drawn)", drawn, budget, uneven=True)
    yield Contender("DMS (drawn) + float8", drawn, budget, uneven=True, kv_dtype=float8)
    half = max(budget // 2, 2 * PAGE_SIZE)
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
    return spread_lengths(shape, context, WINDOW, context / contender.live)


def pyramid(contender: Contender, num_layers: int) -> np.ndarray:
    """[L] slots of each layer, all as far from their cut as the mean is."""
    policy: Any = contender.policy
    beside = policy.scorer.budget - policy.protected
    low = beside // policy.beta
    high = 2 * beside - low
    fall = -(-np.arange(num_layers) * (high - low) // max(num_layers - 1, 1))
    return contender.live - policy.scorer.budget + policy.protected + high - fall


def time_steps(
    model: dms_jax.LanguageModel, contender: Contender, *, batch: int, context: int, rate: float
) -> dict[str, Any]:
    """Times decode steps through the library's own loop.

    A policy with a scorer gets an untrained one, which takes as long as any other.
    """
    config, model = model.config, with_scorer(model, contender.policy)
    lengths = row_lengths(contender, (config.num_layers, batch, config.num_kv_heads), context)
    runner = filled_runner(
        model,
        contender.policy,
        lengths,
        context,
        steps=(WARMUP + REPEATS + 1) * CHUNK,
        kv_dtype=contender.kv_dtype,
        spare=1.5 if contender.uneven else 1.0,  # layers with a fixed share of the pages need more
    )
    sequences = [runner.reservation.bytes_of(lengths[:, lane]) for lane in range(batch)]
    held = {name: sum(each[name] for each in sequences) for name in sequences[0]}
    try:
        seconds, reads, run = time_runner(runner, CHUNK, REPEATS)
        entry = entry_bytes(config, model.dtype, contender.kv_dtype)
        figures = roofline(model, batch, reads * entry, rate, seconds) | dict(
            tokens_per_second=batch / seconds,
            live=float(lengths.mean()),
            reads_a_step=reads / lengths[:, 0].size / batch,
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
