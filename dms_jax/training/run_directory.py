"""The directory of a run: resumable checkpoints and a log.

    out/
      .lock                 locked by the run that writes to it
      checkpoints/<step>/   see `checkpoints.py`
      log.jsonl             one line per step
      snapshots/<ratio>/    Hugging Face directories at the recipe's snapshots
      model/                the resulting Hugging Face directory

A resumed run truncates the log at the step that it resumes from. The first of several processes
locks the directory and writes the log; all of them read and write checkpoints.
"""

import json
import os
import pathlib
import tempfile
import warnings
from typing import Any

from dms_jax import processes
from dms_jax.differences import difference
from dms_jax.errors import CheckpointError, ConfigError, DmsJaxError
from dms_jax.file_lock import lock
from dms_jax.json_text import json_text
from dms_jax.training.checkpoints import Checkpoints, Meta


class RunDirectory:
    """The directory of one run.

    Args:
      path: path of the directory, which is created if needed.
      settings: JSON data that must not change when the run is resumed.
      resume: whether to continue the directory's run; if False, the directory must hold none.
      restart_from: step of the checkpoint to continue from with another recipe; None to continue
        with the same one.
      keep: number of checkpoints to keep.

    Attributes:
      path: the path, absolute.
      checkpoints: the checkpoints.

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
        self.checkpoints: Any = None
        self._back_to: int | None = None  # step of a restart, until later checkpoints are removed
        try:
            self._open()
            self.checkpoints = Checkpoints(self.path, keep=keep)
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

    def _check_steps(self, resume: bool) -> None:
        latest, step = self.checkpoints.latest, self._restart_from
        if latest is not None and not resume:
            raise ConfigError(
                f"{self.path} holds a run at step {latest}. Resume it, or give another directory."
            )
        if step is None or self._has_restarted():
            return
        if step and step not in self.checkpoints.steps:
            held = ", ".join(map(str, self.checkpoints.steps)) or "none"
            raise CheckpointError(
                f"{self.path} holds no checkpoint of step {step} to restart from; it has {held}."
            )
        self._back_to = step

    @property
    def latest_step(self) -> int | None:
        """The step of the checkpoint to continue from; None if there is none."""
        return self.checkpoints.latest if self._back_to is None else self._back_to or None

    def restore(self, abstract_state: Any) -> tuple[Any, Any]:
        """Returns the training state to continue from, and the state of the data iterator.

        Args:
          abstract_state: shapes, dtypes and shardings of the training state.

        Raises:
          ConfigError: the run had other settings.
          CheckpointError: the checkpoint cannot be read.
        """
        state, meta = self.checkpoints.restore(
            abstract_state, self._check_settings, only=self._back_to
        )
        return state, meta["data"]

    def remove_later(self) -> None:
        """Deletes the checkpoints after the restart's."""
        if self._back_to is not None:
            self.checkpoints.discard(self._back_to + 1)
            self._back_to = None

    def _has_restarted(self) -> bool:
        """Whether the newest checkpoint was written after this same restart."""
        for step in reversed(self.checkpoints.steps):
            try:
                meta = self.checkpoints.meta(step)
            except Exception:  # damaged: Orbax raises errors of many kinds
                continue
            again = meta["restarted_from"] == self._restart_from
            return again and meta["settings"] == self._settings
        return False

    def _check_settings(self, meta: Meta) -> None:
        saved = meta["settings"]
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

    def save(
        self,
        step: int,
        state: Any,
        data_state: dict[str, Any] | None,
    ) -> None:
        """Starts writing a checkpoint, unless this step has one.

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
        self.checkpoints.save(step, state, meta)

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
        """Closes the log and the checkpoints, and unlocks the directory."""
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
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
