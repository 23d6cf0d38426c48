"""The script of few bits: its figures are those of decode steps, its table and its errors."""

import json

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.cache.quantization import KV_DTYPES
from dms_jax.command_line.comparison.texts import packed
from experiments.reproduction import kv_bits

SIZES = dict(sequences=2, length=40)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The report of two short stories, and its table."""
    out = tmp_path_factory.mktemp("kv_bits")
    with pytest.MonkeyPatch.context() as patch:
        for name, form in kv_bits.FORMS.items():  # which the script leaves behind
            patch.setitem(KV_DTYPES, name, form)
        config = kv_bits.Config(model="stories260k", chunk=16, name="small", out=out, **SIZES)
        data = kv_bits.main(config)
    assert json.loads((out / "small.json").read_text())["rows"] == data["rows"]
    return data, (out / "small.md").read_text()


@pytest.mark.nightly
def test_chunks_say_what_decode_steps_say(measured):
    """`score` feeds the same tokens one by one through the engine."""
    data, _ = measured
    rows = {row["cache"]: row for row in data["rows"]}
    model = dms_jax.load(assets.path("stories260k"), dtype="float32")
    text = packed(model, None, **SIZES)
    for cache, kv_dtype in (("float32, the model's own", None), ("int4", "int4")):
        scores = dms_jax.generation.score(model, text.sequences, kv_dtype=kv_dtype, page_size=64)
        loss = -np.mean([each.logprobs for each in scores])
        assert abs(rows[cache]["loss"]["mean"] - loss) < 1e-4, cache
        held = scores[0].usage
        # One page of 64 slots in each row.
        assert held.cache_bytes == 64 * rows[cache]["bytes_a_token"]
    assert rows["int4"]["divergence"]["mean"] > rows["float8_e4m3"]["divergence"]["mean"] > 0
    assert rows["int4"]["bytes_a_token"] * 2 == rows["float8_e4m3"]["bytes_a_token"]


@pytest.mark.nightly
def test_the_table_has_a_line_for_every_cache(measured):
    data, page = measured
    assert [row["cache"] for row in data["rows"]] == [
        "float32, the model's own",
        "bfloat16",
        "float8_e4m3",
        "int4",
        "int4, not rotated",  # heads of 8 are one group
    ]
    own = data["rows"][0]
    assert own["divergence"]["mean"] == own["more"]["mean"] == 0
    assert data["tokens"] == 2 * 39
    assert page.count("\n|") == 1 + len(data["rows"])
    assert "| int4 | 6 | 240 |" in page


def test_errors_are_those_of_a_mean_over_sequences():
    # Of equal lengths it is the standard error of the mean of their means: of 1 and 3, 1.
    values = [np.array([1.0, 1.0]), np.array([2.0, 4.0])]
    assert kv_bits.mean(values) == {"mean": 2.0, "error": 1.0}
    alone = kv_bits.mean(values[:1])
    assert (alone["mean"], np.isnan(alone["error"])) == (1.0, True)  # not 0, which nobody measured


def test_chunks_of_one_token_are_refused(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="at least two"):
        kv_bits.main(kv_bits.Config(chunk=1, out=tmp_path))
