"""Machines by name, and the topologies that stand for them."""

import pytest

from dms_jax.errors import ConfigError
from dms_jax.training.planning import find_machine


@pytest.mark.parametrize(
    ("name", "kind", "count", "topology"),
    [
        ("v5p-128", "v5p", 64, "v5p:4x4x4"),  # the type counts cores, two a chip
        ("v5p-8", "v5p", 4, "v5p:2x2x1"),
        ("v5p-32", "v5p", 16, "v5p:2x2x4"),
        ("v5p-384", "v5p", 192, "v5p:4x8x8"),  # on the first 192 of 256
        ("v5p-8192", "v5p", 4096, "v5p:16x16x16"),
        ("v6e-256", "v6e", 256, "v6e:16x16"),
        ("v6e-8", "v6e", 8, "v6e:2x4"),
        ("v5litepod-16", "v5e", 16, "v5e:4x4"),
        ("v5e-1", "v5e", 1, "v5e:2x2"),
        ("4xv5litepod", "v5e", 4, "v5e:2x2"),
        ("3xv5p", "v5p", 3, "v5p:2x2x1"),  # a number of chips, of no slice
        ("8xh200", "h200", 8, "v5p:2x2x2"),
        ("32 x H200", "h200", 32, "v5p:2x4x4"),
        ("h100", "h100", 1, "v5p:2x2x1"),
        ("24xh100", "h100", 24, "v5p:2x4x4"),  # on the first 24 of 32
    ],
)
def test_machines(name, kind, count, topology):
    machine = find_machine(name)
    assert (machine.kind, machine.count, machine.topology) == (kind, count, topology)
    assert machine.is_tpu == kind.startswith("v")


@pytest.mark.parametrize(
    "name", ["h300", "0xh200", "", "h200-x", "h200-8", "v4-8", "v2-8", "v5p-3", "v6e-0"]
)
def test_there_is_no_such_machine(name):
    with pytest.raises(ConfigError, match=r"There is no machine .* h200"):
        find_machine(name)


@pytest.mark.parametrize(
    ("name", "count"), [("v5p-12288", 6144), ("4097xv5p", 4097), ("9999999xh200", 9999999)]
)
def test_what_is_larger_than_plans_are(name, count):
    with pytest.raises(ConfigError, match=f"'{name}' has {count} devices, .* for 4096 at most"):
        find_machine(name)
