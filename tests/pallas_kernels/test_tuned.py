"""Kernel settings: files of measured ones, and heuristics without a file."""

import json

import jax
import pytest

from pallas_kernels import tuned
from pallas_kernels.decode import cases, gpu
from pallas_kernels.dispatch import DEFAULT_GPU, GPU

# A card of the measured architecture without a file.
RELATED = GPU("NVIDIA H100 PCIe", 114, (9, 0))
H200 = (DEFAULT_GPU.kind,)


def test_first_applicable_entry_is_taken(tmp_path, monkeypatch):
    assert tuned.file_name("NVIDIA H200") == "nvidia_h200.json"
    entries = [
        {"when": {"head_dim": 64, "small": True}, "use": {"stages": 1}},
        {"when": {"head_dim": 64}, "use": {"stages": 2}},
    ]
    (tmp_path / "some_card.json").write_text(json.dumps({"kernels": {"attend": entries}}))
    monkeypatch.setattr(tuned.resources, "files", lambda package: tmp_path)

    def look_up(kernel="attend", device="Some card", **shape):
        return tuned.lookup((device,), kernel, **shape)

    assert look_up(head_dim=64, small=True) == {"stages": 1}
    assert look_up(head_dim=64, small=False) == {"stages": 2}
    assert look_up(head_dim=128, small=False) is None
    assert look_up("other", head_dim=64) is None
    assert look_up(device="Another card", head_dim=64) is None
    both = ("Another card", "Some card")
    assert tuned.lookup(both, "attend", head_dim=64, small=True) == {"stages": 1}
    own = [{"when": {"head_dim": 64}, "use": {"stages": 3}}]
    (tmp_path / "a_third_card.json").write_text(json.dumps({"kernels": {"attend": own}}))
    both = ("A third card", "Some card")
    assert tuned.lookup(both, "attend", head_dim=64, small=True) == {"stages": 3}


def test_gpus_of_one_architecture_share_measured_settings():
    assert DEFAULT_GPU.measured_as == ("NVIDIA H200",)
    assert RELATED.measured_as == ("NVIDIA H100 PCIe", "NVIDIA H200")
    for other in (GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0)), GPU("NVIDIA B200", 148, (10, 0))):
        assert other.measured_as == (other.kind,)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("head_dim", "size", "programs"),
    [
        (64, 2, 2),
        (96, 2, 2),
        (128, 2, 2),
        (256, 2, 1),
        (64, 1, 2),
        (128, 1, 2),
        (256, 1, 1),
    ],
)
def test_the_heuristic_plans_the_measured_number_of_programs(
    head_dim, size, programs, page_size, monkeypatch
):
    """With float8 pages one program per core takes 1.5 times as long."""
    dtype = {1: "float8_e4m3fn", 2: "bfloat16"}[size]
    shape = gpu.Shape(512, head_dim, page_size, 8, dtype)
    monkeypatch.setattr(gpu, "target_gpu", lambda: DEFAULT_GPU)
    monkeypatch.setattr(tuned, "lookup", lambda *_, **__: None)
    assert gpu.settings_of("mosaic_gpu", shape)["programs_per_core"] == programs


@pytest.mark.parametrize("known", [True, False], ids=["measured", "by heuristic"])
@pytest.mark.parametrize("card", [DEFAULT_GPU, RELATED], ids=["the card", "a related one"])
@pytest.mark.parametrize("case", cases.TUNING, ids=lambda case: case.name)
def test_decode_settings_fit_in_shared_memory(card, case, known, monkeypatch):
    monkeypatch.setattr(gpu, "target_gpu", lambda: card)
    if not known:
        monkeypatch.setattr(tuned, "lookup", lambda *_, **__: None)
    dtype = case.pages_dtype or case.dtype
    shape = gpu.Shape(case.rows, case.head_dim, case.page_size, case.columns, dtype)
    settings = gpu.settings_of("mosaic_gpu", shape)
    q = jax.ShapeDtypeStruct((case.rows, case.group, case.head_dim), case.dtype)
    pages = jax.ShapeDtypeStruct((case.pages, case.page_size, case.head_dim), dtype)
    unknown = {"programs": 1, "scale": 1.0, "return_lse": True, "return_scores": True}
    tile = gpu.tile_of("mosaic_gpu", shape)
    spec = gpu.spec_of(q, pages, settings, tile=tile, **unknown)
    assert settings["programs_per_core"] <= card.programs_a_core(spec.shared_bytes)


def test_the_measured_card_has_settings_for_every_kernel():
    def found(kernel, **shape):
        return tuned.lookup(H200, kernel, **shape) is not None

    for part in ("forward", "query_gradient", "key_gradient"):
        for head_dim in (64, 128, 256):
            assert found("retrofit_attention/mosaic_gpu", part=part, head_dim=head_dim)
    for head_dim in (64, 96, 128, 256):
        assert found("prefill_attention/mosaic_gpu", part="forward", head_dim=head_dim)
        shape = {"head_dim": head_dim, "page_size": 64, "bytes": 2, "tile": 64, "small": False}
        assert found("decode_attention/mosaic_gpu", **shape)
