"""Replicas behind a real Ray Serve: a killed server, a changed option, a killed replica.

`make clients` fetches Ray. `test_fleet.py` has what needs none.
"""

import contextlib
import http.client
import itertools
import json
import os
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
OPTIONS = "--model stories260k --max-tokens 512 --prefill-tokens 16 --prefix-cache off"
TOKENS = 400  # seconds of decoding
EACH = 2  # streams of a replica
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


def processes(*chosen: str) -> list[int]:
    """Returns the processes that `ps` chooses, without ended ones."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", *chosen], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "Z" not in line]


def server_of(replica: str) -> int:
    (server,) = processes("--ppid", replica.rpartition(":")[2])
    return server


class Answer(threading.Thread):
    """A streamed answer: `text` grows; `end` is [DONE], or what an error says."""

    def __init__(self, port: int, prompt: str, tokens: int):
        super().__init__(daemon=True)
        self.port, self.prompt, self.replica, self.model, self.text = port, prompt, "", "", ""
        self.body = dict(prompt=prompt, max_tokens=tokens, ignore_eos=True, temperature=0)
        self.end = ""
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(self.body | dict(stream=True)))
        with connection.getresponse() as response:
            self.replica = response.getheader("x-replica", "")
            for line in response:
                said = line.decode().strip().removeprefix("data: ")
                if said.startswith("{") and "error" in (event := json.loads(said)):
                    self.end = event["error"]["code"] or event["error"]["message"]
                elif said.startswith("{"):
                    self.model = event["model"]
                    self.text += event["choices"][0]["text"]
                elif said:
                    self.end = self.end or said


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

    def replicas(self) -> dict[str, set[str]] | None:
        """Returns the prompts of each replica, once both routers send them to both alike."""
        prompts, found = [f"{name} had a cat" for name in range(24)], {}
        for some in itertools.batched(prompts * 2, 6):  # fewer than the lanes of a replica
            for answer in self.answers(some, 1):
                found.setdefault(answer.replica, set()).add(answer.prompt)
        return found if len(found) == 2 and not set.intersection(*found.values()) else None


@pytest.fixture
def fleet():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Fleet(folder)
        yield made
        made.driver.kill()
        made.driver.wait()
        # A session has all processes but the HTTP processes, which end with their servers.
        for pid in processes("-s", str(made.driver.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes("-s", str(made.driver.pid)))
        wait_for(lambda: folder not in subprocess.check_output(["ps", "axeww"], text=True))


@pytest.mark.timeout(600)
def test_killed_server_and_changed_option(fleet):
    fleet.deploy(f"{OPTIONS} --name first")
    prompts = wait_for(fleet.replicas, 1)
    killed, other = prompts
    lost, kept = (sorted(prompts[each])[:EACH] for each in (killed, other))
    server = server_of(killed)  # before answers begin, which may end while it is looked up
    streams = fleet.ask(kept + lost)
    wait_for(lambda: all(each.text for each in streams))
    assert not any(each.end for each in streams)
    os.kill(server, signal.SIGKILL)
    after = fleet.answers(lost, 8)
    assert {(each.end, each.replica) for each in after} == {("[DONE]", other)}
    assert killed not in wait_for(fleet.replicas, 1)

    change = threading.Thread(target=fleet.deploy, args=[f"{OPTIONS} --name second"], daemon=True)
    change.start()
    during = []
    while change.is_alive():
        during += fleet.answers([kept[0], lost[0]], 16)
        time.sleep(0.5)
    assert {each.end for each in during} == {"[DONE]"}
    assert {each.model for each in during} == {"first", "second"}
    wholes = fleet.answers(kept + lost)
    assert {(each.end, each.model) for each in wholes} == {("[DONE]", "second")}

    assert [each.replica for each in streams] == [other] * EACH + [killed] * EACH
    for stream, whole in zip(streams, wholes, strict=True):
        if stream.replica == other:
            assert (stream.end, stream.text) == ("[DONE]", whole.text)
        else:
            assert stream.end in TOLD
            assert len(stream.text) < len(whole.text)
            assert whole.text.startswith(stream.text)
