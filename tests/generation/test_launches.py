"""A layer of a decode step on a GPU is few launches: each costs as much as reading megabytes."""

import pytest

from tests.support.for_gpus import told_by

# A norm, the product, the rotation and write of it, attention and its combination, a product; a
# norm, a product, the gate, a product. What policies keep of the rows, and what is sliced for the
# layers of a turn, is the fraction.
MOST = 10 + 1


@pytest.mark.nightly
def test_layer_has_few_launches_and_no_large_copies():
    found = told_by("tests/generation/launches.py")
    assert [each["copies"] for each in found.values()] == [0, 0, 0, 0]
    launches = [found[name]["launches"] for name in ("Vanilla", "DMS")]
    # Fewer than the products, the write and the attention of a layer: a graph would count as one.
    assert min(launches) > 6, found
    assert max(launches) <= MOST, found
    assert found["norms of queries and keys"]["launches"] <= MOST + 1, found  # one pass for both
