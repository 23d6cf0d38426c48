"""The page: a verdict on each bar, every table, then what a reader of them wrote."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from dms_jax import DMS
from dms_jax.evaluation import Measured
from experiments.reproduction.claims.cells import percent, table
from experiments.reproduction.files import wrap, write_json, write_text
from experiments.reproduction.real import figures, legends
from experiments.reproduction.real.commands import again
from experiments.reproduction.real.measures import tokens_of
from experiments.reproduction.real.names import shown
from experiments.reproduction.real.plan import asked_of, free
from experiments.reproduction.real.results import (
    CHAINS,
    TASKS,
    Results,
    end_of,
    score,
    vote_of,
)
from experiments.reproduction.real.ruler_table import ruler
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.sweep_table import sweep, sweep_said
from experiments.reproduction.real.systems import (
    CONTROL,
    FREE,
    FRONTIERS,
    LIKE,
    OTHERS,
    RULER_TASKS,
    SHORT_TASKS,
    TRAININGS,
    VANILLA,
)
from experiments.reproduction.real.training import QWEN, SMOLLM2, SWEEP
from experiments.reproduction.real.verdicts import verdicts

_TASK_LABELS = {
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC easy",
    "arc_challenge": "ARC challenge",
    "piqa": "PIQA",
    "needle": "needles",
    "text": "text, nats",
}
_OTHER_LABELS = {"math500": "MATH-500", "humaneval": "HumanEval"}


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Writes README.md, results.json and the pictures."""
    results = Results.read(config)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = figures.draw(results, folder)
    write_json(folder / "results.json", results.to_dict())
    write_text(folder / "README.md", wrap(page(config, results, pictures, _notes(folder))))


def _notes(folder: pathlib.Path) -> str:
    """What a reader of the figures wrote, if he did."""
    file = folder / "notes.md"
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def page(config: Config, results: Results, pictures: set[str], notes: str) -> str:
    """The text of README.md."""
    parts = ["# Real language models with a small cache", _opening(results)]
    if results.labels(QWEN, "gsm8k"):
        parts += ["## Verdicts", verdicts(results)]
    parts += [notes] if notes else []
    if results.labels(QWEN, "gsm8k"):
        parts += ["## Qwen2.5-Coder-0.5B-Instruct on GSM8K"]
        parts += ["![Accuracy of each method](gsm8k.png)"] if "gsm8k.png" in pictures else []
        parts += [gsm8k(results), legends.GSM8K]
    if any(label.partition("-at")[2] in LIKE[QWEN] for label in results.labels(QWEN, "gsm8k")):
        parts += ["## Nominal ratios of 2, 4 and 8"]
        parts += [gsm8k(results, nominal=True), legends.NOMINAL]
    if any(not TRAININGS[log["training"]].of_sweep for log in results.logs):
        small = any(TRAININGS[log["training"]].model == SMOLLM2 for log in results.logs)
        mixed = any(TRAININGS[log["training"]].lessons == "mixed" for log in results.logs)
        told = legends.TRAINING + (f" {legends.SMOLLM2_TRAINING}" if small else "")
        told += f"\n\n{legends.MIXED_TRAINING}" if mixed else ""
        parts += ["## What was trained", trainings(results), told]
    if any(TRAININGS[log["training"]].of_sweep for log in results.logs):
        parts += ["## One setting of the recipe at a time", sweep_said(results), sweep(results)]
        parts += [legends.SWEEP]
    if any(results.labels(QWEN, measure) for measure in OTHERS[QWEN]):
        parts += ["## Other tasks of Qwen2.5-Coder-0.5B-Instruct"]
        parts += [others(config, results, QWEN), legends.OTHERS]
        parts += [ruler(config, results, QWEN)]
    if results.labels(QWEN, "frontier"):
        parts += ["## Votes of more chains"]
        drawn = "frontier.png" in pictures
        parts += ["![Votes against reads and peak](frontier.png)"] if drawn else []
        parts += [gains(results), frontier(results), legends.FRONTIER]
    if results.labels(SMOLLM2, "piqa"):
        parts += ["## SmolLM2-135M-Instruct"]
        drawn = "smollm2.png" in pictures
        parts += ["![Differences from the model itself](smollm2.png)"] if drawn else []
        parts += [smollm2(results), legends.SMOLLM2]
        if any(results.labels(SMOLLM2, measure) for measure in OTHERS[SMOLLM2]):
            parts += [legends.LONGER, others(config, results, SMOLLM2)]
            parts += [ruler(config, results, SMOLLM2)]
    if results.speed is not None:
        parts += ["## Milliseconds a step", speed(results.speed), legends.SPEED]
    told = (results.commands, results.decided, results.main, results.three)
    parts += ["## Again", again(*told)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _opening(results: Results) -> str:
    runs = results.runs
    both = {
        QWEN: "- Qwen2.5-Coder-0.5B-Instruct (Apache-2.0): a 4-bit GGUF of 491,400,064 bytes, "
        "SHA-256 begins 1d961463.",
        SMOLLM2: "- SmolLM2-135M-Instruct (Apache-2.0): a GGUF of 98,362,432 bytes, SHA-256 begins "
        "b179c952.",
    }
    measured = {model for model, _, _ in results.records}
    return "\n".join(
        [
            "Two models, read into bfloat16; neither is part of this repository. Each was "
            "retrofitted on answers that it sampled itself.",
            "",
            *(words for model, words in both.items() if model in measured),
            "",
            "Everything was measured from the paged cache with the policy's own eviction. Errors "
            "are one standard error, of differences paired by problem. "
            + (
                _OF_RUNS.format(results.main)
                if len(runs) > 1
                else "Whatever is compared was measured in one run."
            ),
            "",
            *(
                (f"- Run {number}: " if len(runs) > 1 else "") + _provenance(runs[number])
                for number in sorted(runs, reverse=True)
            ),
        ]
    )


def _provenance(records: Sequence[dict[str, Any]]) -> str:
    """What made the records of a run, which may be of several machines and days."""
    devices = " and ".join(sorted({record["device"] for record in records}))
    versions = {
        ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        for record in records
    }
    dates = [record["date"] for record in records]
    days = " to ".join(sorted({min(dates), max(dates)}))
    return f"{devices}, {' and '.join(sorted(versions))}, {days}."


_OF_RUNS = (
    "A row that names no run is of run {}, which the verdicts are about. One that names another "
    "has the same problems, with retrofits and answers of its own, and differences from what that "
    "run measured, where it did."
)


# -- tables ---------------------------------------------------------------------------------------


def gsm8k(results: Results, *, nominal: bool = False) -> str:
    """What was asked GSM8K, by kind and then by accuracy, and what of it cannot be paired.

    Args:
      results: every figure.
      nominal: only retrofits to ratios of 2, 4 and 8, and what holds as much as one of them,
        ratio by ratio, in place of all else.
    """
    labels = results.labels(QWEN, "gsm8k")

    def place(label: str) -> tuple[Any, ...]:
        system, _, setting = label.partition("-at")
        ratio = float(setting) if nominal else 0
        value = score(results.records[QWEN, label, "gsm8k"]).value
        return label != VANILLA, ratio, system not in TRAININGS, -value

    own = [label for label in labels if (label.partition("-at")[2] in LIKE[QWEN]) == nominal]
    own = [label for label in own if not label.startswith(SWEEP)]
    told = {VANILLA: "to vanilla", end_of(CONTROL): "to the control"}
    compared = [label for label in told if label in labels]
    rows, alone = [], []
    for label in sorted(own, key=place):
        record = results.records[QWEN, label, "gsm8k"]
        if results.unpaired(QWEN, label, VANILLA, "gsm8k"):
            alone.append(shown(results, label, record))
        gaps = [results.gap(QWEN, label, each, "gsm8k") for each in compared]
        fewer = results.fewer(QWEN, label, "gsm8k")
        name = shown(results, label, record)
        rows.append(
            [
                f"**{name}**" if label == end_of(results.judged) else name,
                percent(score(record)),
                *("" if gap is None or gap == Measured(0, 0) else _sign(gap) for gap in gaps),
                f"{record['peak']:.0f}",
                "" if fewer is None else f"{fewer:.2f}",
                f"{record['mean_live']:.0f}",
                f"{record['reads']:,.0f}",
                f"{record['cache_bytes'] / 1e6:.2f}",
                f"{record['ended']:.0%}",
                f"{record['new_tokens']:.0f}",
            ]
        )
    heads = ["", "GSM8K, %", *(told[label] for label in compared)]
    heads += ["peak", "times fewer", "read a step"]
    text = table([*heads, "reads", "MB", "ended", "tokens"], rows)
    if alone:
        text += "\n\nAsked other problems than vanilla, and not paired with it: "
        text += f"{'; '.join(alone)}."
    return text


def _sign(gap: Measured) -> str:
    return percent(gap, sign=True)


def trainings(results: Results) -> str:
    """Each training: what it took, and how far its end is from the model."""
    rows = []
    for log in results.logs:
        training = TRAININGS[log["training"]]
        if training.of_sweep:
            continue
        measure = "gsm8k" if training.model == QWEN else "piqa"
        label = f"{training.name}-at{log['recipe']['ratio']:g}"
        record = results.of_run(log["run"], training.model, label, measure)
        rows.append(
            [
                f"{training.model}: {shown(results, label, log)}",
                f"{log['documents']:,}",
                f"{log['tokens'] / 1e6:.1f}",
                f"{log['seconds']:.0f}",
                f"{log['bytes'] / 1e6:.2f}",
                f"{log['held_out']['distillation']:.4f}" if log["held_out"] else "-",
                f"{1 / (1 - min(log['steps'][-1]['evicted'], 0.999)):.2f}"
                if training.evicts_as_trained
                else "-",
                percent(score(record)) if record else "-",
            ]
        )
    heads = ["", "documents", "M tokens", "seconds", "MB", "divergence", "reached", "score, %"]
    return table(heads, rows)


def frontier(results: Results) -> str:
    """Votes of 1 to 8 chains, with what they read and held."""
    rows = []
    for measure in FRONTIERS:
        for label, chains in itertools.product(results.labels(QWEN, measure), CHAINS):
            found = results.votes(label, chains, measure)
            if found is not None:
                votes, reads, peak = found
                record = results.records[QWEN, label, measure]
                longest = record["sampling"]["max_new_tokens"]
                cells = [percent(vote_of(votes)), f"{reads:,.0f}", f"{peak:,.0f}"]
                rows.append([shown(results, label, record), str(longest), str(chains), *cells])
    return table(["", "longest", "chains", "vote, %", "reads", "peak"], rows)


def gains(results: Results) -> str:
    """What a small cache gains on the frontier, for each that was asked; the judged one in bold."""
    rows = []
    for label in results.labels(QWEN, "frontier"):
        gains = results.vote_gains(label)
        if label in (VANILLA, end_of(CONTROL)) or gains == (None, None):
            continue
        name = shown(results, label, results.records[QWEN, label, "frontier"])
        name = f"**{name}**" if label == end_of(results.judged) else name
        one = results.gap(QWEN, label, VANILLA, "frontier")
        rows.append([name, *(percent(gain, sign=True) for gain in (one, *gains))])
    if not rows:
        return ""
    told = (
        "Average gain of the vote from a small cache over the plain one, over the budgets that "
        "both cover, with chains of each length that its run asked of both; and what one chain of "
        "at most 400 tokens gains. The line in bold is drawn."
    )
    return told + "\n\n" + table(["", "one chain", "at equal reads", "at equal peak"], rows)


def smollm2(results: Results) -> str:
    """Each task of SmolLM2, with the peak beside it: the control, then ratio by ratio DMS first."""
    asked = [
        (each.policy is not None, float(job.setting), not isinstance(each.policy, DMS), job.label)
        for each in TRAININGS.values()
        if each.model == SMOLLM2
        for job in asked_of(each, "piqa")
    ]
    asked += [
        (True, float(setting), True, free(SMOLLM2, name, setting=setting).label)
        for setting in LIKE[SMOLLM2]
        for name in FREE
    ]
    order = [VANILLA, *(label for *_, label in sorted(asked, key=lambda each: each[:-1]))]
    order += [name for name in FREE if name != VANILLA]
    rows = []
    for label in order:
        found = [results.get(SMOLLM2, label, task) for task in (*TASKS, "text")]
        if not any(found):
            continue
        gap = results.mean_gap(label, VANILLA) if label != VANILLA else None
        own = next(record for record in found if record)
        told = zip(found, _TASK_LABELS, strict=True)
        cells = [_with_peak(record, task, own["run"]) for record, task in told]
        of_tasks = {record["run"] for record in found[: len(TASKS)] if record}
        told_of = len(of_tasks) == 1 or label in FREE
        mean = "" if label == VANILLA else percent(gap if told_of else None, sign=True)
        rows.append([shown(results, label, own), *cells, mean])
    return table(["", *_TASK_LABELS.values(), "mean to vanilla"], rows)


def others(config: Config, results: Results, model: str) -> str:
    """Each other task of a model that something was asked, with the peak beside it."""
    tasks = [task for task in OTHERS[model] if results.labels(model, task)]
    learned = [label for name, label, on in results.records if name == model and on in tasks]
    learned = [label for label in learned if label not in FREE]
    free = [name for name in FREE if name != VANILLA]
    rows = []
    for label in dict.fromkeys([VANILLA, *learned, *free]):
        found = [results.get(model, label, task) for task in tasks]
        if any(found):
            own = next(record for record in found if record)
            told = zip(found, tasks, strict=True)
            cells = [_with_peak(each, task, own["run"]) for each, task in told]
            rows.append([shown(results, label, own), *cells])
    return table(["", *(_task_name(config, task) for task in tasks)], rows)


def _task_name(config: Config, task: str) -> str:
    tokens = tokens_of(config, task)
    of_others = task.partition("-")[0] in (RULER_TASKS, SHORT_TASKS)
    what = "RULER's others" if of_others else "RULER's needles"
    return f"{what}, {tokens:,}" if tokens else _OTHER_LABELS[task]


def _with_peak(record: dict[str, Any] | None, task: str, run: int) -> str:
    """A score with its peak, and with its run where that is another than the row's."""
    if record is None:
        return "-"
    own = score(record)
    shown = f"{own.value:.3f}" if task == "text" else f"{100 * own.value:.1f}"
    of = f", run {record['run']}" if record["run"] != run else ""
    return f"{shown} ({record['peak']:.0f}{of})"


def speed(record: dict[str, Any]) -> str:
    """Milliseconds and bytes of each method."""
    rows: list[Sequence[str]] = []
    for row in record["rows"]:
        if "failed" in row:
            rows.append([row["method"], "failed", "-", "-", "-"])
            continue
        cut = f"{row['cut_ms']:.1f}" if "cut_ms" in row else ""
        held = f"{row['cache_bytes'] / 1e6:,.0f}"
        rows.append(
            [row["method"], f"{row['step_ms']:.3f}", cut, held, f"{row['reads_a_step']:,.0f}"]
        )
    text = (
        f"Qwen2.5-Coder-0.5B, {record['batch']} sequences of {record['context']:,} tokens, "
        f"budgets of a quarter, run {record['run']}, {record['device']}, {record['date']}."
    )
    return text + "\n\n" + table(["", "ms a step", "ms a cut", "MB", "reads a row"], rows)
