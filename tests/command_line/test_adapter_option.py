"""Every command that takes a model takes an adapter beside it."""

import json

import pytest

import dms_jax
from dms_jax.command_line import main

SHIPPED = "smollm2-135m-instruct-dms"
COMMANDS = {
    "chat": ["chat"],
    "generate": ["generate", "Once"],
    "evaluate": ["evaluate"],
    "retrofit": ["retrofit", "stories260k", "--out", "run"],
}


class Loaded(Exception):
    """The arguments with which a command loads."""


@pytest.fixture(autouse=True)
def record(monkeypatch, tmp_path):
    def load(path, **options):
        raise Loaded(str(path), options.get("adapter"))

    monkeypatch.setattr(dms_jax, "load", load)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("adapter", ["a", SHIPPED])
@pytest.mark.parametrize("command", COMMANDS)
def test_adapter_is_loaded_with_the_model(command, adapter):
    with pytest.raises(Loaded) as loaded:
        main([*COMMANDS[command], "--model", "m.gguf", "--adapter", adapter])
    path = dms_jax.assets.path(adapter) if adapter == SHIPPED else adapter
    assert loaded.value.args == ("m.gguf", path)


def test_the_shipped_adapter_is_small():
    kept = dms_jax.checkpoint.adapter.read_adapter(dms_jax.assets.path(SHIPPED))
    assert kept.policy == dms_jax.DMS(window=16, source="adapter")
    assert sum(file.stat().st_size for file in kept.directory.iterdir()) < 2_000_000


def test_ratio_below_target_warns(tmp_path, capsys):
    short = {"target_ratio": 4.0, "evicted": 0.5, "skipped": False}
    (tmp_path / "log.jsonl").write_text(json.dumps(short) + "\n")
    with pytest.raises(Loaded):
        main(["generate", "Once", "--model", str(tmp_path / "model")])
    assert "ended at ratio 2.00 of 4.00" in capsys.readouterr().err
