"""Replicas behind a real Ray Serve: a killed server, a changed option, a killed replica.

`make clients` fetches Ray. `test_fleet.py` has what needs none.
"""

import contextlib
import functools
import http.client
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests.support.tree import CLIENTS, ROOT

RAY = CLIENTS / "fleet"
# `serve run` takes port 8000 unless Serve runs already.
DRIVER = """
import shlex, sys, ray
from ray import serve
from ray.serve.scripts import cli
ray.init(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
for line in sys.stdin:
    cli(["run", "--non-blocking", *shlex.split(line)], standalone_mode=False)
    print("deployed", flush=True)
"""
OPTIONS = "--model stories260k --max-tokens 512 --prefill-tokens 64 --prefix-cache off"
TOKENS = 480  # seconds of decoding
EACH = 3  # streams of a replica
TOLD = ("replica_ended", "The process of the engine has ended.")
SECONDS = 180.0  # the longest wait, if other work takes the cores

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not RAY.exists(), reason="Ray is not there: `make clients`"),
]


def wait_for(true, pause=0.05):
    end = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(pause)
    return found


def listed(*chosen: str) -> list[int]:
    """Returns the processes that `ps` chooses, without ended ones."""
    ran = subprocess.run(["ps", "-o", "pid=,stat=", *chosen], capture_output=True, text=True)
    return [int(line.split()[0]) for line in ran.stdout.splitlines() if "Z" not in line]


def processes(session: int, mark: str) -> list[int]:
    """Returns the processes of a session, and those with `mark` in their environment."""
    found = listed("-s", str(session))
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Answer(threading.Thread):
    """A streamed answer: `text` grows; `end` is [DONE], or what an error says."""

    def __init__(self, port: int, prompt: str, tokens: int):
        super().__init__(daemon=True)
        self.port, self.prompt, self.tokens = port, prompt, tokens
        self.replica, self.model, self.text, self.end = "", "", "", ""
        self.start()

    def run(self) -> None:
        body = dict(prompt=self.prompt, max_tokens=self.tokens, ignore_eos=True, temperature=0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body | dict(stream=True)))
            response = connection.getresponse()
            self.replica = response.getheader("x-replica", "")
            for line in response:
                said = line.decode().strip().removeprefix("data: ")
                if said == "[DONE]":
                    self.end = said
                elif said.startswith("{"):
                    event = json.loads(said)
                    if error := event.get("error"):
                        self.end = error["code"] or error["message"]
                    else:
                        self.model = event["model"]
                        self.text += event["choices"][0]["text"]


class Fleet:
    """Ray on this machine, with a session, a folder and ports of its own."""

    def __init__(self, folder: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        own |= {"RAY_memory_monitor_refresh_ms": "0", "PYTHONPATH": f"{RAY}{os.pathsep}{ROOT}"}
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.port)],
            env=os.environ | own,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def deploy(self, options: str) -> None:
        """Runs `serve run`, which returns once the replicas have these options."""
        arguments = ["experiments.examples.fleet:app", "replicas=2", "cpus=0", f"options={options}"]
        print(shlex.join(arguments), file=self.driver.stdin, flush=True)
        while (line := self.driver.stdout.readline()) != "deployed\n":
            assert line, "serve run has failed"
            print(line, end="")

    def ask(self, prompts, tokens=TOKENS) -> list[Answer]:
        return [Answer(self.port, prompt, tokens) for prompt in prompts]

    def answers(self, prompts, tokens=TOKENS) -> list[Answer]:
        asked = self.ask(prompts, tokens)
        for answer in asked:
            answer.join()
        return asked

    def replicas(self) -> dict[str, list[str]] | None:
        """Returns the prompts of each replica once both answer."""
        found = {}
        for answer in self.answers([f"{name} had a cat" for name in range(24)], 1):
            found.setdefault(answer.replica, []).append(answer.prompt)
        return found if len(found) == 2 else None


def server_of(replica: str) -> int:
    (server,) = listed("--ppid", replica.rpartition(":")[2])
    return server


@pytest.fixture
def fleet():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Fleet(folder)
        yield made
        running = functools.partial(processes, made.driver.pid, folder)
        wait_for(lambda: not [kill(pid) for pid in running()])
        made.driver.wait()


@pytest.mark.timeout(600)
def test_killed_server_and_changed_option(fleet):
    fleet.deploy(f"{OPTIONS} --name first")
    prompts = wait_for(fleet.replicas, 1)
    (killed, lost), (other, kept) = [(name, found[:EACH]) for name, found in prompts.items()]
    wholes = fleet.answers(kept + lost)
    assert {(each.end, each.model) for each in wholes} == {("[DONE]", "first")}
    assert [each.replica for each in wholes] == [other] * EACH + [killed] * EACH

    streams = fleet.ask(kept + lost)
    wait_for(lambda: all(each.text for each in streams))
    assert not any(each.end for each in streams)
    kill(server_of(killed))
    after = fleet.answers(lost, 8)
    assert {(each.end, each.replica) for each in after} == {("[DONE]", other)}
    for answer, whole in zip(streams, wholes, strict=True):
        answer.join()
        if answer.replica == other:
            assert (answer.end, answer.text) == ("[DONE]", whole.text)
        else:
            assert answer.end in TOLD
            assert len(answer.text) < len(whole.text)
            assert whole.text.startswith(answer.text)
    assert killed not in wait_for(fleet.replicas, 1)

    change = threading.Thread(target=fleet.deploy, args=[f"{OPTIONS} --name second"], daemon=True)
    change.start()
    during = []
    while change.is_alive():
        during += fleet.answers([kept[0], lost[0]], 16)
        time.sleep(0.5)
    assert {each.end for each in during} == {"[DONE]"}
    assert {each.model for each in during} == {"first", "second"}
    last = fleet.answers(kept + lost)
    assert {(each.end, each.model) for each in last} == {("[DONE]", "second")}
    assert [each.text for each in last] == [each.text for each in wholes]

    replica = last[0].replica
    server = server_of(replica)
    kill(int(replica.rpartition(":")[2]))
    wait_for(lambda: server not in listed("-e"))
    (answer,) = fleet.answers(kept[:1], 8)
    assert (answer.end, answer.replica != replica) == ("[DONE]", True)
