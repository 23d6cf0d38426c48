"""The program of a confined process: lock itself in, irreversibly, then run one source.

`sandbox.py` starts it without site-packages, so it imports only the standard library. The job is
JSON on standard input: the source, the limits, the exit status of a source that ran to its end, and
the one if a mechanism is missing (standard output names it). What the source prints is lost.

The allow list has the system calls that computing in Python needs. All others, also those of future
kernels, fail with EPERM: processes, threads, sockets, signals, debugging, changes of files, modes,
owners, limits and priorities.
"""

import builtins
import ctypes
import json
import os
import random
import resource
import struct
import sys
import sysconfig
import types
from typing import Any

_X86_64 = """
read:0 write:1 open:2 close:3 stat:4 fstat:5 lstat:6 lseek:8 mmap:9 mprotect:10 munmap:11 brk:12
rt_sigaction:13 rt_sigprocmask:14 rt_sigreturn:15 pread64:17 readv:19 writev:20 access:21
sched_yield:24 mremap:25 madvise:28 dup:32 dup2:33 nanosleep:35 getpid:39 exit:60 uname:63 getcwd:79
readlink:89 gettimeofday:96 getrusage:98 sysinfo:99 times:100 getuid:102 geteuid:107 sigaltstack:131
gettid:186 time:201 futex:202 sched_getaffinity:204 getdents64:217 clock_gettime:228
clock_getres:229 clock_nanosleep:230 exit_group:231 openat:257 newfstatat:262 readlinkat:267
faccessat:269 getrandom:318 statx:332 rseq:334 faccessat2:439
"""
_AARCH64 = """
getcwd:17 dup:23 dup3:24 faccessat:48 openat:56 close:57 getdents64:61 lseek:62 read:63 write:64
readv:65 writev:66 pread64:67 readlinkat:78 newfstatat:79 fstat:80 exit:93 exit_group:94 futex:98
nanosleep:101 clock_gettime:113 clock_getres:114 clock_nanosleep:115 sched_getaffinity:123
sched_yield:124 sigaltstack:132 rt_sigaction:134 rt_sigprocmask:135 rt_sigreturn:139 times:153
uname:160 getrusage:165 gettimeofday:169 getpid:172 getuid:174 geteuid:175 gettid:178 sysinfo:179
brk:214 munmap:215 mremap:216 mmap:222 mprotect:226 madvise:233 getrandom:278 statx:291 rseq:293
faccessat2:439
"""
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in the data of a call
_PR_SET_SECCOMP, _SET_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, on every machine
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Rights on files by version: moving between folders since 2, truncating since 3, devices since 5.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_READABLE = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
    *("/dev/urandom", "/dev/null"),
)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main() -> None:
    """Confines the process and runs the job."""
    job = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDWR)
    missing = []
    for name, lock in (
        ("limits of processes", lambda: _limit(job["limits"])),
        ("Landlock (Linux 5.13 or later)", _restrict_files),
        ("seccomp filters (Linux on x86-64 or aarch64)", _restrict_calls),
    ):
        try:
            lock()
        except Exception as error:  # reported as missing
            missing.append(f"{name}: {error}")
    if missing and not job["weaker"]:
        print("; ".join(missing))
        sys.exit(job["unconfined"])
    for standard in (0, 1):
        os.dup2(nothing, standard)
    os.environ.clear()
    sys.set_int_max_str_digits(0)
    random.seed(0)  # for reproducible verdicts
    # `site`, which defines them, is not loaded
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    sys.argv[:] = ["answer.py"]
    exec(compile(job["source"], "answer.py", "exec"), module.__dict__)
    os._exit(job["done"])


def _limit(limits: dict[str, int]) -> None:
    """Sets the limits by name; the process may not raise them again."""
    for name, most in limits.items():
        # SIGXCPU, which shows the reason, comes a second before SIGKILL
        hard = most + 1 if name == "CPU" else most
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, hard))


def _restrict_files() -> None:
    """From here on only Python's library and the system's can be opened, to read."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = _call("syscall", _CREATE_RULESET, None, 0, 1)
    handled = ctypes.c_uint64(max(bits for since, bits in _FILES.items() if since <= version))
    ruleset = _call("syscall", _CREATE_RULESET, ctypes.byref(handled), 8, 0)
    for path in filter(os.path.exists, _READABLE):
        place = os.open(path, os.O_PATH)
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        beneath = ctypes.byref(_PathBeneath(rights, place))
        _call("syscall", _ADD_RULE, ruleset, 1, beneath, 0)
        os.close(place)
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _restrict_calls() -> None:
    """From here on only the system calls of the list are allowed."""
    mark, table = _MACHINES[os.uname().machine]
    # Code, steps to skip if true, steps to skip if false, operand.
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, mark),
        (_RETURN, 0, 0, _KILL),  # a call with another architecture's numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    for entry in table.split():
        number = int(entry.partition(":")[2])
        steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _EPERM))
    program = _Program(len(steps), b"".join(struct.pack("<HBBI", *step) for step in steps))
    _call("prctl", _PR_SET_SECCOMP, _SET_MODE_FILTER, ctypes.byref(program), 0, 0)


def _call(name: str, *arguments: Any) -> int:
    """Calls a function of libc; integers are passed as 64 bits.

    Raises:
      OSError: it failed.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if (result := function(*passed)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


if __name__ == "__main__":
    main()
