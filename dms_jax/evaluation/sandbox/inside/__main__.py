"""Starts a confined process in one of three roles.

- "program": runs the source as a script, on the standard input and output it was started with.
- "functions": runs the source as a module, and then its functions as they are called.
- "checker": runs tests that call such a function, and alone can say that they passed.

The job comes over the control socket, which an answer's process closes before the answer runs.
Calls come over another one, a line each: [name, arguments, keywords], answered by [result,
arguments as the call left them], or null where it raised.
"""

import array
import builtins
import itertools
import json
import os
import random
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from . import confining, values


def main(control: int, calls: int, parent: int) -> None:
    """Does the job that comes over the socket `control`, confined."""
    confining.die_with_parent(parent)
    os.chdir("/")
    os.environ.clear()
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))]
    supervisor = socket.socket(fileno=control)
    job = _read_job(supervisor)

    def pass_on(descriptor: int) -> None:
        rights = array.array("i", [descriptor]).tobytes()
        supervisor.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    role = job["role"]
    missing = confining.confine(job["limits"], threads=role != "checker", pass_on=pass_on)
    told = json.dumps({"missing": missing}) + "\n"
    os.write(control, told.encode())
    if (missing and not job["weaker"]) or not os.read(control, 1):
        return
    sys.set_int_max_str_digits(0)
    random.seed(0)  # a judgement is the same whenever it is made
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore  # of `site`, which was not loaded
    if role == "checker":
        passed = json.dumps(_check(job, calls)) + "\n"
        os.write(control, passed.encode())
        return
    supervisor.close()
    if role == "program":
        _run(job["source"], "__main__")
    else:
        _serve(_run(job["source"], "answer"), job["request"], calls)


def _read_job(supervisor: socket.socket) -> dict[str, Any]:
    parts = []
    while not parts or not parts[-1].endswith(b"\n"):
        parts.append(supervisor.recv(1 << 16))
        if not parts[-1]:
            sys.exit(1)
    return json.loads(b"".join(parts))


def _run(source: str, name: str) -> dict[str, Any]:
    """Runs source as a module of a name, and returns what it defines."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv[:] = ["answer.py"]
    exec(compile(source, "answer.py", "exec"), module.__dict__)
    return module.__dict__


def _serve(names: dict[str, Any], request: str, calls: int) -> None:
    """Answers calls, first `request` if it is any; a name of a class `Solution` is its method."""
    with os.fdopen(os.dup(calls), "rb") as incoming:
        for line in itertools.chain([request] if request else [], incoming):
            name, *given = json.loads(line)
            arguments, keywords = map(values.from_json, given)
            try:
                owner = names.get("Solution")
                function = names[name] if owner is None else getattr(owner(), name)
                result = function(*arguments, **keywords)
                reply = [values.to_json(result), values.to_json(arguments)]
            except Exception:  # of the answer: the call is told that it failed
                reply = None
            _write(calls, json.dumps(reply))


def _check(job: dict[str, Any], calls: int) -> dict[str, str]:
    """Runs tests on a function of another process; says why they failed, "" if they passed."""
    incoming = os.fdopen(os.dup(calls), "rb")
    entry = job["entry"]

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        call = [entry, values.to_json(list(arguments)), values.to_json(keywords)]
        _write(calls, json.dumps(call))
        reply = json.loads(incoming.readline() or b"null")
        if reply is None:
            raise RuntimeError("the answer raised, or ended")
        result, left = map(values.from_json, reply)
        for given, now in zip(arguments, left, strict=True):
            _update(given, now)
        return result

    try:
        names = _run(job["setup"], "problem")
        names[entry] = candidate
        exec(compile(job["tests"], "tests.py", "exec"), names)
        check: Callable = names["check"]
        check(candidate)
    except BaseException as error:
        return {"failed": type(error).__name__}
    return {"failed": ""}


def _update(given: Any, now: Any) -> None:
    """Gives a mutable argument the contents that the call left in it."""
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def _write(descriptor: int, line: str) -> None:
    rest = memoryview(line.encode() + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


main(*map(int, sys.argv[1:4]))
