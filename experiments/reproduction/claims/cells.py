"""Words and cells of the page: figures with their errors, verdicts, rows."""

from collections.abc import Sequence

from dms_jax.evaluation import Measured, difference, mean_over_seeds
from experiments.reproduction.claims.results import Results
from experiments.reproduction.claims.systems import VANILLA
from experiments.reproduction.files import error_text

ERRORS = 2  # standard errors beyond which a difference counts
HEADS = ("", "seeds", "reasoning, %", "above vanilla", "peak", "reads", "tracking, %")

KINDS = ("linear equations", "arithmetic", "word chains")  # of reasoning, asked in turn


def percent(value: Measured | None, *, sign: bool = False) -> str:
    """Points with one standard error; a dash for what was not measured."""
    if value is None:
        return "-"
    number = f"{100 * value.value:+.1f}" if sign else f"{100 * value.value:.1f}"
    return f"{number} {error_text(100 * value.error, '.1f')}"


def verdict(gap: Measured | None) -> str:
    """What a difference says of a claim that it is positive.

    # In: 3 ± 1  Out: "holds (+3.0 ± 1.0)"    0.5 ± 1  "is not told apart from chance (+0.5 ± 1.0)"
    """
    if gap is None:
        return "**not measured**"
    shown = percent(gap, sign=True)
    if gap.beyond(0, ERRORS):
        return f"**holds** ({shown})"
    if gap.value < -ERRORS * gap.error:
        return f"**does not hold** ({shown})"
    return f"**is not told apart from chance** ({shown})"


def within(gap: Measured | None, points: float) -> str:
    """What a difference says of a claim that no more than `points` points are lost.

    # In: -1 ± 0.8, 2  Out: "holds on the mean, but two standard errors reach beyond (-1.0 ± 0.8)"
    """
    if gap is None:
        return "**not measured**"
    shown = percent(gap, sign=True)
    if gap.beyond(-points / 100, ERRORS):
        return f"**holds** ({shown})"
    if gap.value >= -points / 100:
        return f"**holds on the mean, but two standard errors reach beyond** ({shown})"
    return f"**does not hold** ({shown})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    line = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join(
        ["| " + " | ".join(heads) + " |", line, *("| " + " | ".join(r) + " |" for r in rows)]
    )


def accuracy(results: Results, system: str, setting: str, measure: str) -> str:
    cell = results.cell(system, setting, measure)
    return percent(cell.accuracy) if cell else "-"


def row(results: Results, label: str, system: str, setting: str) -> list[str]:
    """A line of a table: reasoning with its cache, tracking, and the gap to vanilla."""
    cell = results.cell(system, setting, "reasoning")
    gap = None
    if system != VANILLA:
        gap = results.gap((system, setting), (VANILLA, "1"), "reasoning")
    seeds = str(len(cell.scores)) if cell else "-"
    held = [f"{cell.peak:.0f}", f"{cell.reads:,.0f}"] if cell else ["-", "-"]
    return [
        label,
        seeds,
        percent(cell.accuracy) if cell else "-",
        percent(gap, sign=True),
        *held,
        accuracy(results, system, setting, "tracking950"),
    ]


def kinds(results: Results, label: str, system: str, setting: str) -> list[str]:
    """A line of a table: each kind of reasoning by itself, and its gap to vanilla."""
    cell, base = (results.cell(*each, "reasoning") for each in ((system, setting), (VANILLA, "1")))
    found = [label]
    for kind in range(len(KINDS)):
        own = cell and cell.scores[:, kind :: len(KINDS)]
        whole = base and base.scores[:, kind :: len(KINDS)]
        found.append(percent(None if own is None else mean_over_seeds(own)))
        gap = None
        if own is not None and whole is not None and system != VANILLA:
            gap = difference(own, whole)
        found.append(percent(gap, sign=True))
    return found
