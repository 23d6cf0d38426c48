"""Checks whether this system supports the sandbox, independently of the sandbox's own checks."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")
CREATE_RULESET = 444


def lacking() -> str:
    """Returns what the system lacks; empty if it can contain code."""
    if sys.platform != "linux":
        return "the mechanisms are Linux's"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return "there is no list of system calls for this processor"
    if not ACTIONS.exists():
        return "the kernel has no seccomp filters"
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1:
        return "the kernel, or the container, has no Landlock"
    return ""


_LACKING = lacking()
needs_containment = pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "contained")
