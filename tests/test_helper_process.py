"""The worker processes: every question gets its own answer; a dead process is replaced."""

import os
import signal
import sys
import threading
import time

import pytest

from dms_jax.helper_process import Helpers, Running

ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
"""


@pytest.fixture
def helper(tmp_path):
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    helper = Helpers(program, seconds=30.0, count=1)
    yield helper
    helper.close()


def ask(helper: Helpers, number: int) -> bool:
    return helper.ask(f'{{"is": {number}}}') == {"is": number}


def test_close_ends_a_question_in_flight(tmp_path):
    program = tmp_path / "silent.py"
    program.write_text('import time\nprint("ready", flush=True)\ntime.sleep(600)\n')
    helper, replies = Helpers(program, seconds=300.0, count=1), []
    thread = threading.Thread(target=lambda: replies.append(helper.ask("1")), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not helper.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    helper.close()
    thread.join(20)
    assert [reply["error"] for reply in replies] == ["it ends the process that it runs in"]


def test_process_killed_during_question_is_replaced(helper, monkeypatch):
    assert ask(helper, 1)
    monkeypatch.setattr(Running, "ended", False)
    os.kill(helper.idle[0].process.pid, signal.SIGKILL)
    assert helper.ask("2")["error"] == "it ends the process that it runs in"
    assert ask(helper, 3)


def test_process_killed_between_questions_is_replaced(helper):
    assert ask(helper, 1)
    (running,) = helper.idle
    running.process.kill()
    running.process.wait()
    assert ask(helper, 2)
    assert helper.idle != [running]


def test_interrupted_answer_is_not_the_next_ones(helper, monkeypatch):
    def interrupt(self, request, seconds):
        self.process.stdin.write(request)
        self.process.stdin.flush()
        raise KeyboardInterrupt

    assert ask(helper, 1)
    with monkeypatch.context() as patches:
        patches.setattr(Running, "_exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(helper, 2)
    assert ask(helper, 3)


def test_threads_get_their_own_answers(helper):
    right = []
    threads = [
        threading.Thread(
            target=lambda n=n: right.extend(ask(helper, 100 * n + i) for i in range(20))
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 160


def test_program_that_fails_to_start_is_an_error(helper, monkeypatch):
    helper.program.write_text("")
    with pytest.raises(OSError, match=r"did not start echo\.py"):
        helper.ask("1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        helper.ask("1")
