"""The program of a confined process: lock itself in, irreversibly, then run one source.

`sandbox.py` starts it without site-packages, so it imports only the standard library. The job is
JSON on standard input: the source, the limits, the exit status of a source that ran to its end, and
the one if a mechanism is missing (standard output names it). What the source prints is lost.

The allow list has the system calls that computing in Python needs. All others, also those of future
kernels, fail with EPERM: processes, sockets, signals to others, debugging, changes of files, modes,
owners, limits and priorities. Some depend on their arguments: signals go to the process itself,
limits are read and not set, `fcntl` and `ioctl` have a few harmless commands.
"""

import builtins
import ctypes
import json
import os
import random
import resource
import signal
import struct
import sys
import sysconfig
import types
from typing import Any

_X86_64 = """
read:0 write:1 open:2 close:3 stat:4 fstat:5 lstat:6 poll:7 lseek:8 mmap:9 mprotect:10 munmap:11
brk:12 rt_sigaction:13 rt_sigprocmask:14 rt_sigreturn:15 pread64:17 pwrite64:18 readv:19 writev:20
access:21 pipe:22 select:23 sched_yield:24 mremap:25 madvise:28 dup:32 dup2:33 pause:34 nanosleep:35
getitimer:36 alarm:37 setitimer:38 getpid:39 exit:60 uname:63 getcwd:79 readlink:89 umask:95
gettimeofday:96 getrlimit:97 getrusage:98 sysinfo:99 times:100 getuid:102 getgid:104 geteuid:107
getegid:108 getppid:110 getpgrp:111 getgroups:115 getresuid:118 getresgid:120 getpgid:121 getsid:124
rt_sigpending:127 rt_sigtimedwait:128 rt_sigsuspend:130 sigaltstack:131 arch_prctl:158 gettid:186
time:201 futex:202 sched_getaffinity:204 getdents64:217 set_tid_address:218 restart_syscall:219
clock_gettime:228 clock_getres:229 clock_nanosleep:230 exit_group:231 epoll_wait:232 epoll_ctl:233
openat:257 newfstatat:262 readlinkat:267 faccessat:269 pselect6:270 ppoll:271 set_robust_list:273
epoll_pwait:281 eventfd2:290 epoll_create1:291 dup3:292 pipe2:293 preadv:295 pwritev:296
getrandom:318 statx:332 rseq:334 close_range:436 faccessat2:439
ioctl:16 clone:56 kill:62 fcntl:72 prctl:157 tgkill:234 prlimit64:302 seccomp:317 clone3:435
"""
_AARCH64 = """
getcwd:17 eventfd2:19 epoll_create1:20 epoll_ctl:21 epoll_pwait:22 dup:23 dup3:24 faccessat:48
openat:56 close:57 pipe2:59 getdents64:61 lseek:62 read:63 write:64 readv:65 writev:66 pread64:67
pwrite64:68 preadv:69 pwritev:70 pselect6:72 ppoll:73 readlinkat:78 newfstatat:79 fstat:80 exit:93
exit_group:94 set_tid_address:96 futex:98 set_robust_list:99 nanosleep:101 getitimer:102
setitimer:103 clock_gettime:113 clock_getres:114 clock_nanosleep:115 sched_getaffinity:123
sched_yield:124 restart_syscall:128 sigaltstack:132 rt_sigsuspend:133 rt_sigaction:134
rt_sigprocmask:135 rt_sigpending:136 rt_sigtimedwait:137 rt_sigreturn:139 getresuid:148
getresgid:150 times:153 getpgid:155 getsid:156 getgroups:158 uname:160 getrlimit:163 getrusage:165
umask:166 gettimeofday:169 getpid:172 getppid:173 getuid:174 geteuid:175 getgid:176 getegid:177
gettid:178 sysinfo:179 brk:214 munmap:215 mremap:216 mmap:222 mprotect:226 madvise:233
getrandom:278 statx:291 rseq:293 close_range:436 faccessat2:439
fcntl:25 ioctl:29 kill:129 tgkill:131 prctl:167 clone:220 prlimit64:261 seccomp:277 clone3:435
"""
_BY_ARGUMENTS = {"ioctl", "fcntl", "prctl", "kill", "tgkill", "prlimit64", "clone", "clone3"}
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

# dup, flags, status, dup with close-on-exec, size of a pipe; not setting a file's signal owner
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
# whether it is a terminal, bytes waiting, close-on-exec, non-blocking
_IOCTL = (0x5401, 0x541B, 0x5450, 0x5451, 0x5421)
_PRCTL = (15, 16, 0x53564D41)  # names of threads and of memory
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000

_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _IF_EQUAL, _IF_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the data of a call
_SET_MODE_FILTER = 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, on every machine
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Rights on files by version: moving between folders since 2, truncating since 3, devices since 5.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_READABLE = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
    *("/dev/urandom", "/dev/null"),
)

Step = tuple[int, int, int, int]  # code, steps to skip if true, steps to skip if false, operand


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
        ("Landlock (Linux 5.13 or later)", lambda: _restrict_files(job["parent"])),
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
    os._exit(job["done"])  # threads of the source may still run


def _limit(limits: dict[str, int]) -> None:
    """Sets the limits by name; the process may not raise them again."""
    for name, most in limits.items():
        # SIGXCPU, which shows the reason, comes a second before SIGKILL
        hard = most + 1 if name == "CPU" else most
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, hard))


def _restrict_files(parent: int) -> None:
    """From here on only Python's library and the system's can be opened, to read.

    Also ends the process as soon as its parent ends, for any reason.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    version = _system_call(_CREATE_RULESET, None, 0, 1)
    handled = ctypes.c_uint64(max(bits for since, bits in _FILES.items() if since <= version))
    ruleset = _system_call(_CREATE_RULESET, ctypes.byref(handled), 8, 0)
    for path in filter(os.path.exists, _READABLE):
        place = os.open(path, os.O_PATH)
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _system_call(_ADD_RULE, ruleset, 1, ctypes.byref(_PathBeneath(rights, place)), 0)
        os.close(place)
    _system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _restrict_calls() -> None:
    """From here on only the system calls of the list are allowed."""
    mark, table = _MACHINES[os.uname().machine]
    pairs = (entry.split(":") for entry in table.split())
    numbers = {name: int(number) for name, number in pairs}
    calls = {
        number: [_return(_ALLOW)]
        for name, number in numbers.items()
        if name not in _BY_ARGUMENTS and name != "seccomp"
    }
    thread = [
        _argument(0),
        (_IF_BITS, 2, 0, _CLONE_NAMESPACES),  # to the last step
        (_IF_BITS, 0, 1, _CLONE_THREAD),
        _return(_ALLOW),
        _return(_EPERM),
    ]
    calls |= {
        numbers["kill"]: _if_in(0, (os.getpid(),)),
        numbers["tgkill"]: _if_in(0, (os.getpid(),)),
        numbers["fcntl"]: _if_in(1, _FCNTL),
        numbers["ioctl"]: _if_in(1, _IOCTL),
        numbers["prctl"]: _if_in(0, _PRCTL),
        numbers["prlimit64"]: _if_null(2),  # no new limits
        numbers["clone"]: thread,
        # Its flags lie in memory, which a filter cannot read; libc falls back to clone.
        numbers["clone3"]: [_return(_ENOSYS)],
    }
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, mark),
        _return(_KILL),  # a call with another architecture's numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number, own in calls.items():
        steps += [(_IF_EQUAL, 0, len(own), number), *own]
    steps.append(_return(_EPERM))
    program = _Program(len(steps), b"".join(struct.pack("<HBBI", *step) for step in steps))
    _system_call(numbers["seccomp"], _SET_MODE_FILTER, 0, ctypes.byref(program))


def _return(action: int) -> Step:
    return (_RETURN, 0, 0, action)


def _argument(index: int, *, high: bool = False) -> Step:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * high)


def _if_in(index: int, values: tuple[int, ...]) -> list[Step]:
    """Allows a call if the low word of an argument is one of the values."""
    steps = [_argument(index)]
    for value in values:
        steps += [(_IF_EQUAL, 0, 1, value), _return(_ALLOW)]
    return [*steps, _return(_EPERM)]


def _if_null(index: int) -> list[Step]:
    """Allows a call if an argument, 64 bits, is 0."""
    return [
        _argument(index),
        (_IF_EQUAL, 0, 3, 0),
        _argument(index, high=True),
        (_IF_EQUAL, 0, 1, 0),
        _return(_ALLOW),
        _return(_EPERM),
    ]


def _system_call(number: int, *arguments: Any) -> int:
    """Makes a system call; integers are passed as 64 bits.

    Raises:
      OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(libc.syscall(ctypes.c_long(number), *passed))


def _prctl(option: int, value: int) -> None:
    """Sets an attribute of the process.

    Raises:
      OSError: it failed.
    """
    zero = ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


if __name__ == "__main__":
    main()
