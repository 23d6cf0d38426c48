"""A small reasoning model solves problems, dense and with a learned small cache, side by side.

    dms-jax demo --only solve

The shipped model of 11 million parameters, alone and with its DMS adapter (`reasoner-11m-dms`),
solves equations, nested arithmetic and chains of comparisons, and finds a number hidden in a page
of prose. Answers are drawn at temperature 0.7 from the paged cache. One problem of each kind is
shown with both solutions; the table shows right answers, and tokens held in the cache and read.
"""

import dataclasses
import textwrap

from rich.box import SIMPLE
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import dms_jax
from dms_jax.checks import Count, Whole, check
from dms_jax.command_line.options import load_model
from dms_jax.data.tasks import Arithmetic, LinearEquation, Problem, Task, WordChain
from dms_jax.evaluation import Result, evaluate
from dms_jax.evaluation.prompting import fit_task
from dms_jax.evaluation.tasks import RULER

TASKS: tuple[Task, ...] = (
    LinearEquation(),
    Arithmetic(operations=(4, 8)),
    WordChain(steps=(4, 10)),
    RULER("niah_single_2", length=640),
)

MODELS = {"dense": "reasoner-11m", "DMS": "reasoner-11m-dms"}
LINES = 14  # lines of each solution to show

LEGEND = """\
peak: most tokens in the cache, fewer: how many times; reads: entries read.

Where to go on:
  dms-jax generate --model reasoner-11m-dms "Problem: Compute 7 * 6. Solution:"
  dms-jax chat --help       talk with a checkpoint of yours, from a small cache
  dms-jax evaluate --help   policies beside each other, on one checkpoint
  dms-jax retrofit --help   train a checkpoint to need less"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Solve problems with the shipped model, dense and with DMS."""

    problems: int = 6
    """Problems of each of the four kinds."""
    temperature: float = 0.7
    """Sampling temperature of the answers; 0 takes the most likely token."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same answers."""

    def __post_init__(self):
        check("--solve.problems", self.problems, Count)
        check("--solve.seed", self.seed, Whole)
        self.make_sampling()

    def make_sampling(self) -> dms_jax.Sampling:
        """Returns the sampling options."""
        return dms_jax.Sampling(temperature=self.temperature, max_new_tokens=500)


def main(config: Config) -> dict[str, Result]:
    """Solves the problems with both models and shows them; returns the measurements."""
    console = Console(highlight=False)
    models = {label: load_model(name, None, "float32") for label, name in MODELS.items()}
    count = config.problems * len(TASKS)
    console.print(
        f"[bold]{count} problems[/bold] for reasoner-11m, with its whole cache (dense), then "
        "with DMS;\nthe first steps of each compile"
    )
    results = {
        name: evaluate(
            model,
            TASKS,
            problems=count,
            sampling=config.make_sampling(),
            seed=config.seed,
            progress=True,
        )
        for name, model in models.items()
    }
    for index, task in enumerate(TASKS):
        console.rule(task.name)
        _show(console, fit_task(models["dense"], task).problem("test", 0), index, results)
    console.print(_table(results))
    console.print(LEGEND)
    return results


def _show(console: Console, problem: Problem, index: int, results: dict[str, Result]) -> None:
    """Prints a problem and both solutions side by side."""
    console.print(Text(textwrap.shorten(problem.prompt, 420, placeholder=" ...")))
    width = max(30, console.width // 2 - 1)
    panels = []
    for name, result in results.items():
        lines = result.completions[index][0].strip().splitlines()
        hidden = len(lines) - LINES
        if hidden > 0:
            lines = [*lines[: LINES - 1], f"... {hidden} lines ...", *lines[-1:]]
        right = result.scores[index, 0] == 1
        title = f"{name}: {'right' if right else f'wrong, it is {problem.answers[0]}'}"
        style = "green" if right else "red"
        panels.append(Panel(Text("\n".join(lines)), title=title, border_style=style, width=width))
    console.print(Columns(panels, padding=0))


def _table(results: dict[str, Result]) -> Table:
    title = "Right answers; tokens in the cache and read, a sequence"
    table = Table(box=SIMPLE, title=title, padding=(0, 1, 0, 0))
    for heading in ("", *(task.name for task in TASKS), "peak", "reads", "fewer"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    dense = results["dense"]
    for name, result in results.items():
        right = (result.of_task(task.name).scores for task in TASKS)
        table.add_row(
            name,
            *(f"{int(scores.sum())}/{scores.size}" for scores in right),
            f"{result.peak_per_problem:.0f}",
            f"{result.reads_per_problem:,.0f}",
            f"{dense.peak_per_problem / result.peak_per_problem:.1f}x",
        )
    return table
