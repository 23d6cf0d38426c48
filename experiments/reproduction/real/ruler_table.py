"""RULER's tasks but the two needles, task by task."""

from experiments.reproduction.claims.cells import percent, table
from experiments.reproduction.real import legends
from experiments.reproduction.real.measures import tokens_of
from experiments.reproduction.real.names import shown
from experiments.reproduction.real.results import Results, score
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import FREE, OTHERS, RULER_TASKS, VANILLA
from experiments.reproduction.real.training import QWEN


def ruler(config: Config, results: Results) -> str:
    """A table for each length, with what it is of; nothing where no such task was asked."""
    measures = [each for each in OTHERS[QWEN] if each.startswith(RULER_TASKS)]
    parts = [_of_length(config, results, each) for each in measures if results.labels(QWEN, each)]
    return "\n\n".join([*parts, legends.RULER]) if parts else ""


def _of_length(config: Config, results: Results, measure: str) -> str:
    def place(label: str) -> tuple[bool, bool, float]:
        value = score(results.records[QWEN, label, measure]).value
        return label != VANILLA, label in FREE, -value

    labels = sorted(results.labels(QWEN, measure), key=place)
    tasks = list(results.records[QWEN, labels[0], measure]["tasks"])
    rows = []
    for label in labels:
        record = results.records[QWEN, label, measure]
        gap = None if label == VANILLA else results.gap(QWEN, label, VANILLA, measure)
        rows.append(
            [
                shown(results, label, record),
                *(f"{100 * record['tasks'][task]['accuracy'][0]:.0f}" for task in tasks),
                percent(score(record)),
                "" if label == VANILLA else percent(gap, sign=True),
                f"{record['peak']:.0f}",
            ]
        )
    heads = ["", *(task.removeprefix("niah_") for task in tasks), "mean", "to vanilla", "peak"]
    return f"{tokens_of(config, measure):,} tokens:\n\n" + table(heads, rows)
