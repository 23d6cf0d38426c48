"""Exports at the recipe's ratios: their files are written behind the steps, one at a time.

The run waits while what the devices hold is moved to the host (`begin_save`), and goes on while a
thread writes the files. A second export waits until the first is written, so that the host holds
one at most.

Of several processes each holds and writes its share, and the first puts the export in its place
once all have, which they find out where they agree on each step; no thread agrees on anything or
uses the devices of others. What fails in the thread ends the run at its next step, or at its end.

No checkpoint is complete before the exports of earlier steps are: a run that is killed in between
would go on after them, and never write them. In a single process it is completed behind the steps;
of several the run waits for the export where a checkpoint is due.
"""

import concurrent.futures
import warnings

from dms_jax import processes
from dms_jax.checkpoint.distributed_save import Saving

Written = concurrent.futures.Future[None]


class Exports:
    """The exports of a run."""

    def __init__(self):
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "export")
        self._written: Written | None = None
        # An export that several processes complete together, and whether this one's share is there.
        self._incomplete: Saving | None = None
        self._has_share = False

    @property
    def written(self) -> Written | None:
        """When the export that is being written is complete; None if there is none."""
        return self._written

    @property
    def waits(self) -> bool:
        """Whether this process still writes its share of an export, or could not."""
        writing = self._written
        if self._incomplete is None or self._has_share:
            return False
        return writing is None or not writing.done() or writing.exception() is not None

    def begin(self, saving: Saving) -> None:
        """Begins to write an export, after `finish`."""
        assert self._written is None
        if processes.several():
            self._incomplete, self._has_share = saving, False
        self._written = self._thread.submit(saving.write if processes.several() else saving.run)

    def complete(self) -> None:
        """Begins to put an export of several processes in its place, of which none waits."""
        if self._incomplete is not None:
            saving, self._incomplete = self._incomplete, None
            self._written = self._thread.submit(saving.complete)

    def check(self) -> None:
        """Raises the error of an export, if it has failed."""
        if self._written is not None and self._written.done():
            self._wait()

    def finish(self, agree: processes.Agreement) -> None:
        """Waits in all processes until no export is being written.

        Raises:
          CheckpointError: it cannot be written, or holds what is not finite.
          OtherProcessError: another process failed.
        """
        self._wait()
        agree()
        self.complete()
        self._wait()
        agree()

    def _wait(self) -> None:
        if self._written is not None:
            concurrent.futures.wait([self._written])
            written, self._written = self._written, None
            written.result()
            self._has_share = True

    def close(self) -> None:
        """Waits too; what fails is a warning, because the run ends with another error."""
        saving, self._incomplete = self._incomplete, None
        try:
            try:
                self._wait()
            finally:
                if saving is not None:
                    saving.end(written=self._has_share)
        except Exception as error:
            warnings.warn(f"An export was not written: {error}", stacklevel=2)
        finally:
            self._thread.shutdown(wait=False)
