"""The page: every system at every setting, and differences from DMS at equal live tokens.

Live tokens are matched before anything is asked, and measured afterwards. What is left of a
difference is taken out along a system's own line: between its two settings accuracy (or loss) is
interpolated linearly in the logarithm of the peak, at the peak that DMS was measured to have.
Differences are paired by problem, and their errors are those of the interpolated scores.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from experiments.reproduction.evictions.plan import (
    RATIOS,
    SYSTEMS,
    VANILLA,
    WINDOW,
    Config,
    Paths,
    System,
)
from experiments.reproduction.files import error_text, read_json, wrap, write_json, write_text

REFERENCE = "dms"
_OF_A_CALL = ("out", "pages", "processes", "deadline_minutes", "only")
Point = tuple[float, np.ndarray]  # peak tokens, and a number for each problem
Results = dict[str, dict[float, dict[str, Any]]]


def collect(config: Config) -> Results:
    """Returns what was measured, by system and ratio."""
    paths, found = Paths(config), {}
    for name in SYSTEMS:
        ratios = (1.0,) if name == VANILLA else RATIOS
        known = {ratio: read_json(paths.result(name, ratio)) for ratio in ratios}
        if any(known.values()):
            found[name] = {ratio: result for ratio, result in known.items() if result}
    return found


def points(results: dict[float, dict[str, Any]], measure: str) -> list[Point]:
    """Returns the settings of a system for a measure, or for the loss of texts."""
    if measure == "text":
        return [
            (one["text"]["peak"], np.asarray(one["text"]["losses"])) for one in results.values()
        ]
    answers = [one["answers"][measure] for one in results.values()]
    return [(one["peak"], np.asarray(one["scores"])) for one in answers]


def at(known: list[Point], peak: float) -> np.ndarray | None:
    """Returns a system's numbers at a peak; None beyond a tenth outside of what was measured."""
    near = [point for point in known if abs(np.log(point[0] / peak)) < 0.03]
    if near:
        return near[0][1]
    known = sorted(known, key=lambda point: point[0])
    if len(known) < 2 or not known[0][0] / 1.1 <= peak <= known[-1][0] * 1.1:
        return None
    (low, first), (high, last) = known[0], known[-1]
    part = np.log(peak / low) / np.log(high / low)
    return first + part * (last - first)


def compare(results: Results) -> list[dict[str, Any]]:
    """Returns the difference of every system from DMS at DMS's peak, with its error."""
    rows = []
    for ratio in RATIOS:
        if ratio not in results.get(REFERENCE, {}):
            continue
        for measure in ("text", *results[REFERENCE][ratio]["answers"]):
            ((peak, reference),) = points({ratio: results[REFERENCE][ratio]}, measure)
            for name, known in results.items():
                numbers = None
                if name == VANILLA:
                    ((_, numbers),) = points(known, measure)  # at its own tokens
                elif name != REFERENCE:
                    numbers = at(points(known, measure), peak)
                if numbers is None:
                    continue
                change = numbers - reference
                rows.append(
                    {
                        "system": name,
                        "ratio": ratio,
                        "measure": measure,
                        "peak": peak,
                        "difference": float(change.mean()),
                        "error": float(change.std(ddof=1) / np.sqrt(len(change))),
                    }
                )
    return rows


def spread(kept: list[list[float]]) -> dict[str, float]:
    """Returns how unevenly heads keep: the least, the most, and what the largest quarter holds."""
    shares = np.sort(np.ravel(kept))
    quarter = max(1, len(shares) // 4)
    return {
        "least": float(shares[0]),
        "most": float(shares[-1]),
        "largest_quarter": float(shares[-quarter:].sum() / max(shares.sum(), 1e-9)),
        "near_empty": float((shares < 0.1 * shares.mean()).mean()),
        "least_layer": float(np.mean(kept, axis=1).min()),
    }


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Writes README.md and results.json."""
    results = collect(config)
    comparison = compare(results)
    write_json(
        folder / "results.json",
        {
            "settings": {
                name: value
                for name, value in vars(config).items()
                if isinstance(value, int | float | str)
            },
            "results": {
                name: {f"{ratio:g}": _without_problems(one) for ratio, one in known.items()}
                for name, known in results.items()
            },
            "trainings": {
                name: summary
                for name in SYSTEMS
                if (summary := read_json(Paths(config).summary(name))) is not None
            },
            "against_dms": comparison,
        },
    )
    write_text(folder / "README.md", wrap(_page(config, results, comparison)))


def _command(config: Config) -> str:
    """The command of the run: every setting that is not the default."""
    options = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _OF_A_CALL and value != field.default:
            options.append(f" --{field.name.replace('_', '-')} {value}")
    return "python -m experiments.reproduction.learned_evictions" + "".join(options)


def _without_problems(result: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what belongs to single problems."""
    text = {name: value for name, value in result["text"].items() if name != "losses"}
    text["loss"] = float(np.mean(result["text"]["losses"]))
    answers = {
        measure: {name: value for name, value in part.items() if name != "scores"}
        for measure, part in result["answers"].items()
    }
    return result | {"text": text, "answers": answers}


def _page(config: Config, results: Results, comparison: list[dict[str, Any]]) -> str:
    some = next(iter(next(iter(results.values())).values()), {}) if results else {}
    versions = ", ".join(f"{name} {number}" for name, number in some.get("versions", {}).items())
    lines = [
        "# Learned evictions beside each other",
        "",
        f"One base model ({config.model or 'reasoner-11m'}), one loop, the same "
        f"{config.tokens / 1e6:.0f}M tokens of documents that the model wrote itself, a window of "
        f"{WINDOW}. Scorers (KVzap, KVpop) leave the weights as they are; DMS is trained with all "
        "weights and with frozen ones. Each system is fitted to keep a quarter and an eighth of "
        "the tokens beyond the window: by its threshold (`dms_jax.calibrate`, on held-out text) or "
        "by its budget. What it then held was measured.",
        "",
        f"Device: {some.get('device', 'none')}; {versions}; {some.get('date', '')}; "
        f"`{_command(config)}`. "
        "± is one standard error over problems "
        "(one training of each: the spread of seeds is not in it).",
        "",
        "## What was measured",
        "",
        f"| system | kept | {' | '.join(f'{name}, % | peak | reads' for name in config.measures)} "
        "| loss, nats | peak |",
        f"|---|---:|{'---:|' * (3 * len(config.measures) + 2)}",
    ]
    for name, known in results.items():
        for ratio, one in known.items():
            parts = (one["answers"][measure] for measure in config.measures)
            cells = [
                f"{_percent(part)} | {part['peak']:.0f} | {part['reads']:,.0f}" for part in parts
            ]
            loss, peak = float(np.mean(one["text"]["losses"])), one["text"]["peak"]
            cells.append(f"{loss:.4f} | {peak:.0f}")
            lines.append(f"| {SYSTEMS[name].label} | 1/{ratio:g} | {' | '.join(cells)} |")
    lines += _left_out(results)
    lines += [
        "",
        "## Against DMS (all weights) at its live tokens",
        "",
        "Points of accuracy, and nats of loss, by which a system is above DMS at DMS's measured "
        "peak, paired by problem: as it was measured where its own peak is within 3% of that, and "
        "otherwise interpolated between its two settings; a blank where neither can be. Vanilla is "
        "at its own tokens.",
        "",
        f"| system | kept | {' | '.join(config.measures)} | loss |",
        f"|---|---:|{'---:|' * (len(config.measures) + 1)}",
    ]
    found = {(row["system"], row["ratio"], row["measure"]): row for row in comparison}
    for name in results:
        for ratio in RATIOS:
            row = [found.get((name, ratio, measure)) for measure in (*config.measures, "text")]
            if any(row):
                cells = [*(_points(one) for one in row[:-1]), _nats(row[-1])]
                lines.append(f"| {SYSTEMS[name].label} | 1/{ratio:g} | {' | '.join(cells)} |")
    lines += ["", *_heads(results), *_trainings(config), *_verdicts(config, found)]
    return "\n".join(lines) + "\n"


def _left_out(results: Results) -> list[str]:
    """What was not measured, ratio by ratio."""
    lines = []
    for ratio in RATIOS:
        names = [name for name in SYSTEMS if name != VANILLA]
        missing = [SYSTEMS[name].label for name in names if ratio not in results.get(name, {})]
        if missing:
            lines += ["", f"Not measured at 1/{ratio:g}: {'; '.join(missing)}."]
    return lines


def _heads(results: Results) -> list[str]:
    lines = [
        "## What heads keep",
        "",
        "Shares of the tokens that heads keep beyond the window, over the layers and KV heads of "
        "the model, on held-out text. KVpop's heads all hold their budget.",
        "",
        "| system | kept | least | most | held by the largest quarter of heads | "
        "heads below a tenth of the mean | least of a layer |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, known in results.items():
        for ratio, one in known.items():
            if one.get("kept"):
                s = spread(one["kept"])
                lines.append(
                    f"| {SYSTEMS[name].label} | 1/{ratio:g} | {s['least']:.3f} | {s['most']:.3f} | "
                    f"{s['largest_quarter']:.0%} | {s['near_empty']:.0%} | {s['least_layer']:.3f} |"
                )
    return [*lines, ""]


def _trainings(config: Config) -> list[str]:
    lines = [
        "## Training",
        "",
        "| system | weights | tokens | ms a step | last loss of its own kind |",
        "|---|---|---:|---:|---:|",
    ]
    for name, system in SYSTEMS.items():
        summary = read_json(Paths(config).summary(name))
        if summary is not None:
            last = summary["steps"][-1]
            lines.append(
                f"| {system.label} | {_trained(system)} | "
                f"{summary['tokens'] / 1e6:.1f}M | {1e3 * summary['step_seconds']:.0f} | "
                f"{last.get('supervised_loss', last['distillation_loss']):.4f} |"
            )
    return [
        *lines,
        "",
        "Trainings shared the card with one another, so times are upper bounds.",
        "",
    ]


def _trained(system: System) -> str:
    """The weights that are trained."""
    if system.trainable == "all":
        return "all"
    return "scorer alone" if system.recipe in ("kvzap", "kvpop") else "adapter alone"


def _verdicts(config: Config, found: dict[tuple[str, float, str], dict[str, Any]]) -> list[str]:
    """What follows from the numbers alone: whether a system beats DMS at every setting."""
    lines = ["## Verdicts", ""]
    for name, system in SYSTEMS.items():
        rows = [
            found.get((name, ratio, measure)) for ratio in RATIOS for measure in config.measures
        ]
        gaps = [(row["difference"], row["error"]) for row in rows if row is not None]
        if name in (VANILLA, REFERENCE) or not gaps:
            continue
        whole = len(gaps) == len(rows)
        every = "at every setting"
        if not whole:
            every = f"where it can be compared at DMS's live tokens ({len(gaps)} of {len(rows)})"
        if all(gap > 2 * error for gap, error in gaps):
            said = f"above DMS {every} by more than two standard errors"
        elif all(gap < -2 * error for gap, error in gaps):
            said = f"below DMS {every} by more than two standard errors"
        else:
            above = sum(gap > 2 * error for gap, error in gaps)
            below = sum(gap < -2 * error for gap, error in gaps)
            said = f"not told apart from DMS {every}"
            if above or below:
                said = f"above DMS at {above} settings and below it at {below}, {every}"
        lines.append(f"- {system.label}: {said}.")
    return lines


def _percent(part: dict[str, Any]) -> str:
    return f"{100 * part['accuracy']:.1f} {_in_points(part['error'])}"


def _in_points(error: float | None) -> str:
    return error_text(None if error is None else 100 * error, ".1f")


def _points(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{100 * row['difference']:+.1f} {_in_points(row['error'])}"


def _nats(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['difference']:+.4f} {error_text(row['error'], '.4f')}"


def show(folder: pathlib.Path) -> str:
    """Returns the differences on a page, for the log."""
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["against_dms"]
    return "\n".join(
        f"{row['system']} at 1/{row['ratio']:g}, {row['measure']}: {row['difference']:+.4f} "
        f"{error_text(row['error'], '.4f')}"
        for row in rows
    )
