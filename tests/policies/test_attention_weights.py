"""The weights that slots receive, against NumPy, and the memory they take on a GPU."""

from tests.policies.received_weights import SLOTS
from tests.support.for_gpus import told_by


def test_slots_of_a_query_are_contiguous_on_a_gpu():
    """Otherwise three kernels make weights of scores and add them up, one across memory."""
    arrays = told_by("tests/policies/received_weights.py")
    assert arrays
    assert {shape[-1] for shape in arrays} == {SLOTS}
