"""Ctrl-C ends a command wherever it comes, and leaves the handlers as they were."""

import gc
import os
import signal
import threading

import pytest

from dms_jax.command_line import running


@pytest.fixture
def ctrl_c(request):
    """What Ctrl-C does; a shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler], indirect=True)
def test_ctrl_c_is_not_lost_where_the_collector_works(ctrl_c, capsys):
    """What is raised in a callback of the collector is shown, and the command would go on."""
    sent = []

    def collected(phase, info):
        if not sent:
            sent.append(phase)
            os.kill(os.getpid(), signal.SIGINT)

    gc.callbacks.append(collected)

    def work(never=threading.Event()):
        gc.collect()
        return 0 if never.wait(10) else 5

    try:
        assert running.status_of(work) == running.INTERRUPTED
    finally:
        gc.callbacks.remove(collected)
    assert sent == ["start"]
    assert capsys.readouterr().err == "Interrupted.\n"
    assert signal.getsignal(signal.SIGINT) is ctrl_c


@pytest.mark.parametrize("ctrl_c", [signal.SIG_IGN, lambda number, frame: None], indirect=True)
def test_a_handler_of_others_stays(ctrl_c):
    def work():
        os.kill(os.getpid(), signal.SIGINT)
        return 3 if signal.getsignal(signal.SIGINT) is ctrl_c else 4

    assert running.status_of(work) == 3
    assert signal.getsignal(signal.SIGINT) is ctrl_c
