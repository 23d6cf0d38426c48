"""The console for progress: a terminal, a file, or a notebook."""

import importlib.util

from rich.console import Console


def console_for_progress(*, stderr: bool = False) -> Console:
    """Returns a console for a bar; a notebook without ipywidgets gets lines, like a file.

    There rich would show no bar, and warn at every refresh.
    """
    console = Console(stderr=stderr)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        return Console(stderr=stderr, force_jupyter=False, force_terminal=False)
    return console
