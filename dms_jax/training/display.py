"""The progress of a run in the terminal: an opening line, a bar with figures, a closing line.

Training all weights, 1.24B parameters, for DMS(window=16) on 8 NVIDIA H200: 11,000 steps to
ratio 4 of 1,024 x 4,096 tokens, 46.1B tokens in all (dms_paper llama-3.2-1b)

 212/11000 ━━━━━ 4:12:09
 KL 0.012 + CR 0.031 | ratio 1.07 of 1.09 | gradient 0.41 | 231,000 tok/s | 31% of peak | 61 GB

Reached ratio 2.40 of 4.00 in 11,000 steps ... Short of the target: ...
"""

import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dms_jax.checks import Number
from dms_jax.policies import Policy
from dms_jax.terminal import Lines, console_for_progress, has_bar
from dms_jax.training.recipe import Recipe

_SHORT = {"distillation": "KL", "language modeling": "LM"}
TRAINED = {
    "all": "all weights",
    "adapter": "the adapter, weights frozen",
    "low_rank": "low-rank updates and the adapter, weights frozen",
}
_REACHED = 0.97  # share of the target that counts as reached: decisions are sampled
_MEAN_OVER = 20  # steps


class Display:
    """The progress bar of a run, with a line before and after it; without a terminal, lines.

    Args:
      total, done: optimizer steps in total, and those already done.
      main: name of the main loss, to which the compression loss is added.
      target: the compression ratio at the end of the recipe; None without one (`aim`).
      enabled: whether to show anything.
      opening: the line before the first step.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int,
        main: str,
        target: Number | None,
        enabled: bool,
        opening: str = "",
    ):
        self._total, self._done, self._main = total, done, _SHORT.get(main, main)
        self._target, self._enabled, self._opening = target, enabled, opening
        self._bar = _Bar(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console_for_progress(),
            disable=not enabled,
        )
        self._lines = None if has_bar(self._bar.console) else Lines()
        self._task = self._bar.add_task("training", total=total, completed=done)
        self._last: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MEAN_OVER)
        self._began, self._tokens = time.perf_counter(), 0

    def __enter__(self) -> "Display":
        self._began = time.perf_counter()
        if self._done >= self._total:
            self.say(f"All {self._total:,} steps of this run are done already.")
            return self
        if self._opening:
            self.say(self._opening)
        self._bar.start()
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        if self._done >= self._total:  # there is no bar
            return
        self._bar.stop()
        if error is None and self._last and self._last[-1]["step"] == self._total:
            self.say(self.closing())

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._enabled:
            self._bar.console.print(line, highlight=False, markup=False)

    def update(self, record: dict[str, Any]) -> None:
        """Shows the record of a step."""
        self._last.append(record)
        self._tokens += record["tokens"]
        self._bar.details = self.figures(record)
        self._bar.update(self._task, completed=record["step"])
        if self._enabled and self._lines is not None:
            self._lines.write(f"step {record['step']} of {self._total} | {self._bar.details}")

    def figures(self, record: Mapping[str, Any]) -> str:
        """Returns the figures of a step as one line."""
        main = record["loss"] - record["compression_loss"]
        parts = [f"{self._main} {main:.3f}"]
        if self._target is not None:
            parts[0] += f" + CR {record['compression_loss']:.3f}"
            parts.append(f"ratio {record['compression_ratio']:.2f} of {record['target_ratio']:.2f}")
        parts.append(f"gradient {record['grad_norm']:.2g}")
        if (busiest := record.get("busiest_expert")) is not None:
            parts.append(f"busiest expert {busiest:.1f}x")
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
        if (share := record["model_flops_utilisation"]) is not None:
            parts.append(f"{share:.0%} of peak")
        if memory := peak_memory():
            parts.append(f"{memory / 1e9:.3g} GB")
        if skipped := record.get("skipped_steps"):
            parts.append(f"{skipped} skipped")
        return " | ".join(parts)

    def closing(self) -> str:
        """Returns the final line: the ratio reached, and advice if it is short of the target."""
        target = self._target
        # Skipped steps have no figures.
        counted = [each for each in self._last if not each.get("skipped")] or [*self._last]
        main = _mean(each["loss"] - each["compression_loss"] for each in counted)
        passed = duration(time.perf_counter() - self._began)
        steps = f"{self._total:,} steps"
        if self._done:
            steps = f"{self._total - self._done:,} more steps ({self._total:,} in all)"
        run = f"{steps}, {self._tokens:,} tokens and {passed}, {self._main} {main:.3g}"
        if target is None:
            return f"Trained for {run}."
        reached = _reached(counted, target)
        line = (
            f"Reached ratio {reached:.2f} of {target:.2f} in {run}. Tokens within the "
            "window do not count, so the cache as a whole can shrink less."
        )
        if reached >= _REACHED * target:
            return line
        return (
            f"{line} Short of the target: train on at this ratio (more steps, or a last stage "
            "'train'), raise adapter_learning_rate, or raise compression_weight; tokens within "
            "the window never leave, so longer sequences help too where the window is a large part "
            "of them."
        )


def short_of_target(model: pathlib.Path) -> tuple[float, float] | None:
    """Returns the ratio that a run reached and its target; None if it reached the target.

    Args:
      model: the model directory of a run, whose log lies beside it; None is returned for others.
    """
    path = model.parent / "log.jsonl"
    if model.name != "model" or not path.is_file():
        return None
    last: collections.deque[str] = collections.deque(maxlen=_MEAN_OVER)
    with path.open(encoding="utf-8", errors="replace") as file:
        last.extend(file)
    try:
        records = [json.loads(line) for line in last]
        counted = [each for each in records if not each["skipped"]]
        target = float(counted[-1]["target_ratio"])
        reached = _reached(counted, target)
    except (ValueError, KeyError, TypeError, IndexError):  # another log, or a damaged one
        return None
    return None if target <= 1 or reached >= _REACHED * target else (reached, target)


def _reached(records: Sequence[Mapping[str, Any]], target: Number) -> float:
    """Returns the ratio that was reached in the last of these steps.

    It is 1 / the mean share of tokens kept, over the steps whose target is about the last one's.
    """
    final = min(target, records[-1]["target_ratio"]) * _REACHED
    evicted = [each["evicted"] for each in records if each["target_ratio"] >= final]
    return 1 / max(1 - _mean(evicted), 1e-6)


class _Bar(Progress):
    """A bar with a line of figures below it."""

    details = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.details)


def opening_line(
    recipe: Recipe, policy: Policy, parameters: Mapping[str, jax.Array], done: int
) -> str:
    """Returns a line with the trained parameters, the devices, and the length of the run.

    Args:
      recipe: the recipe of the run.
      policy: the policy.
      parameters: the trained parameters, on their devices.
      done: steps already done.
    """
    count = sum(x.size for x in parameters.values())
    devices = sorted(next(iter(parameters.values())).sharding.device_set, key=lambda x: x.id)
    total = recipe.total_steps(policy)
    ratio = aim(recipe, policy)
    goal = "" if ratio is None else f" to ratio {ratio:g}"
    sizes = sorted({recipe.batch_of(stage) for stage in recipe.stages_for(policy)})
    learned = ", of which answers alone are learned" if recipe.answers_only else ""
    resumed = f", from step {done:,} on" if done else ""
    return (
        f"Training {TRAINED[recipe.trained_for(policy)]}, {_scaled(count)} parameters, for "
        f"{short(policy)} on {len(devices)} {devices[0].device_kind}: {total:,} steps{goal} of "
        f"{' and '.join(f'{size:,}' for size in sizes)} x {recipe.sequence_length:,} tokens, "
        f"{_scaled(recipe.total_tokens(policy))} tokens in all{learned} ({recipe.name}){resumed}"
    )


def aim(recipe: Recipe, policy: Policy) -> Number | None:
    """Returns the compression ratio that a run aims at.

    None without evictions, and for scorers (KVzap), whose threshold is set afterwards.
    """
    ratio = recipe.compression_ratio
    return ratio if policy.retrofit.possible and ratio > 1 else None


def short(policy: Policy) -> str:
    """Returns the text of a policy, without options that have their default.

    # In: DMS(window=16, source="query_neuron", ...)  Out: DMS(window=16)
    """
    told = [
        f"{field.name}={getattr(policy, field.name)!r}"
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != field.default
    ]
    return f"{policy.name}({', '.join(told)})"


def peak_memory() -> int | None:
    """Returns the peak bytes in use on the first device; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _scaled(count: int) -> str:
    """Returns a count in a few digits.

    # In: 1_235_814_400  Out: 1.24B
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def duration(seconds: float) -> str:
    """Returns a time in a few digits.

    # In: 4000  Out: 1.1 hours
    """
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
