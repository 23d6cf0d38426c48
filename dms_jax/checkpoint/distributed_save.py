"""Save a checkpoint in three steps, from one process or from several at once.

    begin      gather arrays that are sharded over processes, and move the tensors that this process
               writes to the host; the first process makes the directory
    write      each process writes its own files
    complete   once all have written: the first replaces the old checkpoint

An error in any process leaves the old checkpoint in place and ends the save in all processes.
"""

import abc
import contextlib
import pathlib
from collections.abc import Iterator

from dms_jax import processes
from dms_jax.errors import CheckpointError


class Saving(abc.ABC):
    """A save in progress.

    Args:
        target: the directory to replace.
    """

    def __init__(self, target: pathlib.Path):
        self._target = target
        self._agreement = processes.Agreement()
        # In the first process; closing it replaces the target, or cleans up after an error.
        self._replacement = contextlib.ExitStack()

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _write(self) -> None: ...

    @abc.abstractmethod
    def _complete(self) -> None: ...

    def begin(self) -> None:
        """Moves the tensors that this process writes to the host.

        Raises:
            CheckpointError: the first process cannot create its directory.
            OtherProcessError: another process failed.
        """
        try:
            with _file_errors(self._target):
                self._begin()
            self._agreement()
        except BaseException as error:
            self._agreement.fail(error)
            self._clean_up()
            raise

    def run(self) -> None:
        """Writes and completes; all processes call this at the same time.

        Raises:
            CheckpointError: it cannot be written, or a check failed.
            OtherProcessError: another process failed.
        """
        try:
            with _file_errors(self._target):
                self._write()
            self._agreement()
            if processes.is_first():
                with _file_errors(self._target):
                    self._complete()
            self._agreement()
        except BaseException as error:
            # The others may still be writing large files.
            self._agreement.fail(error, processes.LONGEST_WAIT_SECONDS)
            self._clean_up()
            raise

    def _clean_up(self) -> None:
        """Removes the new files, in the first process."""
        self._replacement.__exit__(CheckpointError, CheckpointError("it was ended"), None)


@contextlib.contextmanager
def _file_errors(target: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the target."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {target}: {error}") from error
