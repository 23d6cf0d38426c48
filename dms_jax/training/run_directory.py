"""The directory of a run: resumable checkpoints and a log, written atomically.

    out/
      checkpoints/<step>/   Orbax: parameters, optimizer state, and as JSON the state of the data
                            iterator, the recipe, the policy and the seed
      log.jsonl             one line per step
      snapshots/<ratio>/    Hugging Face directories at the recipe's snapshots
      model/                the resulting Hugging Face directory

Orbax writes a checkpoint to a temporary directory and renames it. A resumed run truncates the log
at the step that it resumes from.
"""

import json
import math
import os
import pathlib
import tempfile
from typing import Any

import jax

from dms_jax.errors import CheckpointError, ConfigError

KEPT_CHECKPOINTS = 2


class RunDirectory:
    """The directory of one run.

    Args:
      path: path of the directory, which is created if needed.
      settings: JSON data that must be the same when the run is resumed.
      resume: whether to continue a run that the directory holds; otherwise it must hold none.

    Raises:
      CheckpointError: the directory cannot be written.
      ConfigError: it holds a run and `resume` is False.
    """

    def __init__(self, path: str | os.PathLike, *, settings: dict[str, Any], resume: bool):
        self.path = pathlib.Path(path).expanduser().absolute()
        # As it comes back from a checkpoint: JSON turns tuples into lists.
        self._settings = json.loads(json.dumps(settings))
        self._log: Any = None
        _check_writable(self.path)
        import orbax.checkpoint as ocp

        self._orbax = ocp
        self._manager = ocp.CheckpointManager(
            self.path / "checkpoints",
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT_CHECKPOINTS, enable_async_checkpointing=False
            ),
        )
        self.latest_step: int | None = self._manager.latest_step()
        if self.latest_step is not None and not resume:
            raise ConfigError(
                f"{self.path} holds a run at step {self.latest_step}. Resume it, or give another "
                "directory."
            )

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any] | None]:
        """Returns the latest training state and the state of the data iterator.

        Args:
          abstract_state: shapes, dtypes and shardings of the training state.

        Raises:
          ConfigError: the run had other settings.
          CheckpointError: the checkpoint cannot be read, or is of another model.
        """
        args = self._orbax.args
        step = self.latest_step
        try:
            meta: Any = self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))
            meta = meta["meta"]
            self._check_settings(meta["settings"])
            state: Any = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(abstract_state))
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoint of step {step} in {self.path} cannot be resumed: {error}"
            ) from error
        return state["state"], meta["data"]

    def _check_settings(self, saved: dict[str, Any]) -> None:
        differing = sorted(
            name
            for name in saved.keys() | self._settings.keys()
            if saved.get(name) != self._settings.get(name)
        )
        if differing:
            raise ConfigError(
                f"{self.path} holds a run with another {', '.join(differing)}. Give the same "
                "to resume it, or another directory."
            )

    def save(self, step: int, state: Any, data_state: dict[str, Any] | None) -> None:
        """Writes a checkpoint, unless there is one of this step."""
        if step == self.latest_step:
            return
        args = self._orbax.args
        meta = {"settings": self._settings, "data": data_state}
        try:
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state), meta=args.JsonSave(meta)),
                force=True,
            )
            self._manager.wait_until_finished()
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be written to {self.path}: {error}"
            ) from error
        self.latest_step = step

    def log(self, record: dict[str, Any]) -> None:
        """Appends a line to the log; numbers that are not finite become null."""
        if jax.process_index() != 0:
            return
        if self._log is None:
            self._log = self._open_log(record["step"])
        self._log.write(json.dumps(_finite(record)) + "\n")
        self._log.flush()

    def skipped_steps(self, done: int) -> int:
        """Returns how many of the first `done` steps the log says were skipped."""
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
        """Returns the records of the log before `next_step`; broken lines are left out."""
        path = self.path / "log.jsonl"
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
                kept += [record] if record["step"] < next_step else []
            except (ValueError, KeyError, TypeError):
                continue
        return kept

    def close(self) -> None:
        """Closes the log and the checkpoints."""
        if self._log is not None:
            self._log.close()
        self._manager.close()


def _finite(value: Any) -> Any:
    """Returns JSON data with null for each number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_writable(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CheckpointError(
            f"The run cannot be written to {path}: {error.strerror or error}. Give another `out`."
        ) from error
