"""Prompts under every policy: what is timed, and what cannot be."""

import json

import pytest

import dms_jax
from dms_jax.generation import Engine
from experiments.benchmarks import policy_prompts


@pytest.mark.nightly
def test_whole_prompts_are_read_in_each_call(monkeypatch, tmp_path):
    served, generate = [], Engine.generate

    def counted(self, prompts, **options):
        completions = generate(self, prompts, **options)
        served.append([each.usage.prefilled_tokens for each in completions])
        return completions

    monkeypatch.setattr(Engine, "generate", counted)
    config = policy_prompts.Config(
        shape="tiny",
        context=600,
        batch=2,
        ratio=2,
        only=("DMC", "H2O"),
        repeats=2,
        dtype="float32",
        out=tmp_path,
    )
    rows = policy_prompts.main(config)
    assert served == 2 * 3 * [[600, 600]]
    assert [row["label"] for row in rows] == ["DMC", "H2O"]
    for row in rows:
        assert len(row["all_seconds"]) == 2
        assert row["tokens_per_second"] == 1200 / row["seconds"]
        assert "programs" not in row  # those of a GPU
    written = json.loads((tmp_path / "prompts.json").read_text())
    assert [row["seconds"] for row in written["rows"]] == [row["seconds"] for row in rows]
    assert "--out" not in written["command"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(batch=0), "--batch must"),
        (dict(shape="huge"), "--shape huge: there are .*tiny"),
        (dict(context=256), "leaves 128 tokens at a ratio of 2, .* give --context at least 514"),
        (dict(only=("SnapKv",)), "--only SnapKv: .*SnapKV"),
    ],
)
def test_it_says_what_it_cannot_time(tmp_path, options, said):
    fields = dict(shape="tiny", context=640, ratio=2) | options
    with pytest.raises(dms_jax.ConfigError, match=said):
        policy_prompts.main(policy_prompts.Config(out=tmp_path, **fields))
