"""A layer of a decode step on a GPU has few launches; one costs as much as reading megabytes."""

import pytest

from tests.support.for_gpus import told_by

# A norm, the product, its rotation and write, attention and its merge, a product; a norm, a
# product, the gate, a product. The fraction is the policies' bookkeeping, and slices for the layers
# of a turn.
MOST = 10 + 1


@pytest.mark.nightly
def test_layer_has_few_launches_and_no_large_copies():
    found = told_by("tests/generation/launches.py")
    assert [each["copies"] for each in found.values()] == [0, 0, 0, 0]
    launches = [found[name]["launches"] for name in ("Vanilla", "DMS")]
    # If it were fewer than the products, write and attention of a layer, a graph would count as
    # one.
    assert min(launches) > 6, found
    assert max(launches) <= MOST, found
    assert found["norms of queries and keys"]["launches"] <= MOST + 1, found  # one pass for both
