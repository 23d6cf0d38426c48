"""The TPU kernel compiled ahead of time: within VMEM and SMEM of each kind of chip, in place."""

from pathlib import Path

from tests.pallas_kernels.support import compile_for_tpu, for_each_tpu

SCRIPT = Path(__file__).with_name("compile_for_tpu.py")
# XLA lays narrower heads out in another way between kernels, and small pools may visit VMEM.
LARGE = ("rows8", "rows256", "rows2048", "most_rows", "rotated_rows256")
SMALL = ("base", "float32", "rotated")
# They take less memory than those, and differ in the shape alone: one kind of chip will do.
SHAPES = ("head_dim64", "head_dim96", "head_dim256", "page16", "page128")


@for_each_tpu
def test_kernel_compiles(kind, topology):
    names = (*LARGE, *SMALL, *(SHAPES if topology == "v5e:2x2" else ()))
    lines = [line.split() for line in compile_for_tpu(SCRIPT, kind, topology, *names)]
    assert [(name, kernel) for name, kernel, _ in lines] == [(name, "True") for name in names]
    assert [in_place for _, _, in_place in lines[: len(LARGE)]] == ["True"] * len(LARGE)
