"""RULER's tasks but the two needles, task by task."""

from experiments.reproduction.claims.cells import percent, table
from experiments.reproduction.real import legends
from experiments.reproduction.real.measures import tokens_of
from experiments.reproduction.real.names import shown
from experiments.reproduction.real.results import Results, score
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import FREE, OTHERS, RULER_TASKS, SHORT_TASKS, VANILLA


def ruler(config: Config, results: Results, model: str) -> str:
    """A table for each length, with what it is of; nothing where no such task was asked."""
    kinds = (RULER_TASKS, SHORT_TASKS)
    asked = [each for each in OTHERS[model] if results.labels(model, each)]
    own = [each for each in asked if each.partition("-")[0] in kinds]
    parts = [_of_length(config, results, model, each) for each in own]
    return "\n\n".join([*parts, legends.RULER]) if parts else ""


def _of_length(config: Config, results: Results, model: str, measure: str) -> str:
    def place(label: str) -> tuple[bool, bool, float]:
        value = score(results.records[model, label, measure]).value
        return label != VANILLA, label in FREE, -value

    labels = sorted(results.labels(model, measure), key=place)
    tasks = list(results.records[model, labels[0], measure]["tasks"])
    rows = []
    for label in labels:
        record = results.records[model, label, measure]
        gap = None if label == VANILLA else results.gap(model, label, VANILLA, measure)
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
