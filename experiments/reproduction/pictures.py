"""The pictures of the evidence pages, drawn from the records by `claims --write`."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

from dms_jax.evaluation import Hyperscaling, Measured, mean_over_seeds
from experiments.reproduction.records import mean_of, points, record, rows, scores

COLOURS = {  # the same on every picture
    "plain": "#222222",
    "control": "#8a8a8a",
    "DMS": "#c0392b",
    "KVpop": "#8e44ad",
    "KVzap": "#b9770e",
    "ExpectedAttention": "#2471a3",
    "SnapKV": "#148f77",
    "TOVA": "#7d8c2f",
    "H2O": "#5d6d7e",
    "StreamingLLM": "#d68910",
}
Curves = dict[str, tuple[str, ...]]  # name -> systems


def draw_curves(path: pathlib.Path, *, name: str, title: str, curves: Curves) -> None:
    """Draws GSM8K scores against the peak of live tokens, one curve per method.

    Systems missing from the record are left out.
    """
    from matplotlib.figure import Figure

    known = {row["system"] for row in record(name)["rows"] if row["measure"] == "gsm8k"}
    known |= set(record(name).get("groups", {}))

    def point(system: str) -> tuple[float, Measured]:
        """The peak, and the score in percent."""
        score = mean_over_seeds(scores(name, system, "gsm8k"))
        percent = Measured(100 * score.value, 100 * score.error)
        return mean_of("peak", name, system, "gsm8k"), percent

    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.subplots()
    peak, base = point("plain")
    drawn = [(peak, base)]
    axes.axhline(base.value, color=COLOURS["plain"], linewidth=1, linestyle=":")
    axes.errorbar([peak], [base.value], yerr=[base.error], color=COLOURS["plain"], marker="s")
    axes.annotate("the model itself, greedy", (peak, base.value), (-8, 8), ha="right",
                  textcoords="offset points", color=COLOURS["plain"])  # fmt: skip
    for method, systems in curves.items():
        found = [point(each) for each in systems if each.partition(":")[0] in known]
        if not found:
            continue
        found.sort(key=lambda each: each[0])
        drawn += found
        axes.errorbar(
            [x for x, _ in found],
            [y.value for _, y in found],
            yerr=[y.error for _, y in found],
            color=COLOURS[method],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=2 if method == "DMS" else 1.1,
            label=method,
        )
    least = min(x for x, _ in drawn) / 1.07
    prompt = 105  # tokens of a question with Qwen's template, on average
    if least < prompt:
        axes.axvspan(least, prompt, color="#000000", alpha=0.05, linewidth=0)
        axes.text(prompt - 1, 0.6, "the prompt alone", ha="right", fontsize=8, color="#555555")
    axes.set_xscale("log")
    axes.set_xlim(least, 1.09 * max(x for x, _ in drawn))
    ticks = [each for each in (64, 80, prompt, 127, 200, 300) if least < each < 0.9 * peak]
    ticks.append(round(peak))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, max(1.0, 1.13 * max(y.value for _, y in drawn)))
    axes.set_xlabel(
        f"peak of live tokens, mean over layers and heads (the model itself: {peak:.0f})"
    )
    count = len(rows(name, "plain", "gsm8k")[-1]["scores"])
    axes.set_ylabel(f"GSM8K, % of {count:,} problems, greedy")
    axes.set_title(title)
    axes.legend(loc="lower right", fontsize=8, ncols=2)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def draw_frontier(
    path: pathlib.Path, *, name: str, title: str, systems: dict[str, str], measure: str = "gsm8k"
) -> None:
    """Draws votes against reads and peak, with the greedy chain of every system.

    Args:
      path: the picture.
      name: of the record.
      title: of the picture.
      systems: name in the picture by system of the record.
      measure: the task.
    """
    from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure

    found = points(name, tuple(systems), measure)
    renamed = [dataclasses.replace(each, system=systems[each.system]) for each in found.points]
    hyperscaling_figure(path, Hyperscaling({}, tuple(renamed)), title=title)


def _frontier_of_1_5b(task: str, measure: str, longest: str) -> Callable[..., None]:
    return functools.partial(
        draw_frontier,
        name="1.5b",
        title=f"{task}, Qwen2.5-Coder-1.5B, answers of at most {longest} tokens",
        systems={"plain": "plain", "text-3.3:*": "DMS, 3.0x"},
        measure=measure,
    )


PICTURES: dict[str, Callable[..., None]] = {  # by path in the results: draws a record into a file
    "real_models/gsm8k.png": functools.partial(
        draw_curves,
        name="0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct: DMS holds a third of the tokens (nine trainings "
        "pooled there)",
        curves={
            "DMS": ("nine", "low-rank@2", "low-rank-to-8@8:*", "low-rank-to-4@4:*"),
            "KVpop": ("kvpop@2", "kvpop", "kvpop@4", "kvpop@8"),
            "KVzap": ("kvzap@2", "kvzap", "kvzap@4", "kvzap@8"),
            "ExpectedAttention": (
                *("expected-attention@2", "expected-half-more", "expected-attention"),
                *("expected-attention@4", "expected-attention@8"),
            ),
            "SnapKV": ("snapkv@2", "snapkv", "snapkv@4", "snapkv@8"),
            "TOVA": ("tova@2", "tova-half-more", "tova", "tova@4", "tova@8"),
            "H2O": ("h2o@2", "h2o", "h2o@4", "h2o@8"),
            "StreamingLLM": (
                *("streamingllm@2", "streamingllm", "streamingllm@4", "streamingllm@8"),
            ),
        },
    ),
    "real_models/frontier.png": functools.partial(
        draw_frontier,
        name="0.5b",
        title="GSM8K, Qwen2.5-Coder-0.5B, answers of at most 400 tokens",
        systems={
            "plain:8": "plain",
            "control:8": "trained further",
            "from-attention:8": "DMS, 3.0x",
        },
    ),
    "real_models/frontier-gsm8k-1.5b.png": _frontier_of_1_5b("GSM8K", "gsm8k", "200 or 400"),
    "real_models/frontier-math500-1.5b.png": _frontier_of_1_5b(
        "MATH-500", "math500", "256, 512, 1,024 or 2,048"
    ),
}
