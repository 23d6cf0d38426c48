"""Whether this system has what the sandbox needs, asked of the kernel and not of the sandbox."""

import ctypes
import os
import sys

import pytest

CREATE_RULESET = 444


def lacking() -> str:
    """What the system lacks; empty where code can be contained."""
    if sys.platform != "linux":
        return "the mechanisms are Linux's"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return "there is no list of system calls for this processor"
    if ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < 1:
        return "the kernel, or the container, has no Landlock"
    return ""


_LACKING = lacking()
needs_containment = pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "contained")
