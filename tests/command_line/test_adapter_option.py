"""Every command that takes the path of a model takes an adapter beside it."""

import dataclasses
import json
import pathlib

import pytest

import dms_jax
from dms_jax.command_line import chat, evaluate, generate, retrofit


class Loaded(Exception):
    """What the script asked to be loaded."""


@pytest.fixture(autouse=True)
def record(monkeypatch):
    def load(path, **options):
        raise Loaded(str(path), options.get("adapter"))

    monkeypatch.setattr(dms_jax, "load", load)


def configs(tmp_path: pathlib.Path) -> dict:
    preset = retrofit.PRESETS["stories260k"][1]
    return {
        chat: chat.Config(model="m.gguf", adapter="a"),
        generate: generate.Config(prompts=("Once",), model="m.gguf", adapter="a"),
        evaluate: evaluate.Config(model="m.gguf", adapter="a"),
        retrofit: dataclasses.replace(preset, model="m.gguf", adapter="a", out=tmp_path / "run"),
    }


@pytest.mark.parametrize("script", [chat, generate, evaluate, retrofit])
def test_the_adapter_is_loaded_with_the_model(script, tmp_path):
    with pytest.raises(Loaded) as loaded:
        script.main(configs(tmp_path)[script])
    assert loaded.value.args == ("m.gguf", "a")


def test_what_stayed_short_of_its_ratio_says_so(tmp_path):
    record = {"target_ratio": 4.0, "evicted": 0.5, "skipped": False}
    (tmp_path / "log.jsonl").write_text(json.dumps(record) + "\n")
    config = generate.Config(prompts=("Once",), model=str(tmp_path / "model"))
    with pytest.warns(UserWarning, match=r"ended at ratio 2\.00 of 4\.00"), pytest.raises(Loaded):
        generate.main(config)


@pytest.mark.parametrize("script", [chat, generate, evaluate, retrofit])
def test_an_adapter_that_ships_is_called_by_its_name(script, tmp_path):
    name = "smollm2-135m-instruct-dms"
    with pytest.raises(Loaded) as loaded:
        script.main(dataclasses.replace(configs(tmp_path)[script], adapter=name))
    assert loaded.value.args == ("m.gguf", dms_jax.assets.path(name))
    kept = dms_jax.checkpoint.adapter.read_adapter(dms_jax.assets.path(name))
    assert kept.policy == dms_jax.DMS(window=16, source="adapter")
    assert sum(file.stat().st_size for file in kept.directory.iterdir()) < 2_000_000
