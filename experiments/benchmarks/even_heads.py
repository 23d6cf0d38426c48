"""Times a decode step with even and with uneven heads, at the same live tokens in total.

A fixed budget makes all rows of the cache equally long; decisions of tokens (DMS, KVzap) do not.
For each shape and ratio the same step runs over rows of one total: all even, heads drawn uniformly
between empty and twice the mean, and a few heads near dense while the others hold the window alone.
Then with the policies that lead there: KVzap over the uneven rows, and KVpop over the even ones,
each with its scorer and its state. Everything runs in rounds, so that a change of the card's clock
meets all alike.

    python -m experiments.benchmarks.even_heads --out runs/even_heads
"""

import dataclasses
import gc
import pathlib
import sys
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import command, run
from dms_jax.json_text import json_text
from dms_jax.policies import Policy
from experiments.benchmarks.decode_steps import (
    Config as Steps,
)
from experiments.benchmarks.decode_steps import (
    filled_runner,
    row_lengths,
    time_runner,
)
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of, with_scorer

NEAR_DENSE = 0.95


@dataclasses.dataclass(frozen=True)
class Config:
    """Time even and uneven heads."""

    out: pathlib.Path = pathlib.Path("runs/even_heads")
    """Folder for even_heads.json and even_heads.md."""
    shapes: tuple[Shape, ...] = ("qwen3-8b",)
    """Model shapes, with random weights."""
    batch: int = 32
    """Sequences that are decoded at a time."""
    context: int = 8192
    """Tokens that each sequence has seen."""
    ratios: tuple[int, ...] = (4, 8)
    """Compression ratios of the live tokens."""
    window: int = 128
    """Tokens that no head evicts."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 5
    """Timed programs in a round; the median counts."""
    rounds: int = 2
    """Times that everything is timed; the mean counts, and the spread is shown."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("window",))

    def steps(self) -> Steps:
        """The same settings for the benchmark of decode steps."""
        shared = ("batch", "context", "ratios", "window", "chunk", "repeats", "dtype")
        return Steps(**{name: getattr(self, name) for name in shared})


def forms(config: Config, model: dms_jax.LanguageModel, ratio: int) -> dict[str, np.ndarray]:
    """Returns live tokens [L, B, K] of each form, of the same total."""
    drawn = row_lengths(config.steps(), model, ratio)
    layers, _, heads = drawn.shape
    total, least = int(drawn[:, 0].sum()), config.window + 1
    even = np.full(layers * heads, total // (layers * heads))
    even[: total - even.sum()] += 1
    # A few heads hold nearly everything, one what is left, and the others the window.
    dense = least + round(NEAR_DENSE * (config.context - least))
    few = np.full(layers * heads, least)
    count, rest = divmod(total - few.sum(), dense - least)
    few[:count] = dense
    few[count : count + 1] += rest
    few = np.random.default_rng(1).permutation(few)

    def rows(per_head: np.ndarray) -> np.ndarray:
        per_head = per_head.reshape(layers, 1, heads)
        return np.broadcast_to(per_head, drawn.shape).astype(np.int64)

    return {"even": rows(even), "uneven": drawn, "a few near dense": rows(few)}


def cases(config: Config, ratio: int, lengths: dict[str, np.ndarray]) -> list[tuple[str, Policy]]:
    """Returns (form of the rows, policy) of everything that is timed."""
    far = config.context - config.window - 1
    rate = 1 - (config.context / ratio - config.window - 1) / far
    chance = dms_jax.RandomEviction(window=config.window, rate=rate)
    budget = int(lengths["even"].max())
    return [
        *((form, chance) for form in lengths),
        ("uneven", dms_jax.KVzap(window=config.window)),
        ("even", dms_jax.KVpop(budget=budget, window=config.window)),
    ]


def time_case(
    config: Config, model: dms_jax.LanguageModel, policy: Policy, lengths: np.ndarray, ratio: int
) -> float:
    """Returns the seconds of a step."""
    model = with_scorer(model, policy)
    # The state of the scorers begins empty: no token is marked, and none is scored.
    known = ratio if isinstance(policy, dms_jax.RandomEviction) else 1
    runner = filled_runner(config.steps(), model, policy, lengths, known)
    seconds, _ = time_runner(config.steps(), runner)
    return seconds


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| shape | ratio | rows | policy | longest row | ms a step | against even |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        (even,) = (
            other["step_ms"]
            for other in rows
            if all(other[name] == row[name] for name in ("shape", "ratio"))
            and (other["rows"], other["policy"]) == ("even", "RandomEviction")
        )
        spread = (max(row["rounds_ms"]) - min(row["rounds_ms"])) / 2
        lines.append(
            f"| {row['shape']} | {row['ratio']} | {row['rows']} | {row['policy']} | "
            f"{row['longest']:,} | {row['step_ms']:.3f} ± {spread:.3f} | "
            f"{row['step_ms'] / even - 1:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main(config: Config) -> None:
    """Times everything and writes the figures as they come."""
    make_folder("--out", config.out)
    settings = {
        field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)
    }
    results: dict[str, Any] = environment() | dict(command=command(), config=settings, rows=[])
    for shape in config.shapes:
        model = model_of(shape, jnp.dtype(config.dtype))
        for ratio in config.ratios:
            lengths = forms(config, model, ratio)
            rows: list[dict[str, Any]] = [
                dict(
                    shape=shape,
                    ratio=ratio,
                    rows=form,
                    policy=policy.name,
                    live_tokens=float(lengths[form].mean()),
                    longest=int(lengths[form].max()),
                    rounds_ms=[],
                )
                for form, policy in cases(config, ratio, lengths)
            ]
            results["rows"] += rows
            for _ in range(config.rounds):
                for row, (form, policy) in zip(rows, cases(config, ratio, lengths), strict=True):
                    seconds = time_case(config, model, policy, lengths[form], ratio)
                    row["rounds_ms"].append(1e3 * seconds)
                    row["step_ms"] = float(np.mean(row["rounds_ms"]))
                    gc.collect()
                    print({name: row[name] for name in row if name != "rounds_ms"}, flush=True)
                    done = [one for one in results["rows"] if one["rounds_ms"]]
                    path = config.out / "even_heads.json"
                    path.write_text(json_text(results | dict(rows=done), indent=1) + "\n")
        del model
        gc.collect()
    head = f"# Even and uneven heads\n\nDevice: {results['device']}. "
    (config.out / "even_heads.md").write_text(f"{head}{__doc__}\n{table(results['rows'])}")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
