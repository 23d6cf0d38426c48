"""What a sandbox permits, how it reports failures, and where it refuses to run."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dms_jax.errors import CapacityError, ConfigError
from dms_jax.evaluation.sandbox import Run, Sandbox, confined, side_by_side, supervising
from tests.support.containment import needs_containment

pytestmark = needs_containment
SANDBOX = Sandbox(seconds=20, wall_seconds=30)


@pytest.mark.parametrize(
    ("source", "stdin", "output"),
    [
        ("print(int(input()) + 1)", "41\n", "42\n"),
        ("print(open(0).read().upper())", "ä\n", "Ä\n\n"),
        ("import sys\nprint(len(sys.stdin.read()))", "x" * 1_000_000, "1000000\n"),
        ("print(__name__)\nquit()\nprint(1)", "", "__main__\n"),
        ("import sys\nsys.exit()", "", ""),
        ("print(sorted({'a', 'b', 'c'}, key=hash) == sorted('abc', key=hash))", "", "True\n"),
        ("import random\nprint(random.random())", "", "0.8444218515250481\n"),  # of seed 0
        (
            "import asyncio, bisect, collections, dataclasses, decimal, fractions, functools\n"
            "import heapq, itertools, math, numbers, re, statistics, string, typing, zoneinfo\n"
            "@dataclasses.dataclass\nclass A:\n    x: 'int'\n"
            "print(A(1), typing.get_type_hints(A))",
            "",
            "A(x=1) {'x': <class 'int'>}\n",
        ),
        (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
            "def deep(n): return n and 1 + deep(n - 1)\n"
            "def main(): print(deep(50_000))\n"
            "t = threading.Thread(target=main)\nt.start()\nt.join()",
            "",
            "50000\n",
        ),
    ],
)
def test_programs_can_compute(source, stdin, output):
    run = SANDBOX.run(source, stdin)
    assert (run.output, run.failure) == (output, "")


def test_failures_are_explained():
    assert SANDBOX.run("print(1)\n1 / 0") == Run("1\n", "status 1")
    assert SANDBOX.run("import sys\nsys.exit(3)").failure == "status 3"
    assert SANDBOX.run("import os\nos.kill(os.getpid(), 15)").failure == "status -15"
    assert SANDBOX.call("def f(): return object", "f", []) == Run(None, "status 1")
    assert SANDBOX.call("def g(): return 1", "f", []).failure == "status 1"
    assert SANDBOX.call("import os\nos._exit(0)", "f", []).failure == "no value"
    forged = "import os\nfor each in range(3, 64):\n    try: os.write(each, b'{}\\n')\n"
    forged += "    except OSError: pass\ndef f(): return 2"
    assert SANDBOX.call(forged, "f", []).failure == "no value"


def test_calls_return_json():
    """A method hides a function; output is not the result; threads do not keep it alive."""
    source = (
        "import threading, time\nprint('[')\ndef f(x): return 0\n"
        "class Solution:\n    def f(self, x):\n        print(x)\n"
        "        return [(x, 'ä'), {'a': None}]\n"
        "threading.Thread(target=time.sleep, args=(999,)).start()"
    )
    assert SANDBOX.call(source, "f", [2.5]) == Run([[2.5, "ä"], {"a": None}])


def test_cpu_timeout_is_reported():
    """Not as the signal that ended the process: other limits and the code send signals too."""
    short, loop = Sandbox(seconds=1, wall_seconds=60), "while True: pass"
    judgements = [
        lambda: short.run(f"print(1, flush=True)\n{loop}").failure,
        lambda: short.call(f"def f():\n    {loop}", "f", []).failure,
    ]
    assert side_by_side(judgements) == ["time"] * 2
    assert SANDBOX.run("import os\nos.kill(os.getpid(), 9)").failure == "status -9"


def test_long_arguments_and_threads():
    """Thread creation is permitted as soon as the arguments are transferred."""
    source = (
        "import threading\neach = threading.Thread(target=int)\neach.start()\neach.join()\n"
        "def f(x): return len(x)"
    )
    assert SANDBOX.call(source, "f", ["x" * 3_000_000]).output == 3_000_000


# -- missing mechanisms ----------------------------------------------------------------------------


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    """Makes the module of a mechanism fail as on a kernel without it."""
    folder = Path(supervising.__file__).parent
    shutil.copytree(folder, tmp_path / "sandbox")

    def lacking(name, old, new):
        path = tmp_path / "sandbox" / "inside" / f"{name}.py"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(supervising, "_FOLDER", tmp_path / "sandbox")
        confined._require.cache_clear()

    yield lacking
    confined._require.cache_clear()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "landlock",
            "CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444",
            "CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 9999",
            r"lacks Landlock \(Linux 5.13 or later\) \(Function not implemented\)",
        ),
        (
            "system_calls",
            "_SET_MODE_FILTER, _NEW_LISTENER = 1, 8",
            "_SET_MODE_FILTER, _NEW_LISTENER = 77, 8",
            r"lacks seccomp user notification \(Linux 5.5 or later\) \(.*; seccomp filters \(",
        ),
        (
            "system_calls",
            "machine = os.uname().machine",
            "machine = 'vax'",
            r"no list of system calls for vax",
        ),
        (
            "confining",
            'if sys.platform != "linux":',
            "if True:",
            r"lacks Landlock and seccomp, which are Linux's",
        ),
    ],
)
def test_missing_mechanism_is_named(lacking, name, old, new, message):
    lacking(name, old, new)
    with pytest.raises(ConfigError, match=message):
        Sandbox().require()
    with pytest.raises(ConfigError, match=r"Sandbox\(allow_weaker=True\)"):
        Sandbox().run("print(1)")
    weaker = Sandbox(allow_weaker=True, wall_seconds=30)
    weaker.require()
    assert weaker.run("print(1)").output == "1\n"
    assert weaker.call("def f(x): return x + 1", "f", [1]).output == 2


@pytest.mark.nightly
def test_container_with_its_own_listener_is_named():
    """Only one filter of a process may have a listener, and the container's filter has it."""
    source = (
        f"import sys\nsys.path[:0] = {sys.path!r}\n"
        "from tests.support import containment\n"
        "assert containment.lacking() == ''\n"
        "exec(containment.LISTEN)\n"
        "print(containment.lacking())\n"
        "from dms_jax.evaluation.sandbox import Sandbox\n"
        "try: Sandbox().require()\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=100
    )
    skipped, refused = done.stdout.splitlines()
    assert skipped == "seccomp user notification is refused: Device or resource busy"
    assert "lacks seccomp user notification (Linux 5.5 or later) (Device or resource b" in refused


def test_broken_mechanism_is_noticed(lacking):
    lacking("landlock", "system_call(RESTRICT_SELF, ruleset, 0)", "pass")
    with pytest.raises(ConfigError, match=r"does not hold .* it refused [56] of 7"):
        Sandbox().require()


def test_allow_weaker(lacking):
    """With a mechanism missing, the code can read the user's files."""
    lacking("confining", 'if sys.platform != "linux":', "if True:")
    weaker = Sandbox(allow_weaker=True, seconds=1, wall_seconds=30, megabytes=256)
    assert "root" in weaker.run("print(open('/etc/passwd').read())").output
    assert weaker.run("while True: pass").failure
    assert weaker.run("bytearray(1 << 30)").failure == "status 1"


def test_limits_too_small_are_named():
    with pytest.raises(ConfigError, match=r"megabytes=1,"):
        Sandbox(megabytes=1).require()
    with pytest.raises(ConfigError, match="seconds must be"):
        Sandbox(seconds=0)


def test_failed_start_is_an_error_not_a_score(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CapacityError, match="could not start a process: No such file"):
        SANDBOX.run("print(1)")


def test_too_many_open_files_is_an_error_not_a_score(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", full)
    for judge in (
        lambda: SANDBOX.run("print(1)"),
        lambda: SANDBOX.call("def f(): return 1", "f", []),
    ):
        with pytest.raises(CapacityError, match="Too many open files"):
            judge()
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CapacityError, match="Too many open files"):
        SANDBOX.run("print(1)")


def test_descriptors_are_neither_leaked_nor_inherited(monkeypatch):
    """Neither after a judgement nor to programs started meanwhile."""
    inherited = []
    answer = supervising.Confined.answer
    monkeypatch.setattr(
        supervising.Confined,
        "answer",
        lambda own: (inherited.append(os.get_inheritable(own.listener)), answer(own)),
    )
    source = "import threading\nthreading.Thread(target=int).start()"
    before = set(os.listdir("/proc/self/fd"))
    assert SANDBOX.run(source).failure == ""
    assert inherited == [False]
    assert SANDBOX.call("def f(): return 1", "f", []).output == 1
    assert SANDBOX.call("1 / 0", "f", []).failure
    with pytest.raises(CapacityError):
        Sandbox(megabytes=1).run("")
    assert set(os.listdir("/proc/self/fd")) == before


def test_ignored_sigchld_is_refused():
    """A program that printed the right answer and then crashed would count as status 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ConfigError, match="SIGCHLD is ignored"):
            SANDBOX.run("print(1, flush=True)\nimport os\nos.abort()")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_parallel_judgements_keep_their_order():
    runs = side_by_side([lambda i=i: SANDBOX.run(f"print({i})").output for i in range(6)])
    assert runs == [f"{i}\n" for i in range(6)]
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


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(confined.os, "name", "nt")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="needs Linux; this is win32"):
        Sandbox(megabytes=999).require()
