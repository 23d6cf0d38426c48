"""A progress bar, with a running score if there is one."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dms_jax.terminal import console_for_progress

Tick = Callable[..., None]


@contextlib.contextmanager
def progress_bar(total: int, *, title: str, shown: bool) -> Iterator[Tick]:
    """Shows the number of finished items on standard error, and their mean score.

    Yields:
      A function to call for each item with its score, if known.
    """
    columns = (
        TextColumn("{task.description}", style="progress.description", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(),
    )
    scores: list[float] = []
    with Progress(*columns, console=console_for_progress(stderr=True), disable=not shown) as bar:
        line = bar.add_task(title, total=total, score="")

        def tick(score: float | None = None) -> None:
            if score is None:
                bar.update(line, advance=1)
                return
            scores.append(score)
            bar.update(line, advance=1, score=f"score {100 * sum(scores) / len(scores):.1f}%")

        yield tick
