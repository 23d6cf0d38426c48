"""Checks whether this system supports the sandbox, independently of the sandbox's own checks."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")
CREATE_RULESET = 444
# Installs a permissive filter with a listener on its process. Containers may refuse it, or already
# have the one possible listener.
LISTEN = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))
number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
program = Filter(1, struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000))
libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))
failed = libc.syscall(number, 1, 8, ctypes.byref(program)) < 0
refused = os.strerror(ctypes.get_errno()) if failed else ""
"""


def lacking() -> str:
    """Returns what the system lacks; empty if it can contain code."""
    if sys.platform != "linux":
        return "the mechanisms are Linux's"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return "there is no list of system calls for this processor"
    if not ACTIONS.exists() or "user_notif" not in ACTIONS.read_text().split():
        return "the kernel has no seccomp user notification"
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1:
        return "the kernel, or the container, has no Landlock"
    asked = [sys.executable, "-c", f"{LISTEN}\nprint(refused)"]
    refused = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return f"seccomp user notification is refused: {refused}" if refused else ""


_LACKING = lacking()
needs_containment = pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "contained")
