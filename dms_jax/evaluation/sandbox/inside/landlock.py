"""Landlock: only listed files may be opened; no running or changing, no TCP ports, no signals.

It needs no privileges (Linux 5.13 and later). The allow list of system calls (`system_calls.py`)
covers what Landlock does not: modes and owners of files, UNIX sockets.
"""

import ctypes
import os
from collections.abc import Iterable

from .kernel import system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every machine
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
# Rights on files by version: moving between folders since 2, truncating since 3, devices since 5.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP, _TCP_SINCE = 0b11, 4  # binding, connecting
_SCOPES, _SCOPES_SINCE = 0b11, 6  # abstract UNIX sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """The version of Landlock that the kernel offers.

    Raises:
      OSError: the kernel has no Landlock.
    """
    return system_call(CREATE_RULESET, None, 0, 1)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From here on allows only reading some folders and writing to some devices.

    Raises:
      OSError: the kernel has no Landlock.
    """
    offered = version()
    files = max(rights for since, rights in _FILES.items() if since <= offered)
    handled = _Ruleset(
        files,
        _TCP if offered >= _TCP_SINCE else 0,
        _SCOPES if offered >= _SCOPES_SINCE else 0,
    )
    size = 24 if offered >= _SCOPES_SINCE else 16 if offered >= _TCP_SINCE else 8
    ruleset = system_call(CREATE_RULESET, handled, size, 0)
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE)
    for path in writable:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    system_call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        system_call(ADD_RULE, ruleset, _PATH_BENEATH, _PathBeneath(rights, place), 0)
    finally:
        os.close(place)
