"""The TPU kernel compiled ahead of time: within VMEM and SMEM of each kind of chip.

Cases with all results, which take the most memory; those that differ in what a block of the kernel
is (heads, dtype, table) without them too.
"""

from pathlib import Path

from tests.pallas_kernels.support import compile_for_tpu, for_each_tpu

SCRIPT = Path(__file__).with_name("compile_for_tpu.py")
CASES = (
    "base+",
    "group16_head_dim256+",
    "float32_head_dim256+",
    "page16+",
    "large+",
    "wide+",
    "widest+",
    "base",
    "large",
)
# Compiled for one kind of chip alone.
SMALLER = (
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
)


@for_each_tpu
def test_kernel_compiles(kind, topology):
    names = (*CASES, *(SMALLER if topology == "v5e:2x2" else ()))
    lines = compile_for_tpu(SCRIPT, kind, topology, *names)
    assert lines == [f"{name} kernel" for name in names]
