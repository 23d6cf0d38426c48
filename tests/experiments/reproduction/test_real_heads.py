"""Which heads hold their tokens: the shares by hand, and the script with shipped models."""

import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.analysis import NEVER, Retention
from experiments.reproduction import real_heads
from experiments.reproduction.evictions.page import spread

N = NEVER


def held_by(*heads: list[int]) -> Retention:
    """A layer whose heads lost tokens of one text at these queries, with a window of 2."""
    gone = np.asarray(heads)[None, None]
    return Retention(
        policy=dms_jax.DMS(window=2),
        tokens=np.zeros((1, gone.shape[-1]), int),
        prompt_lengths=np.zeros(1, int),
        gone=gone,
        reads=None,
        num_query_heads=1,
    )


def test_the_window_does_not_count():
    """Of six tokens four are before the window; what goes after the last query is still held."""
    held = held_by([2, N, 5, N, N, N], [2, 3, 4, 5, N, N], [6, N, N, N, N, N])
    chex.assert_trees_all_close(real_heads.kept(held), np.array([[0.5, 0.0, 1.0]]))
    figures = real_heads.figures_of(held)
    assert figures["kept"] == pytest.approx(0.5)
    assert (figures["near_empty"], figures["near_whole"]) == pytest.approx((1 / 3, 1 / 3))
    assert figures["ratio"] == pytest.approx(18 / (4 + 2 + 6))
    assert figures["between"] == pytest.approx(1 / 3)
    assert figures.items() >= spread([[0.5, 0.0, 1.0]]).items()


def test_the_argument_is_that_few_heads_are_between_empty_and_whole():
    first = real_heads.figures_of(held_by([2, N, 5, N, N, N], [2, N, N, 5, N, N]))
    winners = real_heads.figures_of(held_by([2, 3, 4, 5, N, N], [6, N, N, N, N, N]))
    between, taken = (real_heads.page({"a": each}) for each in (first, winners))
    assert "it **does not hold**: 100% of the heads" in " ".join(between.split())
    assert "it **holds**: 0% of the heads" in " ".join(taken.split())
    both = real_heads.page({"a": first, "b": winners})
    assert "it **holds**: 0 to 100% of the heads" in " ".join(both.split())


@pytest.mark.nightly
def test_the_script_reads_texts_and_says_what_heads_hold(tmp_path, monkeypatch):
    data = tmp_path / "data"
    for name, text in (
        ("gsm8k/test.jsonl", '{"question": "One and one?", "answer": "#### 2"}\n' * 2),
        ("text/wikitext-2/test.txt", "The old house stood by the river and nobody came. " * 9),
    ):
        (data / name).parent.mkdir(parents=True)
        (data / name).write_text(text)
    sizes = dict(answers=2, answer_tokens=32, texts=2, text_tokens=24)
    told = dict(out=tmp_path / "out", qwen="q.gguf", smollm2="s.gguf", data=data, **sizes)
    config = real_heads.Config(**told)
    model = dms_jax.load(dms_jax.assets.path("reasoner-11m-dms"))
    asked = []

    def load(path, *, adapter, merge, dtype):
        asked.append((path, adapter.name))
        return model

    monkeypatch.setattr(real_heads.dms_jax, "load", load)
    monkeypatch.setattr(real_heads, "needles", lambda config, model: np.zeros((2, 24), int) + 5)
    monkeypatch.setitem(real_heads._TEXTS, real_heads.needles, "RULER's needles")
    with pytest.raises(dms_jax.ConfigError, match="--qwen or --smollm2"):
        real_heads.main(real_heads.Config(out=tmp_path))
    real_heads.main(config)
    assert asked == [("q.gguf", "warm-up-w16"), ("s.gguf", "smollm2-135m-instruct-dms")]
    systems = json.loads((tmp_path / "out" / "results.json").read_text())["systems"]
    sizes = {name: (own["texts"], own["tokens"]) for name, own in systems.items()}
    assert sizes == {
        "Qwen2.5-Coder-0.5B, its answers to GSM8K": (2, 32),
        "Qwen2.5-Coder-0.5B, wikitext-2": (2, 24),
        "SmolLM2-135M, RULER's needles": (2, 24),
        "SmolLM2-135M, wikitext-2": (2, 24),
    }
    for own in systems.values():
        assert np.shape(own["heads"]) == (model.config.num_layers, model.config.num_kv_heads)
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| SmolLM2-135M, wikitext-2 | 2 x 24 |" in page
    assert (tmp_path / "out" / "heads.png").exists()
    short = real_heads.Config(**(told | dict(answers=3)))
    with pytest.raises(dms_jax.DataError, match="2 answers to GSM8K have 32 tokens"):
        real_heads.main(short)
