"""System calls without a Python function: called through libc, with Python's errors."""

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_3 = 0x20080522  # version of the structures: 64 capabilities in two words

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def system_call(number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    """Makes a system call; integers are passed as 64 bits, structures by address.

    Raises:
      OSError: it failed.
    """
    passed = [
        ctypes.byref(each)
        if isinstance(each, ctypes.Structure)
        else ctypes.c_long(each)
        if isinstance(each, int)
        else each
        for each in arguments
    ]
    result = _libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def prctl(option: int, value: int) -> None:
    """Sets an attribute of the process.

    Raises:
      OSError: it failed.
    """
    zero = ctypes.c_ulong(0)
    if _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def drop_capabilities() -> None:
    """Drops every privilege of root except owning root's files.

    Raises:
      OSError: it failed.
    """
    header = _CAPABILITIES_3.to_bytes(4, "little") + bytes(4)
    system_call(_CAPSET[os.uname().machine], header, bytes(24))
