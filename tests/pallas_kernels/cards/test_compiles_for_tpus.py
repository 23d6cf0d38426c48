"""TPU kernels compiled ahead of time: within VMEM and SMEM of each kind of chip."""

from pathlib import Path

import pytest

from tests.pallas_kernels.support import compile_for_tpu, for_each_tpu

SCRIPT = Path(__file__).with_name("compile_for_tpus.py")
# Decoding with all results takes the most memory; cases with different blocks (heads, dtype, table)
# are also compiled without them. fmt: off
CASES = {
    "decode": (
        "base+",
        "group16_head_dim256+",
        "float32_head_dim256+",
        "page16+",
        "large+",
        "wide+",
        "widest+",
        "base",
        "large",
    ),
    "write": (
        "rows8",
        "rows256",
        "rows2048",
        "most_rows",
        "rotated_rows256",
        "base",
        "float32",
        "rotated",
    ),
}
# They take less memory and differ only in shape, so one kind of chip suffices.
SHAPES = {
    "decode": (
        "group16+",
        "head_dim64+",
        "head_dim96+",
        "head_dim256+",
        "group16_head_dim512+",
        "float32+",
        "page48+",
        "page128+",
        "page192+",
        "head_dim64",
        "float32",
    ),
    "write": ("head_dim64", "head_dim96", "head_dim256", "page16", "page128"),
}
# fmt: on XLA uses another layout for narrower heads between kernels, and may move small pools to
# VMEM.
IN_PLACE = CASES["write"][:5]


@for_each_tpu
@pytest.mark.parametrize("kernel", CASES)
def test_kernel_compiles(kernel, kind, topology):
    names = (*CASES[kernel], *(SHAPES.get(kernel, ()) if topology == "v5e:2x2" else ()))
    lines = compile_for_tpu(SCRIPT, kind, kernel, topology, *names)
    for name, line in zip(names, lines, strict=True):
        found, has_kernel, in_place = line.split()
        assert (found, has_kernel) == (name, "True")
        assert in_place == "True" or kernel != "write" or name not in IN_PLACE
