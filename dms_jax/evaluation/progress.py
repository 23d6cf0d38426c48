"""A progress bar with the running score."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dms_jax.terminal import console_for_progress

Tick = Callable[[float], None]


@contextlib.contextmanager
def progress_bar(total: int, *, title: str, shown: bool) -> Iterator[Tick]:
    """Shows the number of answers and their mean score on standard error.

    Yields:
      A function to call with the score of each answer.
    """
    columns = (
        TextColumn("{task.description}", style="progress.description", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("score {task.fields[score]}"),
        TimeRemainingColumn(),
    )
    scores: list[float] = []
    with Progress(*columns, console=console_for_progress(stderr=True), disable=not shown) as bar:
        line = bar.add_task(title, total=total, score="-")

        def tick(score: float) -> None:
            scores.append(score)
            bar.update(line, advance=1, score=f"{100 * sum(scores) / len(scores):.1f}%")

        yield tick
