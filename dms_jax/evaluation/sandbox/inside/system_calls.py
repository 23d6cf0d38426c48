"""The allow list of system calls of a confined process: those that computing in Python needs.

All other calls, also those of future kernels, fail with EPERM: processes, sockets, signals to
others, debugging, changes of files, modes, owners, limits and priorities. Two filters are
installed, and the stricter verdict counts:

- the first asks the supervisor about each new thread, which counts them (`supervising.py`), because
  Linux limits count all processes of a user, and none of root's;
- the second is the list below. Some calls depend on their arguments: signals go to the process
  itself, limits are read and not set, `fcntl` and `ioctl` have a few harmless commands.
"""

import ctypes
import os
import struct

from .kernel import system_call

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
_CLONE_THREAD = 0x10000

_ALLOW, _KILL, _ERROR, _SUPERVISE = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_EPERM, _ENOSYS = 1, 38
_LOAD, _IF_EQUAL, _IF_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the data of a call
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8

Step = tuple[int, int, int, int]  # code, steps to skip if true, steps to skip if false, operand


class UnknownMachineError(Exception):
    """There is no list of calls for this processor architecture."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def _machine() -> tuple[int, dict[str, int]]:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise UnknownMachineError(machine)
    mark, table = _MACHINES[machine]
    pairs = (entry.split(":") for entry in table.split())
    return mark, {name: int(number) for name, number in pairs}


def _return(action: int) -> Step:
    return (_RETURN, 0, 0, action)


def _argument(index: int, *, high: bool = False) -> Step:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * high)


def _if_in(index: int, values: tuple[int, ...]) -> list[Step]:
    """Allows a call if the low word of an argument is one of the values."""
    steps = [_argument(index)]
    for value in values:
        steps += [(_IF_EQUAL, 0, 1, value), _return(_ALLOW)]
    return [*steps, _return(_ERROR | _EPERM)]


def _if_null(index: int) -> list[Step]:
    """Allows a call if an argument, 64 bits, is 0."""
    return [
        _argument(index),
        (_IF_EQUAL, 0, 3, 0),
        _argument(index, high=True),
        (_IF_EQUAL, 0, 1, 0),
        _return(_ALLOW),
        _return(_ERROR | _EPERM),
    ]


def _if_thread(action: int, otherwise: int) -> list[Step]:
    return [_argument(0), (_IF_BITS, 0, 1, _CLONE_THREAD), _return(action), _return(otherwise)]


def _program(mark: int, calls: dict[int, list[Step]], otherwise: int) -> bytes:
    """Assembles a filter: for each call the steps that end in a verdict."""
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, mark),
        _return(_KILL),  # a call with another architecture's numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number, own in calls.items():
        steps += [(_IF_EQUAL, 0, len(own), number), *own]
    steps.append(_return(otherwise))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _install(program: bytes, flags: int, seccomp: int) -> int:
    structure = _Program(len(program) // 8, program)
    return system_call(seccomp, _SET_MODE_FILTER, flags, structure)


def supervise_threads() -> int:
    """Makes every new thread wait for the supervisor; returns the descriptor for its answers.

    Raises:
      UnknownMachineError: there is no list for this processor.
      OSError: the kernel lacks such filters (needs Linux 5.5).
    """
    mark, numbers = _machine()
    program = _program(mark, {numbers["clone"]: _if_thread(_SUPERVISE, _ALLOW)}, _ALLOW)
    return _install(program, _NEW_LISTENER, numbers["seccomp"])


def restrict() -> None:
    """From here on allows only the system calls of the list.

    Raises:
      UnknownMachineError, OSError: as above.
    """
    mark, numbers = _machine()
    itself = os.getpid()
    calls = {
        number: [_return(_ALLOW)]
        for name, number in numbers.items()
        if name not in _BY_ARGUMENTS and name != "seccomp"
    }
    calls |= {
        numbers["kill"]: _if_in(0, (itself,)),
        numbers["tgkill"]: _if_in(0, (itself,)),
        numbers["fcntl"]: _if_in(1, _FCNTL),
        numbers["ioctl"]: _if_in(1, _IOCTL),
        numbers["prctl"]: _if_in(0, _PRCTL),
        numbers["prlimit64"]: _if_null(2),  # no new limits
        numbers["clone"]: _if_thread(_ALLOW, _ERROR | _EPERM),
        # Its flags lie in memory, which a filter cannot read; libc falls back to clone.
        numbers["clone3"]: [_return(_ERROR | _ENOSYS)],
    }
    _install(_program(mark, calls, _ERROR | _EPERM), 0, numbers["seccomp"])
