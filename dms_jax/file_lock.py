"""Locks of files and directories: one process at a time.

The system releases a lock when the file is closed or its process ends for any reason, so a killed
process never keeps one.
"""

from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


def lock(file: Any) -> bool | None:
    """Locks an open file, or the descriptor of one, until it is closed.

    Returns:
      False if another process has the lock; None if the system or file system has no locks.
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
