"""The checkpoints of a run, written in the background by Orbax.

    checkpoints/<step>/state/    parameters and optimizer state
    checkpoints/<step>/meta/     JSON: settings of the run, state of the data iterator

Orbax copies the arrays to the host while the run waits, and writes them in the background to a
temporary directory, which it renames at the end. A failed write causes a warning; older checkpoints
are removed only once a newer one is complete.
"""

import contextlib
import pathlib
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any

from dms_jax import processes
from dms_jax.errors import CheckpointError, ConfigError, plain

# The informative end of long messages of the stores below Orbax.
_FILE_ERRORS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied"
)

Meta = dict[str, Any]


class Checkpoints:
    """The checkpoints in the directory of a run.

    Args:
      directory: the directory of the run.
      keep: number of newest checkpoints to keep.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int):
        self._run, self._keep = directory, keep
        self._path = directory / "checkpoints"
        self._writing: int | None = None
        self._problem: str | None = None
        self._manager: Any = self._open(clean=True)

    def _open(self, *, clean: bool) -> Any:
        """Returns Orbax's manager; `clean` removes files that a killed run left half written."""
        import orbax.checkpoint as ocp

        self._orbax = ocp
        return ocp.CheckpointManager(
            self._path,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                cleanup_tmp_directories=clean,
                async_options=ocp.options.AsyncOptions(
                    # Create directories here: a background write waits forever for one that cannot
                    # be created.
                    create_directories_asynchronously=False,
                ),
            ),
        )

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, one in progress included."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The newest of `steps`; None if there is none."""
        return max(self.steps, default=None)

    def reached_preemption(self, step: int) -> bool:
        """Whether the platform announced a preemption, and all processes agree to stop now."""
        return self._manager.reached_preemption(step)

    def save(self, step: int, state: Any, meta: Meta) -> None:
        """Starts writing a checkpoint, once the one before it is complete; a failure is a warning.

        Args:
          step: number of steps that are done.
          state: the training state.
          meta: the metadata.
        """
        self.wait()
        self._warn()
        args = self._orbax.args
        self._writing = step
        try:
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state), meta=args.JsonSave(meta)),
                force=True,
            )
        except Exception as error:  # file system errors arrive as any of Orbax's exceptions
            self._failed(error)

    def wait(self) -> None:
        """Waits for the write in progress, and drops the arrays of its state.

        Never raises: `save`, `finish` and `close` report a failed write.
        """
        if self._writing is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._writing = None
        except Exception as error:
            self._failed(error)

    def finish(self) -> None:
        """Waits for the write in progress.

        Raises:
          CheckpointError: the write failed.
        """
        self.wait()
        if (problem := self._take_problem()) is not None:
            raise CheckpointError(problem)

    def _warn(self) -> None:
        if (problem := self._take_problem()) is not None:
            warnings.warn(problem, stacklevel=3)

    def _take_problem(self) -> str | None:
        """Returns and clears the error of a failed write."""
        problem, self._problem = self._problem, None
        return problem

    def _failed(self, error: Exception) -> None:
        """Records a failed write, and removes its files."""
        step, self._writing = self._writing, None
        if processes.is_first():
            for part in (self._path / str(step), *self._path.glob(f"{step}.*")):
                shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(Exception):  # ends Orbax's threads; the error is known
            self._manager.close()
        with contextlib.suppress(OSError):  # if the directory is gone, the next save fails too
            self._manager = self._open(clean=False)
        left = [each for each in self.steps if each != step]
        last = f" The last one is of step {left[-1]}." if left else ""
        self._problem = (
            f"The checkpoint of step {step} cannot be written to {self._run}: "
            f"{_reason(error)}.{last}"
        )

    def meta(self, step: int | None) -> Meta:
        """Returns the metadata of the checkpoint of a step."""
        args = self._orbax.args
        return self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))["meta"]

    def restore(
        self,
        abstract_state: Any,
        check_settings: Callable[[Meta], None],
        *,
        only: int | None = None,
    ) -> tuple[Any, Meta]:
        """Reads a checkpoint; returns the state and the metadata.

        Args:
          abstract_state: shapes, dtypes and shardings of the state.
          check_settings: raises ConfigError if the metadata belongs to another run.
          only: its step; None for the newest.

        Raises:
          ConfigError: the checkpoint belongs to another run.
          CheckpointError: it cannot be read.
        """
        args = self._orbax.args
        step = self.latest if only is None else only
        try:
            meta = self.meta(step)
            check_settings(meta)
            state = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(abstract_state))
            )["state"]
        except ConfigError:
            raise
        except Exception as error:  # a damaged file may raise anything
            others = ", ".join(str(each) for each in self.steps if each != step) or "no other"
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be read: {_reason(error)}. Remove "
                f"{self._path / str(step)} to resume from an earlier one; {self._run} has {others}."
            ) from error
        return state, meta

    def discard(self, first: int) -> None:
        """Deletes the checkpoints of this step and later ones."""
        self.wait()
        for step in self.steps:
            if step >= first:
                self._manager.delete(step)

    def close(self) -> None:
        """Waits for the write in progress, and closes."""
        self.wait()
        self._warn()
        self._manager.close()


def _reason(error: Exception) -> str:
    """Shortens an error message: those of Orbax and the stores below it are pages long."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if known := _FILE_ERRORS.search(str(error)):
        return known[0]
    return plain(str(error) or type(error).__name__, 300).rstrip(".")
