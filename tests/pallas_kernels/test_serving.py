"""What serves a call is said as it is chosen, with the reasons."""

import pytest

from pallas_kernels import dispatch, serving
from pallas_kernels.dispatch import GPU


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "bfloat16", ("mosaic_gpu", "mosaic_gpu")),
        ("NVIDIA H100 80GB HBM3", (9, 0), "float16", ("mosaic_gpu", "mosaic_mma")),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "float16", ("mosaic_mma", "mosaic_mma")),
        ("NVIDIA L4", (8, 9), "bfloat16", ("mosaic_mma", "mosaic_mma")),
        ("NVIDIA B200", (10, 0), "bfloat16", ("mosaic_mma", "mosaic_mma")),
        ("NVIDIA L4", (8, 9), "float32", ("xla", "xla")),
        ("Tesla T4", (7, 5), "bfloat16", ("xla", "xla")),
    ],
)
def test_on_a_gpu(kind, capability, dtype, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: GPU(kind, 40, capability))
    decoding, training = serving(dtype=dtype, platform="cuda")
    assert (decoding.implementation, training.implementation) == expected
    if expected[0] == "mosaic_gpu":
        assert str(decoding) == f"decoding: mosaic_gpu ({kind})"
    else:
        assert any(kind in reason for reason in (*decoding.reasons, *training.reasons))


def test_elsewhere():
    assert [str(each) for each in serving(platform="cpu")] == [
        "decoding: xla (no kernel is for cpu)",
        "training: xla (no kernel is for cpu)",
    ]
    assert serving() == serving(platform="cpu")
    assert {each.implementation for each in serving(platform="tpu")} == {"mosaic_tpu"}


def test_a_shape_that_a_kernel_does_not_serve():
    decoding, _ = serving(head_dim=8, platform="cuda")
    assert decoding.implementation == "xla"
    assert any("head dims" in reason for reason in decoding.reasons)


@pytest.mark.parametrize(
    ("kind", "capability", "dim", "page_size", "implementations", "reasons"),
    [
        ("NVIDIA H200", (9, 0), 256, 64, ("mosaic_gpu", "mosaic_gpu"), ("", "")),
        ("NVIDIA H200", (9, 0), 512, 64, ("mosaic_gpu", "xla"), ("", "head dim")),
        ("NVIDIA H200", (9, 0), 512, 128, ("xla", "xla"), ("shared memory", "head dim")),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 512, 64, ("mosaic_mma", "xla"), ("", "head dim")),
        ("NVIDIA L4", (8, 9), 256, 64, ("mosaic_mma", "mosaic_mma"), ("", "")),
        ("NVIDIA L4", (8, 9), 512, 64, ("xla", "xla"), ("shared memory", "head dim")),
        ("NVIDIA B200", (10, 0), 512, 64, ("mosaic_mma", "xla"), ("", "head dim")),
    ],
)
def test_wide_heads_on_a_gpu(
    kind, capability, dim, page_size, implementations, reasons, monkeypatch
):
    """What shared memory does not hold is left to XLA, without being asked to."""
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: GPU(kind, 40, capability))
    found = serving(head_dim=dim, page_size=page_size, platform="cuda")
    assert tuple(each.implementation for each in found) == implementations
    for each, reason in zip(found, reasons, strict=True):
        assert reason in str(each)


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


@pytest.mark.parametrize(
    ("kind", "capability", "pages_dtype", "implementation", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "float8_e4m3fn", "mosaic_gpu", "H100"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "uint8", "xla", "does not read pages of 4 bits"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "float8_e4m3fn", "xla", "float8 needs"),
        ("NVIDIA L4", (8, 9), "float8_e4m3fn", "mosaic_mma", "needs compute capability 9.0"),
    ],
)
def test_pages_of_fewer_bits(kind, capability, pages_dtype, implementation, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: GPU(kind, 40, capability))
    decoding, training = serving(pages_dtype=pages_dtype, platform="cuda")
    assert decoding.implementation == implementation
    assert reason in str(decoding)
    assert training == serving(platform="cuda")[1]


@pytest.mark.parametrize("pages_dtype", ["float8_e4m3fn", "uint8"])
def test_tpus_read_no_pages_of_fewer_bits(pages_dtype):
    decoding, _ = serving(pages_dtype=pages_dtype, platform="tpu")
    assert decoding.implementation == "xla"
    assert "does not read" in str(decoding)
