"""Requests to stop: said at once and once, and a second Ctrl-C interrupts."""

import os
import signal

import pytest

from dms_jax.training.interrupts import Interrupts


@pytest.fixture
def interruptible():
    """Has SIGINT interrupt, which it does not in a process that a shell started behind itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_signal_is_announced_and_the_second_interrupts():
    said = []
    with Interrupts(lambda: said.append("stopping")) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupts.requested, said) == (True, ["stopping"])
        os.kill(os.getpid(), signal.SIGINT)
        assert said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
