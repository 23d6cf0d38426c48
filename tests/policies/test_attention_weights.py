"""Received attention against NumPy, and its memory on a GPU."""

from tests.policies.received_weights import SLOTS
from tests.support.for_gpus import told_by


def test_slots_of_a_query_are_contiguous_on_a_gpu():
    """Otherwise three kernels compute and sum the weights, one of them with strided access."""
    arrays = told_by("tests/policies/received_weights.py")
    assert arrays
    assert {shape[-1] for shape in arrays} == {SLOTS}
