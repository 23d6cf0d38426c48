"""What a sandbox permits, how it reports failures, and what it refuses.

Escape attempts are code that continues only if it got out, and then ends with status 2.
"""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dms_jax.errors import CapacityError, ConfigError
from dms_jax.evaluation import sandbox
from dms_jax.evaluation.sandbox import Sandbox, side_by_side
from tests.support.containment import needs_containment
from tests.support.instances import nightly_but

pytestmark = needs_containment
SANDBOX = Sandbox(seconds=20, wall_seconds=30)
SMALL = Sandbox(seconds=1, wall_seconds=30, megabytes=256)
# A refused attack ends by itself; the first allocation of memory can take a second.
REFUSING = dataclasses.replace(SMALL, seconds=20)
SECRET = "the secret of another process"


@pytest.mark.parametrize(
    "source",
    [
        "print(1)\nassert __name__ == 'answer'",
        "assert sorted({'a', 'b', 'c'}, key=hash) == sorted('abc', key=hash)",
        "import random\nassert random.random() == 0.8444218515250481",  # of seed 0
        "import os, sys\nassert not os.environ\nassert sys.argv == ['answer.py']",
        "import os\nfor _ in range(9): os.write(1, bytes(1 << 20))",  # discarded
        "import sys\nassert sys.stdin.read() == ''",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()",
        "import asyncio, bisect, collections, dataclasses, decimal, fractions, functools\n"
        "import heapq, itertools, math, numbers, re, statistics, string, typing, zoneinfo\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int'\n"
        "assert typing.get_type_hints(A) == {'x': int}",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "found = []\ndef deep(n): return n and 1 + deep(n - 1)\n"
        "t = threading.Thread(target=lambda: found.append(deep(50_000)))\n"
        "t.start()\nt.join()\nassert found == [50_000]",
    ],
)
def test_programs_can_compute(source, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SOMEBODY", "x")
    assert SANDBOX.run(source) == ""


def test_failures_are_explained():
    assert SANDBOX.run("1 / 0") == "status 1"
    assert SANDBOX.run("quit()") == "status 0"
    assert SANDBOX.run("import sys\nsys.exit(3)") == "status 3"
    assert SANDBOX.run("import os\nos.kill(os.getpid(), 15)") == "status -15"
    assert SANDBOX.run("bytearray(1 << 31)") == "status 1"


def test_cpu_timeout_is_reported():
    """Not as the signal that ended the process: other limits and the code send signals too."""
    assert Sandbox(seconds=1, wall_seconds=60).run("while True: pass") == "time"
    assert SANDBOX.run("import os\nos.kill(os.getpid(), 9)") == "status -9"


def test_parallel_judgements_keep_their_order():
    runs = side_by_side([lambda i=i: SANDBOX.run(f"quit({i})") for i in range(6)])
    assert runs == [f"status {i}" for i in range(6)]
    assert side_by_side([]) == []


def test_interrupt_does_not_wait_for_running_judgements():
    began, verdicts = threading.Event(), []

    def judge():
        began.set()
        verdicts.append(Sandbox(seconds=5).run("while True: pass"))

    def interrupted():
        began.wait()
        time.sleep(0.3)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupted, judge])
    assert time.monotonic() - start < 5
    assert verdicts == []


# -- where it refuses to run ----------------------------------------------------------------------


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    """Makes a mechanism fail as on a kernel without it."""
    text = sandbox._PROGRAM.read_text()

    def lacking(old, new):
        assert text.count(old) == 1
        (tmp_path / "confined.py").write_text(text.replace(old, new))
        monkeypatch.setattr(sandbox, "_PROGRAM", tmp_path / "confined.py")
        sandbox._require.cache_clear()

    yield lacking
    sandbox._require.cache_clear()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("_RESTRICT_SELF = 444", "_RESTRICT_SELF = 9999", "Landlock .*: .*not implemented"),
        ("_SET_MODE_FILTER = 1", "_SET_MODE_FILTER = 77", "seccomp filters .*: .*Invalid arg"),
        ("os.uname().machine]", "'vax']", "seccomp filters .*: 'vax'"),
    ],
)
def test_missing_mechanism_is_named(lacking, old, new, message):
    lacking(old, new)
    for judge in (Sandbox().require, lambda: Sandbox().run("print(1)")):
        with pytest.raises(ConfigError, match=rf"lacks {message}.*Sandbox\(allow_weaker=True\)"):
            judge()
    weaker = Sandbox(allow_weaker=True, wall_seconds=30, megabytes=256)
    assert weaker.run("print(1)") == ""
    assert weaker.run("bytearray(1 << 30)") == "status 1"


def test_limits_too_small_are_named():
    with pytest.raises(ConfigError, match=r"megabytes=1,"):
        Sandbox(megabytes=1).require()
    with pytest.raises(ConfigError, match="seconds must be"):
        Sandbox(seconds=0)


def test_failed_start_is_an_error_not_a_score(monkeypatch):
    SANDBOX.require()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CapacityError, match="could not start a process: No such file"):
        SANDBOX.run("print(1)")


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox.os, "name", "nt")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="needs Linux; this is win32"):
        Sandbox(megabytes=999).require()


# -- escapes ---------------------------------------------------------------------------------------

REFUSED = {
    # processes
    "fork": "while True: os.fork()",
    "subprocess": "subprocess.run(['/bin/true'])",
    "exec": "os.execv('/bin/true', ['true'])",
    # memory
    "100 GB at once": "bytearray(100 << 30)",
    "a larger limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    # files
    "write": "open('{folder}/new', 'w')",
    "fill the disk": "file = tempfile.TemporaryFile()\nwhile True: file.write(bytes(1 << 20))",
    "remove": "os.unlink('{folder}/secret')",
    "rename": "os.rename('{folder}/secret', '{folder}/new')",
    "mode": "os.chmod('{folder}/secret', 0o777)",
    "read a secret": "open('{folder}/secret').read()",
    "read a link to a secret": "open('{folder}/link').read()",
    "read through ..": "open(os.path.dirname(os.__file__) + '/..' * 20 + '{folder}/secret').read()",
    "list a folder": "os.listdir('{folder}')",
    "read the parent's environment": "open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    # network
    "TCP to this machine": "socket.create_connection(('127.0.0.1', {port}))",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "UNIX socket": "socket.socket(socket.AF_UNIX).connect('{folder}/unix')",
    # signals to others, and other ways to harm them
    "kill the parent": "os.kill(os.getppid(), 9)",
    "survive the parent": "libc('prctl', 1, 0, 0, 0, 0)",
    "limit the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "ptrace the parent": "libc('ptrace', 16, os.getppid(), 0, 0)",
    # privileges
    "namespaces": "os.unshare(os.CLONE_NEWUSER)",
}
# System calls, by their numbers on x86-64.
CALLS = {
    "read memory of the parent": "310, os.getppid(), bytes(16), 1, bytes(16), 1, 0",
    "calls of x32": "0x40000000 | 39",
}
if os.uname().machine == "x86_64":
    REFUSED |= {name: f"libc('syscall', {call})" for name, call in CALLS.items()}
# Ended by a limit, or by the process itself.
ENDED = {
    "loop": "while True: pass",
    "loop that ignores the signal": "signal.signal(signal.SIGXCPU, print)\nwhile True: pass",
    "exit": "os._exit(0)",
    "kill itself": "os.kill(os.getpid(), 9)",
    "calls of 32 bits": (
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b801000000cd80c3'))  # exit(0), by its number of 32 bits\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()"
    ),
}
MODULES = ("ctypes", "mmap", "os", "resource", "signal", "socket", "subprocess", "tempfile")
LIBC = """
def libc(name, *arguments):
    import ctypes
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise PermissionError if error == 1 else LookupError(error)
"""
REFUSALS = "MemoryError, OSError, ValueError"  # PermissionError and FileNotFoundError are OSErrors


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with a secret and a UNIX socket, a TCP socket, and a watch over all of them."""
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    (folder / "link").symlink_to(secret)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "unix"))
        unix.listen()
        yield folder, tcp, unix


def attack(code, folder="", port=0):
    """A program that ends with status 2 if the code reaches its end, and with 3 if it is refused.

    Any other exception is a mistake in the attack.
    """
    body = textwrap.indent(code.format(folder=folder, port=port), "    ")
    imports = "".join(f"import {name}\n" for name in MODULES if name in code)
    return (
        f"import os\n{imports}{LIBC}\ntry:\n{body}\nexcept ({REFUSALS}): os._exit(3)\nos._exit(2)\n"
    )


def children():
    """Child processes of this one, zombies included."""
    tasks = Path("/proc/self/task")
    found: set[str] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found.update((task / "children").read_text().split())
    return found


# One or two of each kind; the others are nightly.
QUICK = {
    *("fork", "exec", "100 GB at once", "write", "mode", "read a secret"),
    *("TCP to this machine", "UNIX socket", "kill the parent", "namespaces", "loop", "exit"),
}


@pytest.mark.parametrize("name", nightly_but(QUICK, [*REFUSED, *ENDED]))
def test_escapes_fail(outside, name):
    folder, tcp, unix = outside
    before, listing = children(), sorted(folder.iterdir())
    state = (folder / "secret").stat()
    code = attack((REFUSED | ENDED)[name], folder, tcp.getsockname()[1])
    begin = time.monotonic()
    failure = (SMALL if name in ENDED else REFUSING).run(code)
    if name in ENDED:
        assert failure not in ("", "status 2", "status 3")
    else:
        assert failure == "status 3"
    assert time.monotonic() - begin < SMALL.wall_seconds, "a limit on the clock had to end it"
    # Nothing outside has changed, no socket was used, and no process stays.
    assert (folder / "secret").read_text() == SECRET
    now = (folder / "secret").stat()
    assert (now.st_mode, now.st_uid, now.st_mtime_ns) == (
        state.st_mode,
        state.st_uid,
        state.st_mtime_ns,
    )
    assert sorted(folder.iterdir()) == listing
    for server in (tcp, unix):
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert children() <= before


def test_control_attacks_work_outside_the_sandbox(outside):
    """The attacks are well formed: outside the sandbox they reach the end."""
    folder, tcp, _ = outside
    for name in ("read a secret", "read a link to a secret", "read through ..", "list a folder"):
        code = attack(REFUSED[name], folder, tcp.getsockname()[1])
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2
    assert SMALL.run(attack("pass")) == "status 2"


def test_wall_clock_timeout():
    short = Sandbox(wall_seconds=2)
    begin = time.monotonic()
    assert short.run("import time\nwhile True: time.sleep(1000)") == "time"
    assert time.monotonic() - begin < 30


@pytest.mark.nightly
def test_sandbox_dies_with_its_parent():
    """Even if the parent is killed and cannot clean up."""
    source = (
        "from dms_jax.evaluation.sandbox import Sandbox\n"
        "sandbox = Sandbox(wall_seconds=600)\n"
        "sandbox.require()\n"  # a process of its own, which ends by itself
        "print('ready', flush=True)\n"
        "sandbox.run('import time; time.sleep(600)')"
    )
    judge = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert judge.stdout is not None
    assert judge.stdout.readline() == b"ready\n"
    listing = Path(f"/proc/{judge.pid}/task/{judge.pid}/children")
    try:
        for _ in range(600):
            time.sleep(0.1)
            if pids := listing.read_text().split():
                break
        time.sleep(0.5)
        (pid,) = pids
    finally:
        judge.kill()
        judge.wait()
        judge.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the confined process lives on")
