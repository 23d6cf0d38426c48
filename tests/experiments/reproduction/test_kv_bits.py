"""A quantized cache in chunks, against decode steps."""

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.cache.quantization import KV_DTYPES
from experiments.reproduction import kv_bits


@pytest.mark.nightly
def test_chunks_agree_with_decode_steps(tmp_path, monkeypatch):
    """`score` feeds the same tokens one by one through the engine."""
    for name, form in kv_bits.FORMS.items():  # left by the script
        monkeypatch.setitem(KV_DTYPES, name, form)
    config = kv_bits.Config(chunk=16, out=tmp_path, sequences=2, length=40)
    data = kv_bits.main(config)
    rows = {row["cache"]: row for row in data["rows"]}
    model = dms_jax.load(assets.path("stories260k"), dtype="float32")
    sequences = kv_bits.read(config, model)
    for cache, kv_dtype in (("float32, the model's own", None), ("int4", "int4")):
        scores = dms_jax.generation.score(model, sequences, kv_dtype=kv_dtype, page_size=64)
        loss = -np.mean([each.logprobs for each in scores])
        assert abs(rows[cache]["loss"]["mean"] - loss) < 1e-4, cache
        held = scores[0].usage
        # One page of 64 slots in each row.
        assert held.cache_bytes == 64 * rows[cache]["bytes_a_token"]
    assert rows["int4"]["divergence"]["mean"] > rows["float8_e4m3"]["divergence"]["mean"] > 0
    assert rows["int4"]["bytes_a_token"] * 2 == rows["float8_e4m3"]["bytes_a_token"]
