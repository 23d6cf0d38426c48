"""REPORT.md: every claim of the papers that was tried, its figures, and a verdict on them."""

import json
import pathlib
from typing import Any

from dms_jax.evaluation.hyperscaling_result import Hyperscaling
from experiments.reproduction.claims.cells import table
from experiments.reproduction.claims.dms_sections import (
    FOLDER,
    SYSTEMS,
    decisions,
    hyperscaling,
    losses,
    one_chain,
    tokens,
    windows,
)
from experiments.reproduction.claims.other_sections import (
    kcache,
    longer,
    merging,
    scratch,
    throughput,
)
from experiments.reproduction.claims.results import Results, last_figure
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import TRAININGS, VANILLA
from experiments.reproduction.files import provenance, wrap, write_text

NOTES = "notes.md"
THROUGHPUT = "throughput.json"


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Writes REPORT.md, and its pictures and figures into the folder `claims` beside it."""
    results = Results(config)
    page, folder = folder / "REPORT.md", folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    frontier = results.frontier(SYSTEMS)
    parts = [
        _head(results),
        hyperscaling(frontier, folder),
        one_chain(results),
        windows(results, folder),
        losses(results),
        tokens(results, folder),
        merging(results),
        longer(results, folder),
        decisions(results),
        kcache(results, folder),
        throughput(_read(folder / THROUGHPUT), folder),
        scratch(results),
        trainings(results),
        _end(folder),
    ]
    write_text(page, wrap("\n\n".join(part for part in parts if part)) + "\n")
    write_text(folder / "figures.json", json.dumps(_figures(results, frontier)) + "\n")


def _head(results: Results) -> str:
    config = results.config
    known = results.answers(VANILLA, "1", "reasoning") or results.answers(
        VANILLA, "1", "frontier1024"
    )
    described = known[0].described if known else provenance()
    versions = ", ".join(f"{name} {number}" for name, number in described["versions"].items())
    return f"""# The papers' claims in small

Each claim of the DMS, DMC and KCache papers that a small model can test, tried on `reasoner-11m`,
a Llama of 10.8 million parameters that this project trained from nothing. What is shown here is
shown for this model and its synthetic tasks; the papers' models have 1 to 70 billion parameters.
Every answer was decoded from the real paged cache at temperature {config.temperature:g}.

Trainings start from the same base model and read documents that it wrote itself
({config.documents:,} of them, {config.batch_tokens:,} tokens a step). Reasoning: linear equations,
arithmetic and word chains in turn, {config.problems} problems with four chains; the frontier has
{config.frontier_problems} problems with {config.frontier_chains} chains. Tracking and needle are
RULER's, {config.retrieval_problems} problems. ± is one standard error over problems and seeds;
differences are paired by problem. A row "at 4" names the ratio that was trained or asked for; what
its cache held is its peak, and reads are the entries that it attended to: tokens of one chain,
means over layers and heads. A verdict asks for two standard errors.

{described.get("device", "")}; {versions}; {described["date"]}. Written by
`experiments/reproduction/report.py`, the verdicts too: they are tests on the numbers."""


def trainings(results: Results) -> str:
    """The table of all trainings."""
    rows = []
    for name, training in TRAININGS.items():
        distilled = training.recipe(results.config).loss == "distillation"
        for log in results.training(name):
            rows.append(
                [
                    f"{name}-{log['seed']}",
                    str(log["steps"][-1]["step"]),
                    f"{log['tokens'] / 1e6:.0f}",
                    f"{log['seconds']:.0f}",
                    "-" if training.policy is None else f"{training.ratio:g}",
                    last_figure(log, "compression_ratio", ".2f"),
                    last_figure(log, "distillation_loss", ".4f") if distilled else "-",
                ]
            )
    heads = (
        "run",
        "steps",
        "million tokens",
        "s",
        "target",
        "ratio at the end",
        "distillation",
    )
    return f"""## Trainings

Seconds on a GPU that several trainings share. The ratio at the end is that of the decisions on the
last batch; a cache with its window saves less.

{table(heads, rows)}"""


def _end(folder: pathlib.Path) -> str:
    notes = folder / NOTES
    own = notes.read_text(encoding="utf-8").strip() if notes.exists() else ""
    return f"""## Reproduce

    python -m experiments.reproduction.report --processes 12 --deadline-minutes 9
    python -m experiments.benchmarks.throughput --out FOLDER/throughput.json
    python -m experiments.reproduction.report --only report --pages FOLDER

The first goes on where it stopped when it is given again.

{own}""".strip()


def _figures(results: Results, frontier: Hyperscaling) -> dict[str, Any]:
    """Every cell and every point as JSON data."""
    cells = []
    for system, setting, measure in sorted(results.keys()):
        cell = results.cell(system, setting, measure)
        assert cell is not None
        cells.append(
            {
                "system": system,
                "setting": setting,
                "measure": measure,
                "seeds": len(cell.scores),
                "accuracy": cell.accuracy.to_list(),
                "by_seed": cell.scores.mean(1).tolist(),
                "peak": cell.peak,
                "reads": cell.reads,
                "ratio": cell.ratio,
                "ended": cell.ended,
            }
        )
    points = [
        {
            "system": point.system,
            "label": point.label,
            "vote": point.accuracy("vote").to_list(),
            "reads": point.budget("reads"),
            "peak": point.budget("peak"),
        }
        for point in frontier.points
    ]
    return {**provenance(), "cells": cells, "frontier": points}


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
