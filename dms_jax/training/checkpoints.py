"""The checkpoints of a run: written in the background, verified when they are read.

    checkpoints/<step>/state/           Orbax: parameters and optimizer state
    checkpoints/<step>/meta/            JSON: settings of the run, state of the data iterator
    checkpoints/<step>/checksums.json   the SHA-256 of each of these files
    damaged/<step>/                     a checkpoint that could not be read

Orbax copies the arrays to the host while the run waits, and writes them in the background to a
temporary directory, which it renames at the end. A failed write causes a warning; older checkpoints
are removed only once a newer one is complete.

Orbax checks its indices, not the numbers: if a bit of an array's file has changed, it restores
wrong values silently (0.12.8). The checksums detect that, and the run resumes from an older
checkpoint.
"""

import contextlib
import gc
import hashlib
import json
import logging
import pathlib
import re
import shutil
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax

from dms_jax import processes
from dms_jax.errors import CheckpointError, ConfigError, plain
from dms_jax.regular_files import check_regular

_CHECKSUMS = "checksums.json"
_TIMES = "_CHECKPOINT_METADATA"  # the last file that Orbax writes
_LOGGERS = logging.getLogger("absl"), logging.getLogger("asyncio")
# The informative end of long messages of the stores below Orbax.
_FILE_ERRORS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied"
)

Meta = dict[str, Any]


class _NoOrbaxTracebacks(logging.Filter):
    """Drops log records with hundreds of frames of Orbax.

    Orbax (absl) and asyncio log an error of writing beside raising it; `Checkpoints` reports it in
    one line.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        frames = traceback.walk_tb(record.exc_info[2])
        files = record.pathname, *(frame.f_code.co_filename for frame, _ in frames)
        return not any("orbax" in pathlib.PurePath(file).parts for file in files)


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
        self._quiet = _NoOrbaxTracebacks()
        for logger in _LOGGERS:
            logger.addFilter(self._quiet)
        # Raised for arrays whose writing never began because another write failed.
        warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)

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
                    post_finalization_callback=self._add_sums,
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
        if problem is not None:
            gc.collect()  # failed tasks log when collected: do it now, under the log filter
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

    def _add_sums(self) -> None:
        """Writes the checksums of a checkpoint; Orbax calls it just before it renames it."""
        (place,) = self._path.glob(f"{self._writing}.*")
        sums = {name: _sum(place / name) for name in _files(place)}
        (place / _CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")

    def meta(self, step: int) -> Meta:
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
        """Reads the newest intact checkpoint; returns the state and the metadata.

        A damaged one causes a warning and is moved to `damaged`.

        Args:
          abstract_state: shapes, dtypes and shardings of the state.
          check_settings: raises ConfigError if the metadata belongs to another run.
          only: step of the only checkpoint to try; None for any.

        Raises:
          ConfigError: the checkpoint belongs to another run.
          CheckpointError: no checkpoint can be read.
        """
        wrong: list[str] = []
        tried = self.steps[::-1] if only is None else [only]
        for each in tried:
            try:
                meta, state = self._read(each, abstract_state, check_settings)
            except ConfigError:
                raise
            except Exception as error:  # a damaged file may raise anything
                wrong.append(f"The checkpoint of step {each} cannot be resumed: {_reason(error)}")
                continue
            for damaged, reason in zip(tried, wrong, strict=False):
                self._move_away(damaged)
                warnings.warn(
                    f"{reason}. It was moved to {self._run / 'damaged'}; the run goes on from the "
                    f"one before it, of step {each}.",
                    stacklevel=2,
                )
            return state, meta
        if only is not None:
            others = ", ".join(str(each) for each in self.steps if each != only) or "no other"
            raise CheckpointError(
                f"{wrong[0]}. Give another step to restart from; {self._run} has {others}."
            )
        raise CheckpointError(
            f"{self._run} holds no checkpoint that can be read. {'. '.join(wrong)}. Give another "
            "`out`, or remove its checkpoints to start again."
        )

    def _read(
        self, step: int, abstract_state: Any, check_settings: Callable[[Meta], None]
    ) -> tuple[Meta, Any]:
        self._verify(step)
        meta = self.meta(step)
        check_settings(meta)
        args = self._orbax.args
        state = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(abstract_state))
        )["state"]
        return meta, state

    def _verify(self, step: int) -> None:
        """Compares the files with their checksums; each process checks a share of them.

        Raises:
          CheckpointError: a file differs or is missing.
        """
        place = self._path / str(step)
        wrong = ""
        try:
            check_regular(place / _CHECKSUMS)
            sums = json.loads((place / _CHECKSUMS).read_text(encoding="utf-8"))
            for name in sorted(sums)[jax.process_index() :: jax.process_count()]:
                if not (place / name).is_file():
                    wrong = f"{name} is missing"
                elif _sum(place / name) != sums[name]:
                    wrong = f"{name} has changed since it was written"
        except (OSError, ValueError, AttributeError) as error:
            wrong = f"{_CHECKSUMS} cannot be read: {_reason(error)}"
        found = list(filter(None, processes.gather(wrong)))
        if found:
            raise CheckpointError(found[0])

    def _move_away(self, step: int) -> None:
        """Moves a damaged checkpoint to `damaged`, so that its step can be saved again."""
        if processes.is_first():
            place = self._run / "damaged" / str(step)
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            (self._path / str(step)).rename(place)
        processes.gather("")
        self._manager.reload()

    def discard(self, first: int) -> None:
        """Deletes the checkpoints of this step and later ones."""
        self.wait()
        for step in self.steps:
            if step >= first:
                self._manager.delete(step)

    def close(self) -> None:
        """Waits for the write in progress, and closes."""
        try:
            self.wait()
            self._warn()
            self._manager.close()
        finally:
            for logger in _LOGGERS:
                logger.removeFilter(self._quiet)


def _files(place: pathlib.Path) -> list[str]:
    """Returns the relative paths of a checkpoint's files with a checksum."""
    found = (path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    return sorted(name for name in found if name != _TIMES)


def _sum(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """Shortens an error message: those of Orbax and the stores below it are pages long."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if known := _FILE_ERRORS.search(str(error)):
        return known[0]
    return plain(str(error) or type(error).__name__, 300).rstrip(".")
