"""Kernels become machine code of Ampere, Ada, Hopper and Blackwell, with none of these there."""

import pytest

from tests.pallas_kernels.cards import compile_for_gpus
from tests.support.for_gpus import told_by
from tests.support.instances import further


@pytest.mark.parametrize("kind", compile_for_gpus.KERNELS)
def test_every_card_has_the_cases_that_are_compiled_for_it(kind):
    assert compile_for_gpus.SHARED_BYTES[kind] <= 227 * 1024
    kernels = set()
    for each in (*compile_for_gpus.KERNELS[kind], *compile_for_gpus.EVERYWHERE):
        function, shapes = compile_for_gpus.call(*each.split(maxsplit=1))
        assert callable(function)
        assert shapes
        kernels.add(each.split()[0])
    on_hopper = {"received", "grouped"} if kind == "h200" else set()
    assert kernels == {"decode", "prefill", "select", "training", "write"} | on_hopper


@pytest.mark.parametrize("kind", ["a100", *further("l4", "h200", "b200")])
def test_kernels_are_compiled_for(kind):
    counts = told_by("tests/pallas_kernels/cards/compile_for_gpus.py", kind)
    assert len(counts) >= 7
    for case, kernels in counts.items():
        # Attention and the merge of rows that are cut; on Hopper the plan is a kernel too.
        wanted = {"decode": 3 if kind == "h200" else 2, "write": 1, "select": 1}
        wanted |= {"training": 3, "prefill": 1, "received": 2, "grouped": 2}
        assert kernels == wanted[case.split()[0]], case
