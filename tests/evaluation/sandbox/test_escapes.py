"""Escape attempts. Each is code that continues only if it got out, and then returns 2."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dms_jax.evaluation.sandbox import Sandbox
from tests.support.containment import needs_containment
from tests.support.instances import nightly_but

pytestmark = needs_containment
SMALL = Sandbox(seconds=1, wall_seconds=30, megabytes=256, threads=8, output_megabytes=1)
# A refused attack ends by itself; the first allocation of memory can take a second.
REFUSING = dataclasses.replace(SMALL, seconds=20)
SECRET = "the secret of another process"

# Refused at once, with an exception. {folder} has a file `secret`; this process listens on the
# sockets {port} and {unix}.
REFUSED = {
    # processes
    "fork": "while True: os.fork()",
    "double fork and a session": "os.fork() or (os.setsid(), os.fork(), time.sleep(1000))",
    "a session of its own": "os.setsid()",
    "subprocess": "subprocess.run(['/bin/true'])",
    "system": "assert os.system('true') == 0",
    "spawn": "os.posix_spawn('/bin/true', ['true'], dict())",
    "exec": "os.execv('/bin/true', ['true'])",
    "exec of Python": "os.execv(sys.executable, ['python', '-c', '0'])",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=print).start()",
    "thread bomb": (
        "while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    ),
    # memory
    "100 GB at once": "bytearray(100 << 30)",
    "100 GB mapped": "mmap.mmap(-1, 100 << 30)",
    "100 GB bit by bit": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "a file in memory": "os.memfd_create('x')",
    "shared memory": "multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)",
    "a larger limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "more time": "resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))",
    # files
    "write": "open('{folder}/new', 'w')",
    "append": "open('{folder}/secret', 'a')",
    "truncate": "os.truncate('{folder}/secret', 0)",
    "fill the disk": "file = tempfile.TemporaryFile()\nwhile True: file.write(bytes(1 << 20))",
    "make a folder": "os.mkdir('{folder}/new')",
    "remove": "os.unlink('{folder}/secret')",
    "rename": "os.rename('{folder}/secret', '{folder}/new')",
    "symbolic link": "os.symlink('{folder}/secret', '{folder}/new')",
    "hard link": "os.link('{folder}/secret', '{folder}/new')",
    "pipe in a folder": "os.mkfifo('{folder}/new')",
    "mode": "os.chmod('{folder}/secret', 0o777)",
    "owner": "os.chown('{folder}/secret', 1, 1)",
    "dates": "os.utime('{folder}/secret', (0, 0))",
    "attributes": "os.setxattr('{folder}/secret', 'user.x', b'1')",
    "read a secret": "open('{folder}/secret').read()",
    "read a link to a secret": "open('{folder}/link').read()",
    "read through ..": "open(os.path.dirname(os.__file__) + '/..' * 20 + '{folder}/secret').read()",
    "read beside a folder": "os.open('secret', 0, dir_fd=os.open('{folder}', os.O_PATH))",
    "list a folder": "os.listdir('{folder}')",
    "read users": "open('/etc/passwd').read()",
    "read the parent's environment": "open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    "read the parent's memory": "open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "read a disk": "os.listdir('/dev')",
    "root": "os.chroot('/')",
    "terminal": "open('/dev/tty')",
    # network
    "TCP to this machine": "socket.create_connection(('127.0.0.1', {port}))",
    "TCP to outside": "socket.create_connection(('192.0.2.1', 80), 1)",
    "IPv6": "socket.socket(socket.AF_INET6)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "raw": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "UNIX socket": "socket.socket(socket.AF_UNIX).connect('{folder}/unix')",
    "abstract UNIX socket": "socket.socket(socket.AF_UNIX).bind('\\0mine')",
    "datagrams through a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', 'u')",
    "names": "socket.gethostbyname('localhost.example')",
    # signals to others, and other ways to harm them
    "kill the parent": "os.kill(os.getppid(), 9)",
    "stop the parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "kill everybody": "os.kill(-1, 9)",
    "kill the group": "os.killpg(os.getpgid(os.getppid()), 9)",
    "kill by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "signals of a file": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "survive the parent": "libc('prctl', 1, 0, 0, 0, 0)",
    "limit the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "slow the parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "bind the parent": "os.sched_setaffinity(os.getppid(), [0])",
    "ptrace the parent": "libc('ptrace', 16, os.getppid(), 0, 0)",
    "be traced": "libc('ptrace', 0, 0, 0, 0)",
    # privileges
    "namespaces": "os.unshare(os.CLONE_NEWUSER)",
    "become another user": "os.setuid(1)",
    # its own channels
    "standard input": "os.close(0); input()",
    "input that ends": "input()",
    "exit with an exception": "sys.exit(0)",
}
# System calls, by their numbers on x86-64.
CALLS = {
    "queue a signal": "129, os.getppid(), 9, bytes(128)",
    "read memory of the parent": "310, os.getppid(), bytes(16), 1, bytes(16), 1, 0",
    "mount": "165, b'none', b'/mnt', b'tmpfs', 0, None",
    "io_uring": "425, 8, bytes(256)",
    "bpf": "321, 0, bytes(256), 128",
    "keys": "250, 0, -3, 1",
    "performance events": "298, bytes(128), 0, -1, -1, 0",
    "another filter": "317, 0, 0, None",
    "shared memory of System V": "29, 0, 4096, 0o1600",
    "files by handle": "304, 0, bytes(64), 0",
    "module of the kernel": "175, bytes(64), 64, b''",
    "the clock": "227, 0, bytes(16)",
    "calls of x32": "0x40000000 | 39",
    "faults of its own": "323, 0",
    "personality": "135, 0",
    "write memory of the parent": "311, os.getppid(), bytes(16), 1, bytes(16), 1, 0",
    "a secret in memory": "447, 0",
    "watch files": "253",
    "a namespace with a thread": "56, 0x30D00, 0, 0, 0, 0",
}
if os.uname().machine == "x86_64":
    REFUSED |= {name: f"libc('syscall', {call})" for name, call in CALLS.items()}
# Ended by a limit, or by the process itself.
ENDED = {
    "loop": "while True: pass",
    "loop that ignores the signal": "signal.signal(signal.SIGXCPU, print)\nwhile True: pass",
    "a number too long": "9 ** 9 ** 9 ** 9",
    "close everything": "os.closerange(0, 64)",
    "exit": "os._exit(0)",
    "abort": "os.abort()",
    "kill itself": "os.kill(os.getpid(), 9)",
    "crash": "ctypes.string_at(0)",
    "calls of 32 bits": (
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b801000000cd80c3'))  # exit(0), by its number of 32 bits\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()"
    ),
    "the first thread ends, another goes on": (
        "import _thread\n_thread.start_new_thread(time.sleep, (1,))\nlibc('syscall', 60, 0)"
    ),
    "write to every descriptor": (
        "for each in range(64):\n"
        "    try: os.write(each, b'{{}}\\nnull\\n[2\\n')\n"
        "    except OSError: pass"
    ),
}
MODULES = (
    "ctypes",
    "fcntl",
    "mmap",
    "multiprocessing",
    "multiprocessing.shared_memory",
    "os",
    "resource",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
)
LIBC = """
def libc(name, *arguments):
    import ctypes
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise PermissionError if error == 1 else LookupError(error)
"""
# The exceptions of a refusal. Anything else is a mistake in the attack.
REFUSALS = (
    "AssertionError EOFError FileNotFoundError MemoryError OSError PermissionError RuntimeError "
    "SystemExit ValueError gaierror"
)


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
    """A module with f, which returns 2 if the code reaches its end, else what stopped it."""
    body = textwrap.indent(code.format(folder=folder, port=port), "        ")
    imports = "".join(f"import {name}\n" for name in MODULES if name in code)
    return (
        f"import os\n{imports}{LIBC}\ndef f(x):\n    try:\n{body}\n        return 2\n"
        "    except BaseException as error:\n        return type(error).__name__\n"
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
    *("fork", "exec of Python", "100 GB at once", "write", "mode", "read a secret"),
    *("TCP to this machine", "UNIX socket", "kill the parent", "namespaces", "loop", "exit"),
}


@pytest.mark.parametrize("name", nightly_but(QUICK, [*REFUSED, *ENDED]))
def test_escapes_fail(outside, name):
    folder, tcp, unix = outside
    before, listing = children(), sorted(folder.iterdir())
    state = (folder / "secret").stat()
    code = attack((REFUSED | ENDED)[name], folder, tcp.getsockname()[1])
    begin = time.monotonic()
    call = (SMALL if name in ENDED else REFUSING).call(code, "f", [1])
    if name in ENDED:
        assert call.failure
        assert call.output is None
    else:
        assert call.output in REFUSALS.split()
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
        names = {}
        exec(attack(REFUSED[name], folder, tcp.getsockname()[1]), names)
        assert names["f"](1) == 2
    assert SMALL.call(attack("pass"), "f", [1]).output == 2


def test_wall_clock_timeout():
    short = Sandbox(wall_seconds=2)
    begin = time.monotonic()
    assert short.run("import time\nwhile True: time.sleep(1000)").failure == "time"
    assert time.monotonic() - begin < 30


def test_output_limit():
    run = SMALL.run("import os\nwhile True: os.write(1, bytes(1 << 20))")
    assert run.failure == "output"
    assert run.output == ""
    assert SMALL.run("print('x' * 1000)").output == "x" * 1000 + "\n"
    big = SMALL.call("def f(x): return 'x' * (8 << 20)", "f", [1])
    assert big.failure == "output"


def test_threads_are_counted():
    source = (
        "import threading\ndone = []\nfor i in range({}):\n"
        "    each = threading.Thread(target=done.append, args=(i,))\n"
        "    each.start()\n    each.join()\nprint(len(done))"
    )
    assert SMALL.run(source.format(8)).output == "8\n"
    assert SMALL.run(source.format(9)).failure == "status 1"
    assert Sandbox(threads=0).run(source.format(1)).failure == "status 1"


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SOMEBODY", "x")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")  # a process of Python, not of the answer
    run = SMALL.run("import os, sys\nprint(dict(os.environ), sys.argv, os.getcwd())")
    assert run.output == "{} ['answer.py'] /\n"


@pytest.mark.nightly
def test_sandbox_dies_with_its_parent():
    """Even if the parent is killed and cannot clean up."""
    source = (
        "from dms_jax.evaluation.sandbox import Sandbox\n"
        "Sandbox(wall_seconds=600).run('import time; time.sleep(600)')"
    )
    judge = subprocess.Popen([sys.executable, "-c", source])
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
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the confined process lives on")
