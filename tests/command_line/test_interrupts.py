"""Ctrl-C ends a command at any point, and restores the previous handlers."""

import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest

from dms_jax.command_line import running


@pytest.fixture
def ctrl_c(request):
    """Installs Python's SIGINT handler, because shells make background processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def press() -> None:
    """Sends Ctrl-C, and raises its exception here."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


class Finalized:
    def __del__(self):
        press()


class Watched:
    pass


def in_a_finalizer():
    del [Finalized()][0]


def in_a_callback_of_a_weak_reference():
    watched = Watched()
    reference = weakref.ref(watched, lambda reference: press())
    del watched
    assert reference() is None


def in_a_callback_of_the_collector():
    def collected(phase, info):
        gc.callbacks.remove(collected)
        press()

    gc.callbacks.append(collected)
    gc.collect()


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler], indirect=True)
@pytest.mark.parametrize(
    "where",
    [in_a_finalizer, in_a_callback_of_a_weak_reference, in_a_callback_of_the_collector],
)
def test_ctrl_c_in_finalizer_or_gc_callback_is_not_lost(where, ctrl_c, capsys):
    hook = sys.unraisablehook

    def work(never=threading.Event()):
        where()
        return 0 if never.wait(10) else 5

    assert running.status_of(work) == running.INTERRUPTED
    assert capsys.readouterr().err == "Interrupted.\n"
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("ctrl_c", [signal.SIG_IGN, lambda number, frame: None], indirect=True)
def test_foreign_signal_handler_stays(ctrl_c):
    def work():
        os.kill(os.getpid(), signal.SIGINT)
        return 3 if signal.getsignal(signal.SIGINT) is ctrl_c else 4

    assert running.status_of(work) == 3
    assert signal.getsignal(signal.SIGINT) is ctrl_c


def test_other_unraisable_errors_go_to_the_previous_hook(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))

    class Failing:
        def __del__(self):
            raise ValueError

    def work():
        del [Failing()][0]
        return 0

    assert running.status_of(work) == 0
    assert told == [ValueError]
