"""`serving` reports the implementation of a call, and why others cannot run."""

import pytest

from pallas_kernels import dispatch, serving
from pallas_kernels.dispatch import GPU

H100, A100 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))
L4, B200, T4 = ("NVIDIA L4", (8, 9)), ("NVIDIA B200", (10, 0)), ("Tesla T4", (7, 5))
FLOAT8 = "float8_e4m3fn"
HOPPER, ADA = "compute capability 9.0 (Hopper)", "float8 needs compute capability 8.9 (Ada)"


@pytest.mark.parametrize(
    ("gpu", "options", "served", "reasons"),
    [
        (H100, dict(dtype="bfloat16"), ("mosaic_gpu", "mosaic_gpu"), ("H100", "H100")),
        (H100, dict(dtype="float16"), ("mosaic_gpu", "mosaic_mma"), ("H100", "got float16")),
        (A100, dict(dtype="float16"), ("mosaic_mma", "mosaic_mma"), (HOPPER, "A100")),
        (L4, dict(dtype="bfloat16"), ("mosaic_mma", "mosaic_mma"), (HOPPER, "L4")),
        (L4, dict(dtype="float32"), ("xla", "xla"), ("not float32", "not float32")),
        (B200, dict(dtype="bfloat16"), ("mosaic_mma", "mosaic_mma"), ("B200", "B200")),
        (T4, dict(dtype="bfloat16"), ("xla", "xla"), ("8.0 (Ampere), Tesla T4", "Tesla T4")),
        (H100, dict(head_dim=8), ("xla", "mosaic_gpu"), ("head dims", "H100")),
        (H100, dict(head_dim=256), ("mosaic_gpu", "mosaic_gpu"), ("H100", "H100")),
        (H100, dict(head_dim=512), ("mosaic_gpu", "xla"), ("H100", "head dim")),
        (H100, dict(head_dim=512, page_size=128), ("xla", "xla"), ("shared memory", "head dim")),
        (A100, dict(head_dim=512), ("mosaic_mma", "xla"), (HOPPER, "head dim")),
        (L4, dict(head_dim=256), ("mosaic_mma", "mosaic_mma"), (HOPPER, "L4")),
        (L4, dict(head_dim=512), ("xla", "xla"), ("shared memory", "head dim")),
        (B200, dict(head_dim=512), ("mosaic_mma", "xla"), (HOPPER, "head dim")),
        (H100, dict(pages_dtype=FLOAT8), ("mosaic_gpu", "mosaic_gpu"), ("H100", "H100")),
        (A100, dict(pages_dtype=FLOAT8), ("xla", "mosaic_mma"), (ADA, "A100")),
        (L4, dict(pages_dtype=FLOAT8), ("mosaic_mma", "mosaic_mma"), (HOPPER, "L4")),
    ],
    ids=str,
)
def test_gpu_implementations(gpu, options, served, reasons, monkeypatch):
    """XLA serves unsupported shapes by default."""
    kind, capability = gpu
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: GPU(kind, 40, capability))
    found = serving(**options, platform="cuda")
    assert tuple(each.implementation for each in found) == served
    for each, reason in zip(found, reasons, strict=True):
        assert reason in str(each)
        if each.implementation == "mosaic_gpu":
            assert str(each).endswith(f": mosaic_gpu ({kind})")


def test_cpu_and_tpu_implementations():
    assert [str(each) for each in serving(platform="cpu")] == [
        "decoding: xla (no kernel is for cpu)",
        "training: xla (no kernel is for cpu)",
    ]
    assert serving() == serving(platform="cpu")
    assert {each.implementation for each in serving(platform="tpu")} == {"mosaic_tpu"}


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "training"),
    [
        (256, 16, "bfloat16", "mosaic_tpu"),
        (256, 16, "float32", "xla"),  # its blocks do not fit VMEM
        (512, 8, "bfloat16", "mosaic_tpu"),
        (512, 16, "bfloat16", "xla"),
        (320, 4, "bfloat16", "xla"),
    ],
)
def test_wide_heads_on_a_tpu(dim, group, dtype, training):
    found = serving(head_dim=dim, group=group, dtype=dtype, platform="tpu")
    assert [each.implementation for each in found] == ["mosaic_tpu", training]


@pytest.mark.parametrize("pages_dtype", [FLOAT8, "uint8"])
def test_tpus_read_no_quantized_pages(pages_dtype):
    decoding, _ = serving(pages_dtype=pages_dtype, platform="tpu")
    assert decoding.implementation == "xla"
    assert "does not read" in str(decoding)
