"""The table of the sweep, and what it says, from the figures."""

from collections.abc import Sequence
from typing import Any

from dms_jax.evaluation import Measured
from experiments.reproduction.claims.cells import percent, table
from experiments.reproduction.real.names import name_of, shown
from experiments.reproduction.real.results import Results, end_of, score
from experiments.reproduction.real.sweep import CENTRE, SWEEPS
from experiments.reproduction.real.systems import VANILLA
from experiments.reproduction.real.training import QWEN, Training

_SAME_PEAK = 0.05  # share by which two peaks may differ that are called the same


def sweep(results: Results) -> str:
    """Each setting that was tried, beside the middle of the sweep."""
    rows = []
    for training, log in _tried(results):
        label = end_of(training.name)
        record = results.of_run(log["run"], QWEN, label, "gsm8k")
        said = shown(results, label, log)
        rows.append(
            [
                f"**{said}**" if training == CENTRE else said,
                f"{log['documents']:,}",
                f"{log['tokens'] / 1e6:.1f}",
                f"{log['held_out']['distillation']:.4f}",
                f"{1 / (1 - min(log['steps'][-1]['evicted'], 0.999)):.2f}",
                f"{record['peak']:.0f}" if record else "-",
                percent(score(record)) if record else "-",
                percent(_to_the_middle(results, training), sign=True),
                percent(results.gap(QWEN, label, VANILLA, "gsm8k", log["run"]), sign=True),
            ]
        )
    heads = ["", "documents", "M tokens", "divergence", "reached", "peak", "GSM8K, %"]
    return table([*heads, "to the first", "to vanilla"], rows)


def sweep_said(results: Results) -> str:
    """Which settings solve less than the middle of the sweep, more, or neither that can be told.

    Told is what is two standard errors away from it. A setting whose peak is another has it beside,
    and one of another run than the verdicts' that run, with whose middle it is compared.
    """
    middle = results.get(QWEN, end_of(CENTRE.name), "gsm8k")
    groups: dict[str, list[str]] = {"less": [], "more": [], "neither": []}
    for training, _ in _tried(results):
        gap = None if training == CENTRE else _to_the_middle(results, training)
        if gap is None or middle is None:
            continue
        told = abs(gap.value) > 2 * gap.error
        kind = "neither" if not told else "less" if gap.value < 0 else "more"
        record = results.records[QWEN, end_of(training.name), "gsm8k"]
        other = abs(record["peak"] / middle["peak"] - 1) > _SAME_PEAK
        beside = f", from a peak of {record['peak']:.0f}" if other else ""
        beside += f", run {record['run']}" if record["run"] != results.main else ""
        groups[kind] += [f"{_changed(training)} ({percent(gap, sign=True)}{beside})"]
    if middle is None or not any(groups.values()):
        return ""
    lines = [
        f"The first one solves {_middles(results)}. Two standard errors away from that of their "
        "own run are:",
        "",
        *(f"- {kind}: {'; '.join(groups[kind]) or 'none'}." for kind in ("less", "more")),
        f"- not told from it: {'; '.join(groups['neither']) or 'none'}.",
    ]
    return "\n".join(lines)


def _middles(results: Results) -> str:
    """What the middle of the sweep solves in each run that has it, and from which peak."""
    label, said = end_of(CENTRE.name), []
    for log in results.logs:
        record = results.of_run(log["run"], QWEN, label, "gsm8k")
        if log["training"] == CENTRE.name and record is not None:
            of = f" (run {log['run']})" if log["run"] != results.main else ""
            said.append(f"{percent(score(record))}% from a peak of {record['peak']:.0f}{of}")
    return ", ".join(said)


def _changed(training: Training) -> str:
    """What a setting of the sweep changes, in words.

    # In: the training "sweep-window-64"  Out: "window 64"
    """
    if training.words:
        return training.words
    words, middle = (name_of(end_of(each.name)).split(", ") for each in (training, CENTRE))
    return ", ".join(word for word in words if word not in middle)


def _tried(results: Results) -> Sequence[tuple[Training, dict[str, Any]]]:
    """The trainings of the sweep that there are, with the log of the last run that has them.

    The middle is there with the log of every run, since others are compared with it in their own.
    """
    found = []
    for training in (CENTRE, *SWEEPS):
        logs = [each for each in results.logs if each["training"] == training.name]
        found += [(training, log) for log in (logs if training == CENTRE else logs[:1])]
    return found


def _to_the_middle(results: Results, training: Training) -> Measured | None:
    """The paired difference to the middle of the sweep; None of itself."""
    if training == CENTRE:
        return None
    return results.gap(QWEN, end_of(training.name), end_of(CENTRE.name), "gsm8k")
