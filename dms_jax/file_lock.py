"""Locks of files and directories: one process at a time.

The system lets go of a lock when the file is closed, or when its process ends for any reason, so
that a killed process never keeps one.
"""

from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


def lock(file: Any) -> bool | None:
    """Locks an open file, or the descriptor of one, until it is closed.

    Returns:
      False if another process has it; None where the system or the file system has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
