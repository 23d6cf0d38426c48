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
