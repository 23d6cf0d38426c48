"""The page: a verdict on each bar, then every table."""

import pathlib
from collections.abc import Sequence
from typing import Any

from dms_jax import DMS
from dms_jax.evaluation import Measured
from experiments.reproduction.claims.cells import percent, table, within
from experiments.reproduction.files import wrap, write_json, write_text
from experiments.reproduction.real import figures, legends
from experiments.reproduction.real.plan import asked_of
from experiments.reproduction.real.results import (
    CHAINS,
    TASKS,
    Results,
    end_of,
    score,
    vote_of,
)
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    CONTROL,
    FREE,
    OTHERS,
    QWEN,
    SHIPPED,
    SMOLLM2,
    TRAININGS,
    UNSEEN,
    VANILLA,
    WINDOW,
)

POINTS, FEWER, BELOW, SMALL_POINTS, MINUTES = 2.0, 3.0, 10.0, 1.0, 15  # the bars
_KINDS = {"all": "all weights", "low_rank": "low rank", "adapter": "adapter"}
_FREE_LABELS = {
    VANILLA: "vanilla",
    "tova": "TOVA",
    "expected": "ExpectedAttention",
    "snapkv": "SnapKV",
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "quest": "Quest",
    "kcache": "KCache",
    "vanilla-float8": "vanilla, float8",
    "dms-float8": "DMS of the verdict, float8",
    "tova-mean": "TOVA, equal mean",
    "expected-mean": "ExpectedAttention, equal mean",
    "streaming-mean": "StreamingLLM, equal mean",
    "tova-half-more": "TOVA, 1.5 times the budget",
    "expected-half-more": "ExpectedAttention, 1.5 times the budget",
}
_TASK_LABELS = {
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC easy",
    "arc_challenge": "ARC challenge",
    "piqa": "PIQA",
    "needle": "needles",
    "text": "text, nats",
}
# What leaves the memory as it is: it reads fewer entries, or holds them in fewer bytes.
_WHOLE = (VANILLA, "quest", "kcache", "vanilla-float8")


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
    if results.trainings:
        small = any(TRAININGS[name].model == SMOLLM2 for name in results.trainings)
        told = legends.TRAINING + (f" {legends.SMOLLM2_TRAINING}" if small else "")
        parts += ["## What was trained", trainings(results), told]
    if any(results.labels(QWEN, measure) for measure in OTHERS):
        parts += ["## Other tasks of Qwen2.5-Coder-0.5B-Instruct", others(results), legends.OTHERS]
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
    if results.speed is not None:
        parts += ["## Milliseconds a step", speed(config, results.speed), legends.SPEED]
    parts += ["## Again", legends.AGAIN]
    return "\n\n".join(filter(None, parts)) + "\n"


def _opening(results: Results) -> str:
    runs = results.runs
    both = {
        QWEN: "- Qwen2.5-Coder-0.5B-Instruct (Apache-2.0): a 4-bit GGUF of 491,400,064 bytes, "
        "SHA-256 begins 1d961463.",
        SMOLLM2: "- SmolLM2-135M-Instruct (Apache-2.0): a GGUF.",
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
            + (_OF_RUNS if len(runs) > 1 else "Whatever is compared was measured in one run."),
            "",
            *(
                (f"- Run {number}: " if len(runs) > 1 else "") + _provenance(runs[number])
                for number in sorted(runs, reverse=True)
            ),
        ]
    )


def _provenance(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{record['device']}, {versions}, {record['date']}."


def shown(results: Results, label: str, record: dict[str, Any]) -> str:
    """A system in words; with the run, where another than the last one measured it."""
    return name_of(label) + (f" (run {record['run']})" if record["run"] != results.run else "")


def name_of(label: str) -> str:
    """A system in words.

    # In: "low-rank-w16-at3.5"  Out: "DMS, low rank, window 16, to 3.5"     "tova"  "TOVA"
    """
    system, _, setting = label.partition("-at")
    if system not in TRAININGS:
        return _FREE_LABELS[system]
    training = TRAININGS[system]
    if training.policy is None:
        return "trained further (the control)"
    words = [training.policy.name, _KINDS[training.trainable]]
    if not training.evicts_as_trained:
        words[1:] = [f"window {WINDOW}"]
    words += [f"window {training.policy.window}"] if isinstance(training.policy, DMS) else []
    if training.evicts_as_trained:
        words += [f"at {setting}" if float(setting) in training.snapshots else f"to {setting}"]
    words += [training.words] if training.words else []
    words += [f"{training.share:g} of the tokens"] if training.share < 1 else []
    return ", ".join(words)


_OF_RUNS = (
    "A row that names a run is of that earlier one: the same problems, with retrofits and answers "
    "of its own, and differences from what that run measured, where it did."
)


# -- verdicts -------------------------------------------------------------------------------------


def best_free(results: Results, peak: float) -> str | None:
    """The method without training that solves most with at most 5% more than a peak."""
    candidates = [
        label
        for label in results.labels(QWEN, "gsm8k")
        if label in FREE
        and label not in _WHOLE
        and FREE[label].trained is None
        and results.records[QWEN, label, "gsm8k"]["peak"] <= 1.05 * peak
    ]
    of = lambda label: score(results.records[QWEN, label, "gsm8k"]).value  # noqa: E731
    return max(candidates, key=of, default=None)


def verdicts(results: Results) -> str:
    """A line for each bar."""
    main = end_of(results.judged)
    record = results.get(QWEN, main, "gsm8k")
    if record is None:
        lines = ["- The retrofit that was to be judged was not measured."]
    else:
        fewer = results.fewer(QWEN, main, "gsm8k") or 0.0
        held = "**holds**" if fewer >= FEWER else "**does not hold**"
        lines = [
            f"- Qwen2.5-Coder-0.5B, {name_of(main)} (chosen by the rule below, on training "
            f"questions alone): peak {record['peak']:.0f}, {fewer:.2f} times smaller; at least "
            f"{FEWER:g} times: {held}."
        ]
        for measure, how in (("gsm8k", "greedy"), ("frontier", "eight chains a problem")):
            for other, what in ((VANILLA, "itself"), (end_of(CONTROL), "the control")):
                gap = results.gap(QWEN, main, other, measure)
                held = within(gap, POINTS)
                lines += [f"- GSM8K, {how}: within {POINTS:g} points of {what}: {held}."]
        lines += [_against_free(results, main, record["peak"])]
    lines += _chosen(results) + _three(results)
    if results.get(SMOLLM2, VANILLA, "piqa") is None:
        return "\n".join([*lines, "- SmolLM2-135M-Instruct: **not measured**."])
    told = ((SHIPPED, "the adapter that ships"), ("smollm2-low-rank-w16", "low rank"))
    for training, what in told:
        gap = results.mean_gap(end_of(training), VANILLA)
        lines += [
            f"- SmolLM2, {what}, nominal ratio 4: mean of its tasks within {SMALL_POINTS:g} point "
            f"of itself: {within(gap, SMALL_POINTS)}."
        ]
    return "\n".join(lines)


def _chosen(results: Results) -> list[str]:
    """How the rivals stood on the questions that chose between them, and how the other did."""
    asked = results.rivals(UNSEEN)
    if len(asked) < 2:
        return []
    told = []
    for name in asked:
        solved = percent(score(results.records[QWEN, end_of(name), UNSEEN]))
        far = results.trainings[name]["held_out"]["distillation"]
        told.append(f"{name_of(end_of(name))}: {solved}%, {far:.4f} nats")
    lines = [
        f"- Training questions in no lesson, greedily, and divergence: {'; '.join(told)}. Judged "
        f"is {name_of(end_of(results.judged))}."
    ]
    for name in asked:
        gap = results.gap(QWEN, end_of(name), VANILLA, "gsm8k")
        if name != results.judged and gap is not None:
            lines.append(f"- The other, GSM8K, greedy: {percent(gap, sign=True)} to itself.")
    return lines


def _three(results: Results) -> list[str]:
    """How long a user waits, from an empty directory to a page."""
    told = results.three
    if told is None or told["calls"][-1]["exit"]:
        return ["- Three commands from an empty directory to its page: **not measured**."]
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in told["stages"].items())
    held = "**holds**" if told["seconds"] < 60 * MINUTES else "**does not hold**"
    return [
        f"- Three commands from an empty directory to its page: {told['seconds']:.0f} s on one "
        f"card ({stages}; the library was {told['installed']}, the questions were copied); under "
        f"{MINUTES} minutes: {held}. The third: `{told['command']}`."
    ]


def _against_free(results: Results, main: str, peak: float) -> str:
    best = best_free(results, peak)
    line = f"- The best method without training at that peak at least {BELOW:g} points lower: "
    if best is None:
        return line + "**not measured**."
    gap = results.gap(QWEN, main, best, "gsm8k")
    assert gap is not None
    holds = gap.value >= BELOW / 100
    beyond = "" if gap.beyond(BELOW / 100) or not holds else " on the mean"
    word = f"**holds{beyond}**" if holds else "**does not hold**"
    return f"{line}{word} ({percent(gap, sign=True)} above {name_of(best)})."


# -- tables ---------------------------------------------------------------------------------------


def gsm8k(results: Results) -> str:
    """Everything that was asked GSM8K, by kind and then by accuracy."""
    labels = results.labels(QWEN, "gsm8k")
    of = lambda label: -score(results.records[QWEN, label, "gsm8k"]).value  # noqa: E731
    learned = sorted((each for each in labels if each.partition("-at")[0] in TRAININGS), key=of)
    order = [VANILLA, *learned, *sorted((e for e in labels if e in FREE and e != VANILLA), key=of)]
    told = {VANILLA: "to vanilla", end_of("control"): "to the control"}
    compared = [label for label in told if label in labels]
    rows = []
    for label in order:
        record = results.get(QWEN, label, "gsm8k")
        if record is None:
            continue
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
    return table([*heads, "reads", "MB", "ended", "tokens"], rows)


def _sign(gap: Measured) -> str:
    return percent(gap, sign=True)


def trainings(results: Results) -> str:
    """Each training: what it took, and how far its end is from the model."""
    rows = []
    for log in (*results.trainings.values(), *results.earlier_trainings):
        training = TRAININGS[log["training"]]
        measure = "gsm8k" if training.model == QWEN else "piqa"
        label = f"{training.name}-at{log['recipe']['ratio']:g}"
        record = results.get(training.model, label, measure)
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
    for label in results.labels(QWEN, "frontier"):
        for chains in CHAINS:
            found = results.votes(label, chains)
            if found is not None:
                votes, reads, peak = found
                cells = [percent(vote_of(votes)), f"{reads:,.0f}", f"{peak:,.0f}"]
                rows.append([name_of(label), str(chains), *cells])
    return table(["", "chains", "vote, %", "reads", "peak"], rows)


def gains(results: Results) -> str:
    """What a small cache gains on the frontier, for each that was asked; the judged one in bold."""
    rows = []
    for label in results.labels(QWEN, "frontier"):
        points = results.frontier({VANILLA: "vanilla", label: "DMS"})
        if label in (VANILLA, end_of(CONTROL)) or points is None:
            continue
        gains = [points.average_gain("DMS", "vanilla", axis) for axis in ("reads", "peak")]
        name = f"**{name_of(label)}**" if label == end_of(results.judged) else name_of(label)
        one = results.gap(QWEN, label, VANILLA, "frontier")
        rows.append([name, *(percent(gain, sign=True) for gain in (one, *gains))])
    if not rows:
        return ""
    told = (
        "Average gain of the vote from DMS's cache over the plain one, over the budgets that both "
        "cover; and what one chain of as many tokens gains. The line in bold is drawn."
    )
    return told + "\n\n" + table(["", "one chain", "at equal reads", "at equal peak"], rows)


def smollm2(results: Results) -> str:
    """Each task of SmolLM2, with the peak beside it."""
    order = [VANILLA]
    order += [
        job.label
        for each in TRAININGS.values()
        if each.model == SMOLLM2
        for job in asked_of(each, "piqa")
    ]
    order += [name for name in FREE if name != VANILLA]
    rows = []
    for label in order:
        found = [results.get(SMOLLM2, label, task) for task in (*TASKS, "text")]
        if not any(found):
            continue
        gap = results.mean_gap(label, VANILLA) if label != VANILLA else None
        cells = [_with_peak(record, task) for record, task in zip(found, _TASK_LABELS, strict=True)]
        mean = "" if label == VANILLA else percent(gap, sign=True)
        own = next(record for record in found if record)
        rows.append([shown(results, label, own), *cells, mean])
    return table(["", *_TASK_LABELS.values(), "mean to vanilla"], rows)


def others(results: Results) -> str:
    """Each other task of Qwen, with the peak beside it."""
    learned = [label for model, label, on in results.records if model == QWEN and on in OTHERS]
    learned = [label for label in learned if label not in FREE]
    free = [name for name in FREE if name != VANILLA]
    labels = dict.fromkeys([VANILLA, *learned, *free])
    rows = []
    for label in labels:
        found = [results.get(QWEN, label, task) for task in OTHERS]
        if any(found):
            cells = [_with_peak(each, task) for each, task in zip(found, OTHERS, strict=True)]
            own = next(record for record in found if record)
            rows.append([shown(results, label, own), *cells])
    return table(["", "MATH-500", "HumanEval", "RULER's needles"], rows)


def _with_peak(record: dict[str, Any] | None, task: str) -> str:
    if record is None:
        return "-"
    own = score(record)
    shown = f"{own.value:.3f}" if task == "text" else f"{100 * own.value:.1f}"
    return f"{shown} ({record['peak']:.0f})"


def speed(config: Config, record: dict[str, Any]) -> str:
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
        f"Qwen2.5-Coder-0.5B, {config.speed_batch} sequences of {config.speed_context:,} tokens, "
        f"budgets of a quarter, {record['device']}, {record['date']}."
    )
    return text + "\n\n" + table(["", "ms a step", "ms a cut", "MB", "reads a row"], rows)
