"""Layer loops write the stacks for the backward pass, and the gradients, only once."""

import pytest

from tests.support.for_gpus import told_by


@pytest.fixture(scope="module")
def passes() -> dict[str, int]:
    return told_by("tests/training/compiled_layers.py")


@pytest.mark.nightly
def test_stacks_are_not_zeroed_first(passes):
    """By default XLA fills them with zeros: 11 GB of a step of Qwen2.5-0.5B."""
    assert passes["zeroed"] == 0
    assert passes["zeroed_by_default"] > 10e6  # otherwise the counter no longer works


@pytest.mark.nightly
def test_one_kernel_writes_the_gradient_of_gate_and_up(passes):
    """Not as the sum of two halves, each padded with zeros."""
    assert passes["gates"] == 1
    assert passes["padded"] == 0
