"""The pictures of the page: few series, names at their ends, errors drawn.

matplotlib is imported where it is used.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure
from dms_jax.analysis.labels import label_heights
from dms_jax.evaluation import Measured
from experiments.reproduction.real.results import TASKS, Results, end_of, score
from experiments.reproduction.real.systems import CONTROL, FRONTIER, SHIPPED, TRAININGS, VANILLA
from experiments.reproduction.real.training import QWEN, SMOLLM2

# Colours that the usual kinds of colour blindness tell apart.
_COLOURS = ("#c0392b", "#2471a3", "#7d8c2f", "#8e44ad", "#b9770e", "#222222")
_DPI = 130


# What holds everything is dark, what learned red, what needs no training blue.
_FREE = {
    "ExpectedAttention": ("expected", _COLOURS[1]),
    "H2O": ("h2o", _COLOURS[1]),
    "TOVA": ("tova", _COLOURS[1]),
    "StreamingLLM": ("streaming", _COLOURS[1]),
    "SnapKV": ("snapkv", _COLOURS[1]),
}
_SMOLLM2 = {
    "DMS, adapter": end_of(SHIPPED),
    "DMS, low rank": end_of("smollm2-low-rank-w16"),
    "ExpectedAttention": "expected",
    "TOVA": "tova",
    "StreamingLLM": "streaming",
    "trained further": end_of("smollm2-control"),
}
_TASK_LABELS = ("HellaSwag", "ARC easy", "ARC challenge", "PIQA", "needles")


def draw(results: Results, folder: pathlib.Path) -> set[str]:
    """Draws what there are figures for; the names of the files."""
    drawn = set()
    if results.get(QWEN, VANILLA, "gsm8k"):
        _gsm8k(results, folder / "gsm8k.png")
        drawn.add("gsm8k.png")
    judged = end_of(results.judged)
    run = (results.get(QWEN, judged, FRONTIER) or {}).get("run")
    points = results.frontier({VANILLA: "vanilla", judged: "DMS"}, run)
    if points is not None:
        hyperscaling_figure(
            folder / "frontier.png", points, title="GSM8K by vote, at equal reads and equal peak"
        )
        drawn.add("frontier.png")
    gaps = [results.mean_gap(label, VANILLA) for label in _SMOLLM2.values()]
    if sum(gap is not None for gap in gaps) > 1:  # else a row of the table says it
        _smollm2(results, folder / "smollm2.png")
        drawn.add("smollm2.png")
    return drawn


def _gsm8k(results: Results, path: pathlib.Path) -> None:
    """Accuracy of each method, with its peak of live tokens beside the name."""
    figure, axes = _axes()
    shown = {
        "the model itself": (VANILLA, _COLOURS[5]),
        "trained further": (end_of(CONTROL), _COLOURS[5]),
        "DMS": (end_of(results.judged), _COLOURS[0]),
        "DMC": (end_of("dmc"), _COLOURS[0]),
        "KVzap": (end_of("kvzap"), _COLOURS[0]),
        "KVpop": (end_of("kvpop"), _COLOURS[0]),
        **_FREE,
    }
    found = [
        (name, results.records[QWEN, label, "gsm8k"], colour)
        for name, (label, colour) in shown.items()
        if results.get(QWEN, label, "gsm8k")
    ]
    for place, (_, record, colour) in enumerate(found):
        own = score(record)
        told: dict[str, Any] = dict(color=colour, marker="o", markersize=6, capsize=3)
        axes.errorbar([100 * own.value], [place], xerr=[100 * own.error], **told)
        beside = 100 * (own.value + own.error)
        axes.annotate(
            f"{100 * own.value:.1f}",
            (beside, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    names = [
        f"{name}, {record['peak']:.0f} tokens{_less(record)}"
        + (f" (run {record['run']})" if record["run"] != results.main else "")
        for name, record, _ in found
    ]
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(100 * score(record).value + 1 for _, record, _ in found))
    axes.set_xlabel("GSM8K, % of 1,319 problems" if _whole(found) else "GSM8K, %")
    figure.suptitle("Qwen2.5-Coder-0.5B-Instruct: accuracy, and the peak of live tokens")
    figure.savefig(path, dpi=_DPI)


def _less(record: dict[str, Any]) -> str:
    """Says that a training had fewer tokens than the judged one."""
    training = TRAININGS.get(record["system"]) if "system" in record else None
    return f",\n{training.share:g} of the training" if training and training.share < 1 else ""


def _whole(found: list[Any]) -> bool:
    return all(len(record["per_problem"]["scores"]) == 1319 for _, record, _ in found)


def _smollm2(results: Results, path: pathlib.Path) -> None:
    """Differences from the model itself, task by task, at equal live tokens."""
    figure, axes = _axes()
    axes.plot([-0.5, len(TASKS) - 0.6], [0, 0], color="#999999", linestyle=":", linewidth=1)
    ends = []
    for number, ((name, label), colour) in enumerate(zip(_SMOLLM2.items(), _COLOURS, strict=True)):
        gaps = [results.gap(SMOLLM2, label, VANILLA, task) for task in TASKS]
        beside = 0.12 * (number - (len(_SMOLLM2) - 1) / 2)
        known = {place + beside: gap for place, gap in enumerate(gaps) if gap is not None}
        if known:
            _errorbar(axes, list(known), list(known.values()), colour)
            ends.append((len(TASKS) - 0.65, 100 * known[max(known)].value, name, colour))
    axes.set_xticks(range(len(TASKS)), _TASK_LABELS)
    axes.set_xlim(-0.5, len(TASKS) + 0.6)
    _names(axes, ends, 0.1)
    axes.set_ylabel("points above the model itself")
    axes.set_title("SmolLM2-135M-Instruct, as many live tokens as DMS at a nominal ratio of 4")
    figure.savefig(path, dpi=_DPI)


def _axes() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _errorbar(axes: Any, places: Sequence[float], values: Sequence[Measured], colour: str) -> None:
    axes.errorbar(
        places,
        [100 * each.value for each in values],
        yerr=[100 * each.error for each in values],
        color=colour,
        linestyle="none",
        marker="o",
        markersize=4,
        capsize=2,
    )


def _names(axes: Any, ends: list[tuple[float, float, str, str]], beside: float) -> None:
    low, high = axes.get_ylim()
    heights = label_heights([(x, y) for x, y, _, _ in ends], 0.055 * (high - low), log=False)
    for (x, _, name, colour), height in zip(ends, heights, strict=True):
        axes.text(x + beside, height, name, color=colour, va="center")
