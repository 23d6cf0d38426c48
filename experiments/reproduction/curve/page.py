"""The page of the first curve: verdicts by tests on the numbers, tables, commands, time."""

import dataclasses
import pathlib
import textwrap
from typing import Any

from dms_jax.evaluation import Measured, percent
from dms_jax.json_text import json_text
from experiments.reproduction.curve import figure
from experiments.reproduction.curve.analysis import Axis, Results
from experiments.reproduction.curve.plan import (
    FURTHER,
    LONGEST,
    TASKS,
    TRAINING_FREE,
    Config,
    Paths,
    jobs,
)
from experiments.reproduction.files import command, provenance, read_json, wrap, write_text
from experiments.reproduction.runs import BASE

RIVALS = ("TOVA", "StreamingLLM")
MARGIN = 0.02  # of the control, within which DMS at ratio 4 is to stay
# Where and how a machine did it, which is no setting of what was measured.
_ELSEWHERE = {"out", "pages", "pack", "processes", "deadline_minutes", "only", "model"}


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Writes README.md, figure.png and results.json. The folder's notes.md ends the page."""
    results = Results(config)
    folder.mkdir(parents=True, exist_ok=True)
    data = summary(config, results)
    figure.draw(data, folder / "figure.png")
    write_text(folder / "results.json", json_text(data, indent=1) + "\n")
    notes = folder / "notes.md"
    parts = [
        _head(config, data),
        _verdicts(data),
        _tables(results),
        _equal_budget(data),
        _frontiers(data),
        _training(config),
        _time(config, data),
        notes.read_text(encoding="utf-8").strip() if notes.exists() else "",
    ]
    write_text(folder / "README.md", wrap("\n\n".join(filter(None, parts))) + "\n")


def summary(config: Config, results: Results) -> dict[str, Any]:
    """Everything the page says, as JSON data."""
    ratios = [ratio for ratio in config.ratios if ratio > 1]
    names = results.variants
    control, vanilla = (
        {
            name: {
                f"{ratio:g}": {
                    task: _pair(results.against_dense(name, ratio, task, dense))
                    for task in config.asked
                }
                for ratio in ratios
            }
            for name in names
        }
        for dense in (results.control, "vanilla")
    )
    equal = {
        axis: {
            name: {
                f"{ratio:g}": {
                    rival: {
                        task: _pair(results.against(name, ratio, rival, task, axis))
                        for task in config.asked
                    }
                    for rival in TRAINING_FREE
                }
                for ratio in ratios
            }
            for name in names
        }
        for axis in ("peak", "reads")
    }
    best = results.best
    gains = {
        axis: {
            rival: {
                task: results.average_gain(best, rival, task, axis) if best else None
                for task in config.asked
            }
            for rival in TRAINING_FREE
        }
        for axis in ("peak", "reads")
    }
    records = [
        record for job in jobs(config) if (record := read_json(Paths(config).log(job))) is not None
    ]
    settings = {key: value for key, value in vars(config).items() if key not in _ELSEWHERE}
    return {
        **_provenance(records),
        "model": pathlib.Path(config.model or BASE).name,
        "settings": settings,
        "tasks": {name: [t.to_dict() for t in task] for name, task in config.tasks().items()},
        "job_seconds": sum(record["seconds"] for record in records),
        "best_dms": best,
        "control": results.control,
        "points": [point.to_dict() for point in results.points.values()],
        "against_control": control,
        "against_vanilla": vanilla,
        "at_equal": equal,
        "average_gain": gains,
    }


def _provenance(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Where and when the jobs ran; the page may be written elsewhere and later."""
    here = {"device": "unknown", **provenance()}
    return {
        name: next((record[name] for record in records if name in record), value)
        for name, value in here.items()
    }


# A figure and its standard error, which of a single problem is not known.
Pair = list[float | None]


def _pair(measured: Measured | None) -> Pair | None:
    return None if measured is None else measured.to_list()


def _points(pair: Pair | None) -> str:
    """A difference in points of accuracy, with its standard error."""
    if pair is None:
        return "-"
    value, error = pair
    assert value is not None
    return f"{100 * value:+.1f} ± {'unknown' if error is None else f'{100 * error:.1f}'}"


def _head(config: Config, data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"""# The first curve

Accuracy against what the cache held (peak live tokens) and what was read (KV reads), both measured,
for one small model of our own and several ways to keep its cache. Every token was decoded from the
real paged cache. Problems are of the {config.split} split. Reasoning: a third each of linear
equations, arithmetic and word chains, {config.problems} problems, chains a problem:
{config.chains}. Needle, tracking: RULER's single needle and variable tracking,
{config.retrieval_problems} problems each, one chain, near 1000 tokens. Temperature
{config.temperature:g}.

Device: {data["device"]}; {versions}; {data["date"]}. Written by
`experiments/reproduction/first_curve.py`, the verdicts too; they are tests on the
numbers. Figures of one chain are means over seeds (retrofit
seeds for what was trained, seeds of the draws for what was not); ± is one standard error, which
holds both the choice of problems (clustered) and the spread of the seeds. Differences are paired by
problem. Compression settings are targets of training, or fractions of vanilla's live tokens; what
was reached is in the columns beside them. Peak and reads are those of one chain, averages over
layers and heads.

![accuracy against peak and reads](figure.png)"""


def _verdicts(data: dict[str, Any]) -> str:
    """What was claimed, and whether the numbers bear it out."""
    best, control = data["best_dms"], data["control"]
    if best is None:
        return (
            "## What holds\n\nNo DMS variant has been chosen yet: at ratio 4 none has answered "
            "both the problems of the page and the validation problems that decide the choice."
        )
    name = data["settings"]["asked"][0]
    elected = [point for point in data["points"] if point["task"] == f"choice_{name}"]
    seeds = max(len(point["seeds"]) for point in elected)
    figures = ", ".join(
        f"`{point['system']}` {percent([point['accuracy'], point['error']])}"
        for point in sorted(elected, key=lambda point: point["accuracy"], reverse=True)
        if len(point["seeds"]) == seeds
    )
    lines = ["## What holds and what does not", ""]
    lines.append(
        f"DMS is `{best}`; the control is `{control}`. The variant was chosen on "
        f"{elected[0]['problems']} {name} problems of the validation split, which nothing on this "
        "page is judged on: of the variants with the most seeds it has the highest accuracy at "
        f"ratio 4 there ({figures}). All variants are in the tables."
    )
    lines.append("")
    dense = {control: data["against_control"], "vanilla": data["against_vanilla"]}
    for name, table in dense.items():
        for task in ("reasoning", "needle"):
            pair = table[best].get("4", {}).get(task)
            lines.append(f"- {_within(task, pair, name)}")
    for ratio in ("4", "8"):
        for rival in RIVALS:
            table = data["at_equal"]["peak"][best].get(ratio, {}).get(rival, {})
            lines.append(f"- {_above(ratio, rival, table)}")
    return "\n".join(lines)


def _within(task: str, pair: Pair | None, control: str) -> str:
    claim = f"DMS at ratio 4 within {100 * MARGIN:.0f} points of {control} on {task}"
    if pair is None:
        return f"{claim}: **not measured**."
    value, error = pair
    if value is None or error is None:
        return f"{claim}: **not to be told from a single problem** ({_points(pair)})."
    if value - 2 * error > -MARGIN:
        verdict = "holds"
    elif value > -MARGIN:
        verdict = "holds on the mean, but two standard errors reach beyond"
    elif value + 2 * error > -MARGIN:
        verdict = "does not hold on the mean; two standard errors would reach it"
    else:
        verdict = "does not hold"
    return f"{claim}: **{verdict}** ({_points(pair)})."


def _above(ratio: str, rival: str, table: dict[str, Pair | None]) -> str:
    measured: dict[str, tuple[float, float]] = {}
    for task, pair in table.items():
        value, error = pair or (None, None)
        if value is not None and error is not None:
            measured[task] = value, error
    won = [task for task, (value, error) in measured.items() if value > 2 * error]
    lost = [task for task, (value, error) in measured.items() if value < -2 * error]
    unknown = len(TASKS) - len(measured)
    if len(won) >= 2:
        verdict = "holds"
    elif measured and len(won) + unknown < 2:
        verdict = "does not hold"
    else:  # a task was not asked, or the rival was not measured with so few tokens
        verdict = "not measured on enough tasks"
    figures = ", ".join(f"{task} {_points(pair)}" for task, pair in table.items()) or "-"
    text = (
        f"DMS at ratio {ratio} above {rival} at equal live tokens by more than two standard errors "
        f"on at least two tasks: **{verdict}** ({figures})."
    )
    return f"{text} Below it on {' and '.join(lost)}." if lost else text


def _tables(results: Results) -> str:
    parts = ["## Every point"]
    for task in results.config.asked:
        header = "| system | setting | seeds | one chain, % | vote, % | peak | reads | ratio | "
        lines = [f"### {task}", "", header + "new tokens | ended |"]
        lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        for system in ("vanilla", FURTHER, *results.variants, *TRAINING_FREE):
            for point in results.of(system, task):
                lines.append(
                    f"| {system} | {point.setting:g} | {len(point.seeds)} | "
                    f"{percent(point.accuracy.to_list())} | "
                    f"{100 * point.voted:.1f} | {point.peak:,.0f} | {point.reads:,.0f} | "
                    f"{point.ratio:.2f} | {point.new_tokens:,.0f} | {point.ended:.0%} |"
                )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _equal_budget(data: dict[str, Any]) -> str:
    """Every variant against the control, and against its rivals at equal measured budget."""
    parts = [
        "## DMS against the control and, at equal budget, against what needs no training",
        "Differences in points. The rival's accuracy at the budget of the DMS point is "
        "interpolated linearly in the logarithm of the budget between its two neighbouring points; "
        "`-` is outside what was measured.",
    ]
    axes: tuple[Axis, ...] = ("peak", "reads")
    for task in data["settings"]["asked"]:
        columns = [f"{rival}, equal {axis}" for axis in axes for rival in TRAINING_FREE]
        header = f"| variant | ratio | control | vanilla | {' | '.join(columns)} |"
        lines = [f"### {task}", "", header, "|---" + "|---:" * (3 + len(columns)) + "|"]
        for name, ratios in data["against_control"].items():
            for ratio, control in ratios.items():
                vanilla = data["against_vanilla"][name][ratio]
                cells = [_points(control[task]), _points(vanilla[task])]
                for axis in axes:
                    for rival in TRAINING_FREE:
                        cells.append(_points(data["at_equal"][axis][name][ratio][rival][task]))
                if any(cell != "-" for cell in cells):
                    lines.append(f"| {name} | {ratio} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _frontiers(data: dict[str, Any]) -> str:
    if data["best_dms"] is None:
        return ""
    lines = [
        "## Average gain between Pareto frontiers",
        "",
        f"As in tables 10 and 11 of the DMS paper, for `{data['best_dms']}`, in points: the mean "
        "gap between linearly interpolated frontiers over the budgets that both cover; NA where "
        "there are none.",
        "",
        f"| against | axis | {' | '.join(data['settings']['asked'])} |",
        "|---|---|" + "---:|" * len(data["settings"]["asked"]),
    ]
    for axis, rivals in data["average_gain"].items():
        for rival, gains in rivals.items():
            cells = [
                "NA" if gains[t] is None else f"{100 * gains[t]:+.1f}"
                for t in data["settings"]["asked"]
            ]
            lines.append(f"| {rival} | {axis} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _training(config: Config) -> str:
    paths = Paths(config)
    text = (
        f"The base model wrote {config.documents:,} documents itself: prompts of the train split, "
        f"completions at temperature {config.document_temperature:g}, right or wrong. Every run "
        f"takes {config.batch_size} sequences of {config.sequence_length} tokens a step, AdamW at "
        f"{config.learning_rate:g} (adapter {config.adapter_learning_rate:g}), "
        f"{config.steps_per_ratio} steps a unit of compression ratio after {config.decay_steps} "
        "steps in which the borrowed neuron fades (none with an adapter). The control takes the "
        f"steps, rates and tokens of `{LONGEST.name}`, {config.total_steps():,} steps, on the "
        "language modelling loss. A snapshot of DMS at a ratio below the highest has taken fewer."
    )
    lines = [
        "## Training",
        "",
        textwrap.fill(text, 100),
        "",
        "| run | steps | tokens | tokens/s | s | share to evict at the end | distillation loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for job in jobs(config):
        record = read_json(paths.training(job))
        if record is None or not record["steps"]:
            continue
        last = record["steps"][-1]
        rates = sorted(step["tokens_per_second"] for step in record["steps"])
        lines.append(
            f"| {job.name} | {last['step']} | {last['step'] * last['tokens']:,} | "
            f"{rates[len(rates) // 2]:,.0f} | {record['seconds']:.0f} | {last['evicted']:.3f} | "
            f"{last['distillation_loss']:.4f} |"
        )
    return "\n".join(lines) if len(lines) > 5 else ""


def _time(config: Config, data: dict[str, Any]) -> str:
    paths = Paths(config)
    left = [job.name for job in jobs(config) if job.kind != "data" and not paths.done(job)]
    failed = sorted(path.stem for path in (paths.root / "failed").glob("*.txt"))
    text = f"""## Reproduce

{command("python -m experiments.reproduction.first_curve", [*_options(config), "--processes 8"])}

    python -m experiments.reproduction.first_curve --only report --pages FOLDER

All settings are in results.json. The jobs took {data["job_seconds"] / 60:.1f} minutes in all, with
compilation; where workers shared a GPU, the minutes of each are counted."""
    if left:
        text += f"\n\nNot done: {', '.join(left)}."
    if failed:
        text += f"\n\nFailed: {', '.join(failed)}."
    return text


def _options(config: Config) -> list[str]:
    """Every setting as options of the command line, but for places and processes.

    The defaults too: they may be others when the command is given again.
    """
    options = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _ELSEWHERE or value is None or value == ():
            continue
        values = value if isinstance(value, tuple) else (value,)
        options.append(f"--{field.name.replace('_', '-')} {' '.join(map(str, values))}")
    return options
