"""Locks the process in, irreversibly: limits, privileges, files, system calls, in this order."""

import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

_DEVICES = ("/dev/null",)
_SHARED_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_OTHERS = ("/dev/urandom", "/usr/share/zoneinfo")
_OPEN_FILES = 64


def readable() -> list[str]:
    """Python's own library and the system's shared libraries."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return [*own, *_SHARED_LIBRARIES, *_OTHERS]


def die_with_parent(parent: int) -> None:
    """Ends the process as soon as its parent ends, for any reason."""
    if sys.platform == "linux":
        from . import kernel

        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def confine(limits: dict[str, Any], *, pass_on: Callable[[int], None]) -> list[str]:
    """Locks the process in, and returns the names of the mechanisms that the system lacks.

    Args:
      limits: `seconds` of processor time, bytes of `memory`.
      pass_on: sends a descriptor to the supervisor, which uses it to allow or refuse new threads.
    """
    missing: list[str] = []
    seconds, memory = limits["seconds"], limits["memory"]
    for name, soft, hard in (
        ("RLIMIT_CPU", seconds, seconds + 1),  # SIGXCPU, which shows the reason, then SIGKILL
        ("RLIMIT_AS", memory, memory),
        ("RLIMIT_NOFILE", _OPEN_FILES, _OPEN_FILES),
        ("RLIMIT_FSIZE", 0, 0),
        ("RLIMIT_CORE", 0, 0),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (soft, hard))
        except (AttributeError, ValueError, OSError):
            missing.append(name)
    if sys.platform != "linux":
        return [*missing, f"Landlock and seccomp, which are Linux's (this is {sys.platform})"]
    return missing + _confine_linux(pass_on)


def _confine_linux(pass_on: Callable[[int], None]) -> list[str]:
    from . import kernel, landlock, system_calls

    try:  # if memory runs out elsewhere, this process is the first to go
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no /proc; this step is optional
    missing = []

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except system_calls.UnknownMachineError as error:
            missing.append(f"{name} (no list of system calls for {error})")
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")

    def supervise() -> None:
        listener = system_calls.supervise_threads()
        pass_on(listener)
        os.close(listener)

    attempt("no_new_privs", lambda: kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1))
    attempt("capset", kernel.drop_capabilities)
    attempt("Landlock (Linux 5.13 or later)", lambda: landlock.restrict(readable(), _DEVICES))
    attempt("PR_SET_DUMPABLE", lambda: kernel.prctl(kernel.PR_SET_DUMPABLE, 0))
    attempt("seccomp user notification (Linux 5.5 or later)", supervise)
    attempt("seccomp filters", system_calls.restrict)
    return missing
