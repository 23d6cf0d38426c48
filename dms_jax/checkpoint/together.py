"""A checkpoint that is saved in steps, by one process or by several together.

    begin      at the same time in all, on the thread of their steps: what is spread over them is
               gathered, and the first makes the directory that they write into
    write      in any thread, each its own part
    complete   once all have written: the first replaces the old checkpoint

An error of one, wherever it is, leaves the old checkpoint and ends the save in all of them.
"""

import abc
import contextlib
import pathlib
from collections.abc import Iterator

from dms_jax import processes
from dms_jax.errors import CheckpointError


class Saving(abc.ABC):
    """A checkpoint that is being saved.

    Args:
        target: the directory that it takes the place of.
    """

    def __init__(self, target: pathlib.Path):
        self._target = target
        self._together = processes.Agreement()
        # Of the first process: leaving it well replaces the target, another way removes the new.
        self._replacement = contextlib.ExitStack()

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _write(self) -> None: ...

    @abc.abstractmethod
    def _complete(self) -> None: ...

    def begin(self) -> None:
        """Take from the devices what this process writes.

        Raises:
            CheckpointError: the first process cannot make its directory.
            OtherProcessError: another process failed.
        """
        try:
            with _file_errors(self._target):
                self._begin()
            self._together()
        except BaseException as error:
            self._together.fail(error)
            self.end(written=False)
            raise

    def write(self) -> None:
        """Write what falls to this process.

        Raises:
            CheckpointError: it cannot be written, or should not be.
        """
        with _file_errors(self._target):
            self._write()

    def complete(self) -> None:
        """Replace the old checkpoint, in the first process, once all have written.

        Raises:
            CheckpointError: it cannot be replaced.
        """
        if processes.is_first():
            with _file_errors(self._target):
                self._complete()

    def run(self) -> None:
        """Write and complete it; of several processes all do, at the same time.

        Raises:
            CheckpointError: it cannot be written, or should not be.
            OtherProcessError: another process failed.
        """
        try:
            self.write()
            self._together()
            self.complete()
            self._together()
        except BaseException as error:
            # The others may be in the middle of large files.
            self._together.fail(error, processes.LONGEST_WAIT_SECONDS)
            self.end(written=False)
            raise

    def end(self, *, written: bool) -> None:
        """End it beside an error: complete if all processes have written, and else without a trace.

        Args:
            written: whether this process has.
        """
        if self._together.all_well(written):
            self.complete()
        else:
            ended = CheckpointError("it was ended")
            self._replacement.__exit__(CheckpointError, ended, None)


@contextlib.contextmanager
def _file_errors(target: pathlib.Path) -> Iterator[None]:
    """Raise CheckpointError where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {target}: {error}") from error
