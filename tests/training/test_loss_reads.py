"""The loss reads its logits, most of a small model's memory traffic, no more than necessary."""

import pytest

from tests.support.for_gpus import told_by

DIRECTIONS = ("reverse", "forward")


@pytest.fixture(scope="module")
def readings() -> dict:
    return told_by("tests/training/compiled_loss.py", *DIRECTIONS)


@pytest.mark.nightly
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_are_read_four_times_on_gpus(direction, readings):
    """Of student and teacher: a part for the origin, all for the sums and the gradient."""
    assert readings[direction]["others"] == 4
    assert readings[direction]["parts"] == 2
    assert readings[direction].get("products", 0) == 0  # these read the gradient, in bfloat16
