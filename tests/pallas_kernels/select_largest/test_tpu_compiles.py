"""The TPU kernel compiled ahead of time: within the vector memory of each kind of chip."""

from pathlib import Path

from tests.pallas_kernels.support import compile_for_tpu, for_each_tpu

SCRIPT = Path(__file__).with_name("compile_for_tpu.py")
NAMES = ("pages1024", "slots131072", "bfloat16", "many_of_longer")


@for_each_tpu
def test_kernel_compiles(kind, topology):
    lines = compile_for_tpu(SCRIPT, kind, topology, *NAMES)
    assert lines == [f"{name} True" for name in NAMES]
