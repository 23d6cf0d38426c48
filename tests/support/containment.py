"""Whether this system has what the sandbox needs, asked of the kernel and not of the sandbox."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")
CREATE_RULESET = 444


def lacking() -> str:
    """What the system lacks; empty where code can be contained."""
    if sys.platform != "linux":
        return "the mechanisms are Linux's"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return "there is no list of system calls for this processor"
    if not ACTIONS.exists() or "user_notif" not in ACTIONS.read_text().split():
        return "the kernel has no seccomp user notification"
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1:
        return "the kernel, or the container, has no Landlock"
    return ""


needs_containment = pytest.mark.skipif(bool(lacking()), reason=lacking() or "contained")
