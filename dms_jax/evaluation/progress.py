"""A progress bar, with a running score if there is one; without a terminal, lines."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dms_jax.terminal import Lines, console_for_progress, has_bar

Tick = Callable[..., None]
# Of this process: short runs that follow each other write a line now and then, not one each.
_lines = Lines()


@contextlib.contextmanager
def progress_bar(total: int, *, title: str, shown: bool) -> Iterator[Tick]:
    """Shows the number of finished items on standard error, and their mean score.

    Where that is no terminal, a line says it from time to time.

    Yields:
      A function to call for each item with its score, if known.
    """
    console = console_for_progress(stderr=True)
    drawn = has_bar(console)
    columns = (
        TextColumn("{task.description}", style="progress.description", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(),
    )
    scores: list[float] = []
    done = 0
    with Progress(*columns, console=console, disable=not shown or not drawn) as bar:
        line = bar.add_task(title, total=total, score="")

        def show() -> None:
            score = f"score {100 * sum(scores) / len(scores):.1f}%" if scores else ""
            bar.update(line, completed=done, score=score)
            if shown and not drawn:
                _lines.write(f"{title}: {done} of {total}{score and ', '}{score}")

        def tick(score: float | None = None) -> None:
            nonlocal done
            done += 1
            if score is not None:
                scores.append(score)
            show()

        show()
        yield tick
