"""The lock of a run's directory: one run at a time writes into it.

The system lets go of the lock when the process ends for any reason, so that a killed run never
keeps its directory. The file says who has it, for the message to others.
"""

import contextlib
import json
import os
import pathlib
import socket
import time
import warnings
from typing import Any

from dms_jax.errors import CheckpointError, ConfigError, plain

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


class RunLock:
    """The lock of a directory, held until it is closed.

    Raises:
      ConfigError: another run has it.
      CheckpointError: the file of the lock cannot be written.
    """

    def __init__(self, directory: pathlib.Path):
        path = directory / ".lock"
        try:
            self._file: Any = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"The run cannot be written to {directory}: {error.strerror or error}. Give "
                "another `out`."
            ) from error
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(path)
            self._file.close()
            raise ConfigError(
                f"Another run is writing to {directory}{holder}. Wait for it or end it, or give "
                "another `out`."
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(
                f"{directory} cannot be locked ({error.strerror or error}): take care that no "
                "other run writes to it.",
                stacklevel=2,
            )
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(who))
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing writes what is left
                self._file.close()
            raise CheckpointError(
                f"The run cannot be written to {directory}: {error.strerror or error}. Make room, "
                "or give another `out`."
            ) from error

    def close(self) -> None:
        """Lets go of the directory."""
        self._file.close()


def _holder(path: pathlib.Path) -> str:
    """Returns who has the lock, for a message; nothing if the file does not say."""
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(who["since"]))
        return f" (process {int(who['pid'])} on {plain(who['host'], 60)}, since {since})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
