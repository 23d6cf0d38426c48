"""The checkpoints of a run: written in the background, verified when they are read.

    checkpoints/<step>/state/           Orbax: parameters and optimizer state
    checkpoints/<step>/meta/            JSON: settings of the run, state of the data iterator
    checkpoints/<step>/checksums.json   the SHA-256 of each of these files
    damaged/<step>/                     a checkpoint that could not be read, and was passed over

Orbax copies the arrays to the host while the run waits, and writes them to a temporary directory
while it goes on, which it renames at the end. A checkpoint that cannot be written is a warning:
the older ones stay, since they are removed only after a newer one is complete.
"""

import contextlib
import gc
import hashlib
import json
import logging
import pathlib
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax

from dms_jax import processes
from dms_jax.errors import CheckpointError, ConfigError, plain

_CHECKSUMS = "checksums.json"
# Orbax notes in it, last of all, when the checkpoint was complete.
_TIMES = "_CHECKPOINT_METADATA"

# What the stores below Orbax end their pages with.
_OF_FILES = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied"
)

Meta = dict[str, Any]


class _Quiet(logging.Filter):
    """Drops what is printed of an error that Orbax then raises: hundreds of lines of frames.

    It is raised to whoever waits for the checkpoint, and said in one line there. Orbax logs it. Of
    the other arrays of the checkpoint, asyncio logs those that failed too. TensorStore is still
    writing others: that the event loop which it reports to is closed goes to `sys.unraisablehook`.
    Python warns of those that were not begun; that filter stays.
    """

    _LOGGERS = logging.getLogger("absl"), logging.getLogger("asyncio")

    def __init__(self):
        super().__init__()
        self._open, self._hook = 0, sys.unraisablehook

    def begin(self) -> None:
        """Begins to filter, for one more user of Orbax."""
        self._open += 1
        for logger in self._LOGGERS:
            logger.addFilter(self)
        warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)
        if sys.unraisablehook != self._on_unraisable:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable

    def end(self) -> None:
        """Ends it with the last one."""
        self._open = max(self._open - 1, 0)
        if not self._open:
            for logger in self._LOGGERS:
                logger.removeFilter(self)
            if sys.unraisablehook == self._on_unraisable:
                sys.unraisablehook = self._hook

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        frames = traceback.walk_tb(record.exc_info[2])
        files = record.pathname, *(frame.f_code.co_filename for frame, _ in frames)
        return not any("orbax" in pathlib.PurePath(file).parts for file in files)

    def _on_unraisable(self, told: Any) -> None:
        trace = told.exc_traceback
        first = "" if trace is None else trace.tb_frame.f_code.co_name
        if first != "call_soon_threadsafe" or not isinstance(told.exc_value, RuntimeError):
            self._hook(told)


_quiet = _Quiet()


class Checkpoints:
    """The checkpoints in the directory of a run.

    Args:
      directory: the directory of the run.
      keep: how many of the newest are kept.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int):
        self._run, self._keep = directory, keep
        self._path = directory / "checkpoints"
        self._writing: int | None = None
        self._problem: str | None = None
        _quiet.begin()
        try:
            self._manager: Any = self._open(clean=True)
        except BaseException:
            _quiet.end()
            raise

    def _open(self, *, clean: bool) -> Any:
        """Returns Orbax's manager; `clean`: it removes what a killed run left half written."""
        import orbax.checkpoint as ocp

        self._orbax = ocp
        return ocp.CheckpointManager(
            self._path,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                cleanup_tmp_directories=clean,
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._add_sums,
                    # In the background a directory that cannot be made is waited for in vain.
                    create_directories_asynchronously=False,
                ),
            ),
        )

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, or one is being written."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The newest of `steps`; None if there is none."""
        return max(self.steps, default=None)

    def reached_preemption(self, step: int) -> bool:
        """Whether the platform has told any process, and all agree, that the run must end now."""
        return self._manager.reached_preemption(step)

    def save(self, step: int, state: Any, meta: Meta) -> None:
        """Begins to write a checkpoint, once the one before it is complete.

        What cannot be written is a warning; the run goes on.

        Args:
          step: number of steps that are done.
          state: the training state.
          meta: what is saved beside it.
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
        except Exception as error:  # of the file system, through any of Orbax's parts
            self._failed(error)

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, and drops the arrays of its state.

        Does not raise: `save`, `finish` and `close` report what could not be written.
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
        """Waits for the checkpoint that is being written.

        Raises:
          CheckpointError: it could not be written.
        """
        self.wait()
        if (problem := self._take_problem()) is not None:
            raise CheckpointError(problem)

    def _warn(self) -> None:
        if (problem := self._take_problem()) is not None:
            warnings.warn(problem, stacklevel=3)

    def _take_problem(self) -> str | None:
        """Returns what could not be written, once; collects its tasks, which log, while quiet."""
        problem, self._problem = self._problem, None
        if problem is not None:
            gc.collect()
        return problem

    def _failed(self, error: Exception) -> None:
        """Notes what is wrong, removes what was written in part, and goes on without it."""
        step, self._writing = self._writing, None
        if processes.is_first():
            for part in (self._path / str(step), *self._path.glob(f"{step}.*")):
                shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(Exception):  # its threads; what it could not write was said
            self._manager.close()
        with contextlib.suppress(OSError):  # the directory is gone: the next save says so again
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
        """Returns what was saved beside the state of a step."""
        args = self._orbax.args
        return self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))["meta"]

    def restore(
        self,
        abstract_state: Any,
        check_settings: Callable[[Meta], None],
        *,
        only: int | None = None,
    ) -> tuple[Any, Meta]:
        """Reads the newest checkpoint that is whole; returns the state and what is beside it.

        One that is damaged is a warning, and is moved out of the way.

        Args:
          abstract_state: shapes, dtypes and shardings of the state.
          check_settings: raises ConfigError if what is beside it is of another run.
          only: step of the checkpoint to read in place of the newest; no other will do.

        Raises:
          ConfigError: it is of another run.
          CheckpointError: none can be read.
        """
        wrong: list[str] = []
        tried = self.steps[::-1] if only is None else [only]
        for each in tried:
            try:
                meta, state = self._read(each, abstract_state, check_settings)
            except ConfigError:
                raise
            except Exception as error:  # whatever a file that is not what it was leads to
                wrong.append(f"The checkpoint of step {each} cannot be resumed: {_reason(error)}")
                continue
            for damaged, reason in zip(tried, wrong, strict=False):
                self._pass_over(damaged)
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
        """Compares the files with their checksums; each process does a part of them.

        Raises:
          CheckpointError: one differs or is missing.
        """
        place = self._path / str(step)
        wrong = ""
        try:
            sums = json.loads((place / _CHECKSUMS).read_text(encoding="utf-8"))
            for name in sorted(sums)[jax.process_index() :: jax.process_count()]:
                if not (place / name).is_file():
                    wrong = f"{name} is missing"
                elif _sum(place / name) != sums[name]:
                    wrong = f"{name} is not what was written"
        except (OSError, ValueError, AttributeError) as error:
            wrong = f"{_CHECKSUMS} cannot be read: {_reason(error)}"
        found = list(filter(None, processes.gather(wrong)))
        if found:
            raise CheckpointError(found[0])

    def _pass_over(self, step: int) -> None:
        """Moves a checkpoint out of the way of the steps that come again."""
        if processes.is_first():
            place = self._run / "damaged" / str(step)
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            (self._path / str(step)).rename(place)
        processes.gather("")
        self._manager.reload()

    def discard(self, first: int) -> None:
        """Removes the checkpoints from a step on."""
        self.wait()
        for step in self.steps:
            if step >= first:
                self._manager.delete(step)

    def close(self) -> None:
        """Waits for what is being written, and closes."""
        try:
            self.wait()
            self._warn()
            self._manager.close()
        finally:
            _quiet.end()


def _files(place: pathlib.Path) -> list[str]:
    """The files of a checkpoint that have a checksum, by their path in it."""
    found = (path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    return sorted(name for name in found if name != _TIMES)


def _sum(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """The text of an error, of which Orbax and the stores below it write pages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if known := _OF_FILES.search(str(error)):
        return known[0]
    return plain(str(error) or type(error).__name__, 300).rstrip(".")
