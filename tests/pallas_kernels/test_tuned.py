"""Settings of the kernels: the files of measured ones, and the heuristics where there is none."""

import json

import jax
import pytest

from pallas_kernels import tuned
from pallas_kernels.decode import cases, gpu
from pallas_kernels.dispatch import DEFAULT_GPU, GPU

# Of the same generation as the card that was measured, and without a file.
UNKNOWN = GPU("NVIDIA H100 PCIe", 114, (9, 0))
H200 = DEFAULT_GPU.kind


def test_the_first_entry_that_applies_is_taken(tmp_path, monkeypatch):
    assert tuned.file_name("NVIDIA H200") == "nvidia_h200.json"
    entries = [
        {"when": {"head_dim": 64, "small": True}, "use": {"stages": 1}},
        {"when": {"head_dim": 64}, "use": {"stages": 2}},
    ]
    (tmp_path / "some_card.json").write_text(json.dumps({"kernels": {"attend": entries}}))
    monkeypatch.setattr(tuned.resources, "files", lambda package: tmp_path)

    def look_up(kernel="attend", device="Some card", **shape):
        return tuned.lookup(device, kernel, **shape)

    assert look_up(head_dim=64, small=True) == {"stages": 1}
    assert look_up(head_dim=64, small=False) == {"stages": 2}
    assert look_up(head_dim=128, small=False) is None
    assert look_up("other", head_dim=64) is None
    assert look_up(device="Another card", head_dim=64) is None


@pytest.mark.parametrize("card", [DEFAULT_GPU, UNKNOWN], ids=["measured", "by heuristic"])
@pytest.mark.parametrize("case", cases.TUNING, ids=lambda case: case.name)
def test_decode_settings_fit_in_shared_memory(card, case, monkeypatch):
    monkeypatch.setattr(gpu, "target_gpu", lambda: card)
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
