"""The pictures of the page: few series, names at their ends, errors drawn.

matplotlib is imported where it is used.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from dms_jax.analysis.labels import label_heights
from dms_jax.evaluation import Measured
from experiments.reproduction.real.plan import Job
from experiments.reproduction.real.results import TASKS, Results, score
from experiments.reproduction.real.systems import MAIN, QWEN, SHIPPED, SMOLLM2, TRAININGS, VANILLA

# Colours that the usual kinds of colour blindness tell apart.
_COLOURS = ("#c0392b", "#2471a3", "#7d8c2f", "#8e44ad", "#b9770e", "#222222")
_DPI = 130


def _end(name: str) -> str:
    training = TRAININGS[name]
    return Job("asking", training.model, name, f"{training.ratio:g}").label


_GSM8K = {
    "DMS, all weights": (_end(MAIN), _end("all-w64")),
    "DMS, ramp to 8": ("ramp-to-8-at2", "ramp-to-8-at4", "ramp-to-8-at8"),
    "ExpectedAttention": ("expected-half-more", "expected", "expected-mean"),
    "TOVA": ("tova-half-more", "tova", "tova-mean"),
    "StreamingLLM": ("streaming", "streaming-mean"),
    "SnapKV": ("snapkv",),
}
_SMOLLM2 = {
    "DMS, adapter": _end(SHIPPED),
    "DMS, all weights": _end("smollm2-all-w16"),
    "ExpectedAttention": "expected",
    "TOVA": "tova",
    "StreamingLLM": "streaming",
    "trained further": _end("smollm2-control"),
}
_TASK_LABELS = ("HellaSwag", "ARC easy", "ARC challenge", "PIQA", "needles")


def draw(results: Results, folder: pathlib.Path) -> set[str]:
    """Draws what there are figures for; the names of the files."""
    drawn = set()
    if results.get(QWEN, VANILLA, "gsm8k"):
        _gsm8k(results, folder / "gsm8k.png")
        drawn.add("gsm8k.png")
    if any(results.mean_gap(label, VANILLA) for label in _SMOLLM2.values()):
        _smollm2(results, folder / "smollm2.png")
        drawn.add("smollm2.png")
    return drawn


def _gsm8k(results: Results, path: pathlib.Path) -> None:
    """Accuracy against the peak of live tokens."""
    figure, axes = _axes()
    vanilla = results.records[QWEN, VANILLA, "gsm8k"]
    level = 100 * score(vanilla).value
    axes.axhline(level, color="#999999", linestyle=":", linewidth=1)
    axes.annotate(
        f"all tokens ({vanilla['peak']:.0f})",
        (1, level),
        (-4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color="#777777",
    )
    ends = []
    for (name, labels), colour in zip(_GSM8K.items(), _COLOURS, strict=True):
        found = [results.get(QWEN, label, "gsm8k") for label in labels]
        points = sorted((each["peak"], score(each)) for each in found if each)
        if not points:
            continue
        _errorbar(axes, [x for x, _ in points], [each for _, each in points], colour)
        ends.append((points[-1][0], 100 * points[-1][1].value, name, colour))
    axes.set_ylim(0, 1.12 * max(level, 1, *(y for _, y, _, _ in ends)))
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.3 * (high - low))
    _names(axes, ends, 0.012 * (high - low))
    axes.set_xlabel("peak tokens in the cache, mean over layers and heads")
    axes.set_ylabel("GSM8K, %")
    axes.set_title("Qwen2.5-Coder-0.5B-Instruct, greedy answers from the paged cache")
    figure.savefig(path, dpi=_DPI)


def _smollm2(results: Results, path: pathlib.Path) -> None:
    """Differences from the model itself, task by task, at equal live tokens."""
    figure, axes = _axes()
    axes.axhline(0, color="#999999", linestyle=":", linewidth=1)
    ends = []
    for (name, label), colour in zip(_SMOLLM2.items(), _COLOURS, strict=True):
        gaps = [results.gap(SMOLLM2, label, VANILLA, task) for task in TASKS]
        known = {place: gap for place, gap in enumerate(gaps) if gap is not None}
        if known:
            _errorbar(axes, list(known), list(known.values()), colour)
            ends.append((max(known), 100 * known[max(known)].value, name, colour))
    axes.set_xticks(range(len(TASKS)), _TASK_LABELS)
    axes.set_xlim(-0.3, len(TASKS) + 0.4)
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
        marker="o",
        markersize=4,
        capsize=2,
    )


def _names(axes: Any, ends: list[tuple[float, float, str, str]], beside: float) -> None:
    low, high = axes.get_ylim()
    heights = label_heights([(x, y) for x, y, _, _ in ends], 0.055 * (high - low), log=False)
    for (x, _, name, colour), height in zip(ends, heights, strict=True):
        axes.text(x + beside, height, name, color=colour, va="center")
