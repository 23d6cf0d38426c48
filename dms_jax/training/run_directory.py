"""The directory of a run: resumable checkpoints, written in the background by Orbax, and a log.

    out/
      .lock                       locked by the run that writes to it
      checkpoints/<step>/state/   parameters and optimizer state
      checkpoints/<step>/meta/    JSON: settings of the run, state of the data iterator
      log.jsonl                   one line per step
      snapshots/<ratio>/          Hugging Face directories at the recipe's snapshots
      model/                      the resulting Hugging Face directory

Orbax copies the arrays to the host while the run waits, and writes them in the background to a
temporary directory, which it renames at the end. A failed write causes a warning; older checkpoints
are removed only once a newer one is complete.

A resumed run truncates the log at the step that it resumes from. The first of several processes
locks the directory and writes the log; all of them read and write checkpoints.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import warnings
from typing import Any

from dms_jax import processes
from dms_jax.differences import difference
from dms_jax.errors import CheckpointError, ConfigError, DmsJaxError, plain
from dms_jax.file_lock import lock
from dms_jax.json_text import json_text

# The informative end of long messages of the stores below Orbax.
_FILE_ERRORS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied"
)


class RunDirectory:
    """The directory of one run.

    Args:
      path: path of the directory, which is created if needed.
      settings: JSON data that must not change when the run is resumed.
      resume: whether to continue the directory's run; if False, the directory must hold none.
      restart_from: step of the checkpoint to continue from with another recipe; None to continue
        with the same one.
      keep: number of newest checkpoints to keep.

    Attributes:
      path: the path, absolute.

    Raises:
      CheckpointError: the directory cannot be written, or has no checkpoint to restart from.
      ConfigError: it holds a run and `resume` is False, or another run is writing to it.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        settings: dict[str, Any],
        resume: bool,
        restart_from: int | None,
        keep: int,
    ):
        self.path = pathlib.Path(path).expanduser().absolute()
        # As read from a checkpoint: JSON turns tuples into lists.
        self._settings = json.loads(json.dumps(settings))
        self._restart_from, self._log, self._lock = restart_from, None, None
        self._keep = keep
        self._manager: Any = None  # Orbax's
        self._writing: int | None = None  # step of the checkpoint in progress
        self._problem: str | None = None  # of a failed write that was not reported yet
        self._back_to: int | None = None  # step of a restart, until later checkpoints are removed
        try:
            self._open()
            self._manager = self._make_manager(clean=True)
            self._check_steps(resume)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Creates and locks the directory, in the first process only."""
        agreement, error = processes.Agreement(), None
        try:
            if processes.is_first():
                self._lock = _locked(self.path)
        except DmsJaxError as caught:
            error = caught
        agreement.first_done(error)
        if error is not None:
            raise error

    def _make_manager(self, *, clean: bool) -> Any:
        """Returns Orbax's manager; `clean` removes files that a killed run left half written."""
        import orbax.checkpoint as ocp

        self._orbax = ocp
        return ocp.CheckpointManager(
            self.path / "checkpoints",
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
    def _steps(self) -> list[int]:
        """The steps that have a checkpoint, one in progress included."""
        return sorted(self._manager.all_steps())

    def _check_steps(self, resume: bool) -> None:
        steps, step = self._steps, self._restart_from
        if steps and not resume:
            raise ConfigError(
                f"{self.path} holds a run at step {steps[-1]}. Resume it, or give another "
                "directory."
            )
        if step is None or self._has_restarted():
            return
        if step and step not in steps:
            held = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"{self.path} holds no checkpoint of step {step} to restart from; it has {held}."
            )
        self._back_to = step

    def _has_restarted(self) -> bool:
        """Whether the newest checkpoint was written after this same restart."""
        for step in reversed(self._steps):
            try:
                meta = self._meta(step)
            except Exception:  # damaged: Orbax raises errors of many kinds
                continue
            again = meta["restarted_from"] == self._restart_from
            return again and meta["settings"] == self._settings
        return False

    @property
    def latest_step(self) -> int | None:
        """The step of the checkpoint to continue from; None if there is none."""
        latest = max(self._steps, default=None)
        return latest if self._back_to is None else self._back_to or None

    def _meta(self, step: int | None) -> dict[str, Any]:
        """Returns the metadata of the checkpoint of a step."""
        args = self._orbax.args
        return self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))["meta"]

    def restore(self, abstract_state: Any) -> tuple[Any, Any]:
        """Returns the training state to continue from, and the state of the data iterator.

        Args:
          abstract_state: shapes, dtypes and shardings of the training state.

        Raises:
          ConfigError: the run had other settings.
          CheckpointError: the checkpoint cannot be read.
        """
        args, step = self._orbax.args, self.latest_step
        try:
            meta = self._meta(step)
            self._check_settings(meta["settings"])
            state = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(abstract_state))
            )["state"]
        except ConfigError:
            raise
        except Exception as error:  # a damaged file may raise anything
            others = ", ".join(str(each) for each in self._steps if each != step) or "no other"
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be read: {_reason(error)}. Remove "
                f"{self.path / 'checkpoints' / str(step)} to resume from an earlier one; "
                f"{self.path} has {others}."
            ) from error
        return state, meta["data"]

    def _check_settings(self, saved: dict[str, Any]) -> None:
        differing = {
            name
            for name in saved.keys() | self._settings.keys()
            if saved.get(name) != self._settings.get(name)
        }
        if self._restart_from is not None:
            differing -= {"recipe"}
        if differing == {"weights"}:
            raise ConfigError(
                f"{self.path} holds a run of a model of the same shape with other weights. Give "
                "the model that it began with to resume it, or another directory."
            )
        if differing:
            only = differing == {"recipe"} and self.latest_step is not None
            restart = f", `restart_from={self.latest_step}` to resume with this one" if only else ""
            told = ", ".join(difference(saved, self._settings, name) for name in sorted(differing))
            raise ConfigError(
                f"{self.path} holds a run with another {told}. Give the "
                f"same to resume it{restart}, or another directory."
            )

    def remove_later(self) -> None:
        """Deletes the checkpoints after the restart's."""
        if self._back_to is not None:
            self.discard(self._back_to + 1)
            self._back_to = None

    def discard(self, first: int) -> None:
        """Deletes the checkpoints of this step and later ones."""
        self.wait()
        for step in self._steps:
            if step >= first:
                self._manager.delete(step)

    def reached_preemption(self, step: int) -> bool:
        """Whether the platform announced a preemption, and all processes agree to stop now."""
        return self._manager.reached_preemption(step)

    def save(self, step: int, state: Any, data_state: dict[str, Any] | None) -> None:
        """Starts writing a checkpoint, once the one before it is complete; a failure is a warning.

        Does nothing if this step has a checkpoint.

        Args:
          step: number of steps done.
          state: the training state.
          data_state: the state of the data iterator.
        """
        if step == self.latest_step:
            return
        meta = {
            "settings": self._settings,
            "restarted_from": self._restart_from,
            "data": data_state,
        }
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
            place = self.path / "checkpoints"
            for part in (place / str(step), *place.glob(f"{step}.*")):
                shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(Exception):  # ends Orbax's threads; the error is known
            self._manager.close()
        with contextlib.suppress(OSError):  # if the directory is gone, the next save fails too
            self._manager = self._make_manager(clean=False)
        left = [each for each in self._steps if each != step]
        last = f" The last one is of step {left[-1]}." if left else ""
        self._problem = (
            f"The checkpoint of step {step} cannot be written to {self.path}: "
            f"{_reason(error)}.{last}"
        )

    def log(self, record: dict[str, Any]) -> None:
        """Appends a line to the log, with null for numbers that are not finite.

        A failed write is a warning.
        """
        if not processes.is_first():
            return
        try:
            if self._log is None:
                self._log = self._open_log(record["step"])
            self._log.write(json_text(record) + "\n")
            self._log.flush()
        except OSError as error:
            warnings.warn(
                f"The log in {self.path} cannot be written: {error.strerror or error}.",
                stacklevel=2,
            )

    def skipped_steps(self, done: int) -> int:
        """Returns the number of skipped steps among the first `done`, according to the log."""
        return sum(bool(record.get("skipped")) for record in self._logged(done + 1))

    def _open_log(self, next_step: int) -> Any:
        """Opens the log to append, after removing broken lines and those from `next_step` on."""
        kept = [json.dumps(record) + "\n" for record in self._logged(next_step)]
        path = self.path / "log.jsonl"
        beside = path.with_name(".log.jsonl")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(path)
        return path.open("a", encoding="utf-8")

    def _logged(self, next_step: int) -> list[dict[str, Any]]:
        """Returns the records of the log before `next_step`, without broken lines."""
        path = self.path / "log.jsonl"
        kept = []
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                record = json.loads(line)
                kept += [record] if record["step"] < next_step else []
            except (ValueError, KeyError, TypeError):
                continue
        return kept

    def close(self) -> None:
        """Waits for the write in progress, closes the log, and unlocks the directory."""
        try:
            if self._manager is not None:
                self.wait()
                self._warn()
                self._manager.close()
        finally:
            for file in (self._log, self._lock):
                if file is not None:
                    file.close()


def _locked(directory: pathlib.Path) -> Any:
    """Locks a directory for this run; returns the file whose closing unlocks it.

    Raises:
      ConfigError: another run holds the lock.
      CheckpointError: the directory cannot be written.
    """
    try:
        for path in (directory, directory / "checkpoints"):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        file = (directory / ".lock").open("a")
    except OSError as error:
        raise CheckpointError(
            f"The run cannot be written to {directory}: {error.strerror or error}. Give another "
            "`out`."
        ) from error
    locked = lock(file)
    if locked is False:
        file.close()
        raise ConfigError(
            f"Another run is writing to {directory}. Wait for it or end it, or give another `out`."
        )
    if locked is None:
        warnings.warn(
            f"{directory} cannot be locked: take care that no other run writes to it.",
            stacklevel=2,
        )
    return file


def _reason(error: Exception) -> str:
    """Shortens an error message: those of Orbax and the stores below it are pages long."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if known := _FILE_ERRORS.search(str(error)):
        return known[0]
    return plain(str(error) or type(error).__name__, 300).rstrip(".")
