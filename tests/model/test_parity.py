"""Logits equal transformers' for a tiny random model of every family, padded, packed or plain.

The golden files were made by `tests/golden/make_families.py`, and those of DMS by `make_dms.py` at
e8c61612.
"""

import pathlib

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dms_jax.checkpoint import load
from dms_jax.policies import DMS, Vanilla
from tests.support.instances import nightly_but

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = sorted(folder.name for folder in (GOLDEN / "families").iterdir())
DMS_FORMS = sorted(folder.name for folder in (GOLDEN / "dms").iterdir())
QUICK = {
    "llama31",
    "llama_linear",
    "mistral",
    "qwen25_yarn_mscale",
    "qwen3",
    "gemma3",
    "olmo3",
    "gpt_oss",
}
TOLERANCE = 1e-4  # float32, with different orders of summation


@pytest.mark.parametrize("family", nightly_but(QUICK, FAMILIES))
def test_logits_equal_those_of_transformers(family):
    folder = GOLDEN / "families" / family
    expected = load_file(folder / "expected.safetensors")
    model = load(folder)
    assert model.policy == Vanilla()
    for way in ("plain", "left", "right", "packed"):
        tokens, logits = expected[f"{way}.tokens"], expected[f"{way}.logits"]
        segments = expected.get(f"{way}.mask", expected.get(f"{way}.segments"))
        got = np.asarray(model.logits(tokens, segment_ids=segments))
        real = np.ones_like(tokens, bool) if segments is None else segments > 0
        chex.assert_trees_all_close(
            got[real], logits[real], rtol=0, atol=TOLERANCE, custom_message=way
        )
    # The comparison is meaningful: neighbouring logits differ by far more than the tolerance.
    assert expected["plain.logits"].std() > 0.5


@pytest.mark.parametrize("family", ["llama31", "qwen3"])
def test_right_padding_needs_no_mask(family):
    folder = GOLDEN / "families" / family
    expected = load_file(folder / "expected.safetensors")
    got = np.asarray(load(folder).logits(expected["right.tokens"]))
    real = expected["right.mask"] > 0
    chex.assert_trees_all_close(got[real], expected["right.logits"][real], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", DMS_FORMS)
def test_dms_checkpoints_decide_as_the_oracle(form):
    folder = GOLDEN / "dms" / form
    expected = load_file(folder / "expected.safetensors")
    model = load(folder)
    assert isinstance(model.policy, DMS)
    tokens = jnp.asarray(expected["tokens"])
    out = model.transformer(tokens, model.policy)
    assert 0.1 < expected["decisions"].mean() < 0.9
    chex.assert_trees_all_equal(np.asarray(out.decisions), expected["decisions"])
    logits = np.asarray(model.logits(tokens))
    chex.assert_trees_all_close(logits, expected["logits"], rtol=0, atol=TOLERANCE)


def test_policies_of_nvidias_two_forms():
    neuron = load(GOLDEN / "dms" / "query_neuron")
    assert neuron.policy == DMS(window=5, source="query_neuron")
    assert not neuron.transformer.has_adapter
    adapter = load(GOLDEN / "dms" / "adapter")
    assert adapter.policy == DMS(window=4, source="adapter")
    assert adapter.transformer.has_adapter
    by_layer = load(GOLDEN / "dms" / "adapter_layer")
    assert by_layer.policy == DMS(
        window=3,
        source="adapter",
        per="layer",
        alpha_scale=10.0,
        alpha_offset=1.0,
        temperature=0.2,
    )
