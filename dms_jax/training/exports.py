"""Exports at the recipe's ratios: their files are written behind the steps, one at a time.

The run waits while what the devices hold is moved to the host (`begin_save`), and goes on while a
thread writes the files. A second export waits until the first is written, so that the host holds
one at most. What fails in the thread ends the run at its next step, or at its end.

No checkpoint is complete before the exports of earlier steps are: a run that is killed in between
would go on after them, and never write them. In a single process it is completed behind the steps;
of several the run waits for the export where a checkpoint is due.
"""

import concurrent.futures
import warnings
from collections.abc import Callable

Written = concurrent.futures.Future[None]


class Exports:
    """The exports of a run."""

    def __init__(self):
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "export")
        self._written: Written | None = None

    @property
    def written(self) -> Written | None:
        """When the export that is being written is complete; None if there is none."""
        return self._written

    def begin(self, write: Callable[[], None]) -> None:
        """Begins to write an export, after `finish`."""
        assert self._written is None
        self._written = self._thread.submit(write)

    def check(self) -> None:
        """Raises the error of an export, if it has failed."""
        if self._written is not None and self._written.done():
            self.finish()

    def finish(self) -> None:
        """Waits until nothing is being written.

        Raises:
          CheckpointError: it cannot be written, or holds what is not finite.
        """
        if self._written is not None:
            concurrent.futures.wait([self._written])
            written, self._written = self._written, None
            written.result()

    def close(self) -> None:
        """Waits too; what fails is a warning, because the run ends with another error."""
        try:
            self.finish()
        except Exception as error:
            warnings.warn(f"An export was not written: {error}", stacklevel=2)
        finally:
            self._thread.shutdown(wait=False)
