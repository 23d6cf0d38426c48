"""What a sandbox permits, how it reports failures, and what it refuses.

Escape attempts are code that continues only if it got out, and then ends with status 2.
"""

import dataclasses
import os
import socket
import sys
import textwrap
import threading
import time

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
        "import asyncio, bisect, collections, dataclasses, decimal, fractions, functools\n"
        "import heapq, itertools, math, numbers, re, statistics, string, typing, zoneinfo\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int'\n"
        "assert typing.get_type_hints(A) == {'x': int}",
    ],
)
def test_programs_can_compute(source, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SOMEBODY", "x")
    assert SANDBOX.run(source) == ""


def test_failures_are_explained():
    assert SANDBOX.run("1 / 0") == "status 1"
    assert SANDBOX.run("quit()") == "status 0"
    assert SANDBOX.run("import sys\nsys.exit(3)") == "status 3"
    assert SANDBOX.run("bytearray(1 << 31)") == "status 1"


def test_timeouts_are_reported():
    assert Sandbox(seconds=1, wall_seconds=60).run("while True: pass") == "time"
    assert Sandbox(wall_seconds=2).run("import time\nwhile True: time.sleep(1000)") == "time"


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
    "exec": "os.execv('/bin/true', ['true'])",
    "threads": "threading.Thread(target=print).start()",
    "kill the parent": "os.kill(os.getppid(), 9)",
    "namespaces": "os.unshare(os.CLONE_NEWUSER)",
    # memory
    "100 GB at once": "bytearray(100 << 30)",
    "a larger limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    # files
    "write": "open('{folder}/new', 'w')",
    "remove": "os.unlink('{folder}/secret')",
    "mode": "os.chmod('{folder}/secret', 0o777)",
    "read a secret": "open('{folder}/secret').read()",
    "read a link to a secret": "open('{folder}/link').read()",
    "list a folder": "os.listdir('{folder}')",
    "read the parent's environment": "open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    # network
    "TCP to this machine": "socket.create_connection(('127.0.0.1', {port}))",
    "UNIX socket": "socket.socket(socket.AF_UNIX).connect('{folder}/unix')",
}
# Ended by a limit, or by the process itself.
ENDED = {
    "loop": "while True: pass",
    "loop that ignores the signal": "signal.signal(signal.SIGXCPU, print)\nwhile True: pass",
    "exit": "os._exit(0)",
}
MODULES = ("os", "resource", "signal", "socket", "threading")
REFUSALS = "MemoryError, OSError, RuntimeError, ValueError"


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with a secret and a UNIX socket, and a TCP socket."""
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
    return f"import os\n{imports}try:\n{body}\nexcept ({REFUSALS}): os._exit(3)\nos._exit(2)\n"


# One or two of each kind; the others are nightly.
QUICK = {
    *("fork", "100 GB at once", "write", "mode", "read a secret", "TCP to this machine"),
    *("UNIX socket", "kill the parent", "threads", "loop", "exit"),
}


@pytest.mark.parametrize("name", nightly_but(QUICK, [*REFUSED, *ENDED]))
def test_escapes_fail(outside, name):
    folder, tcp, unix = outside
    listing = sorted(folder.iterdir())
    state = (folder / "secret").stat()
    code = attack((REFUSED | ENDED)[name], folder, tcp.getsockname()[1])
    begin = time.monotonic()
    failure = (SMALL if name in ENDED else REFUSING).run(code)
    if name in ENDED:
        assert failure not in ("", "status 2", "status 3")
    else:
        assert failure == "status 3"
    assert time.monotonic() - begin < SMALL.wall_seconds, "a limit on the clock had to end it"
    # Nothing outside has changed, and no socket was used.
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


def test_control_attack_outside_the_sandbox(outside):
    """A well-formed attack reaches the end, and so does code that attacks nothing."""
    folder, _, _ = outside
    for name in ("read a secret", "read a link to a secret", "list a folder"):
        exec(REFUSED[name].format(folder=folder), {"os": os})
    assert SMALL.run(attack("pass")) == "status 2"
