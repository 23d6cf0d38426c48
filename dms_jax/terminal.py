"""The console for progress: a terminal, a file, or a notebook."""

import importlib.util
import sys
import time

from rich.console import Console

LINE_SECONDS = 10.0


class Lines:
    """Writes lines of progress to standard error, for when no terminal shows a bar.

    Writes at most one line every `LINE_SECONDS`, the first after that time, and drops the others.
    """

    def __init__(self):
        self._last = time.monotonic()

    def write(self, line: str) -> None:
        """Writes a line, if it is time for one."""
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def has_bar(console: Console) -> bool:
    """Whether a console can show a bar, and needs no `Lines`."""
    # rich calls a file a terminal if FORCE_COLOR is set.
    return console.is_jupyter or (console.is_terminal and console.file.isatty())


def console_for_progress(*, stderr: bool = False) -> Console:
    """Returns a console for a bar; a notebook without ipywidgets gets lines, like a file.

    There rich would show no bar, and warn at every refresh.
    """
    console = Console(stderr=stderr)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        return Console(stderr=stderr, force_jupyter=False, force_terminal=False)
    return console
