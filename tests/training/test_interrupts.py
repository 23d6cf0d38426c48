"""Stop requests are announced once, immediately; a second Ctrl-C interrupts."""

import os
import signal

import pytest

from dms_jax.training.interrupts import Interrupts


@pytest.fixture
def interruptible():
    """Makes SIGINT raise KeyboardInterrupt, because background processes of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_first_signal_is_announced_second_interrupts():
    said = []
    with Interrupts(lambda: said.append("stopping")) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupts.requested, said) == (True, ["stopping"])
        os.kill(os.getpid(), signal.SIGINT)
        assert said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
