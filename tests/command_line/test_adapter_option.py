"""Every command that takes a model takes an adapter beside it."""

import pathlib

import pytest

import dms_jax
from dms_jax.command_line import main

SHIPPED = {  # with the largest size of its files, in bytes
    "smollm2-135m-instruct-dms": 400_000,
    "reasoner-11m-dms": 1_400_000,
}
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
        raise Loaded(str(path), options.get("adapter"), options.get("merge"))

    monkeypatch.setattr(dms_jax, "load", load)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("adapter", ["a", *SHIPPED])
@pytest.mark.parametrize("command", COMMANDS)
def test_adapter_is_loaded_with_the_model(command, adapter):
    with pytest.raises(Loaded) as loaded:
        main([*COMMANDS[command], "--model", "m.gguf", "--adapter", adapter])
    path = dms_jax.assets.path(adapter) if adapter in SHIPPED else adapter
    merged = True if command != "retrofit" else None  # beside the weights, updates cost every step
    assert loaded.value.args == ("m.gguf", path, merged)


@pytest.mark.parametrize("command", COMMANDS)
def test_shipped_adapter_as_model_loads_its_base(command, capsys):
    typed = [*COMMANDS[command], "--model", "reasoner-11m-dms"]
    with pytest.raises(Loaded) as loaded:
        main(typed)
    base, adapter = map(dms_jax.assets.path, ("reasoner-11m", "reasoner-11m-dms"))
    assert loaded.value.args[:2] == (str(base), adapter)
    assert main([*typed, "--adapter", "a"]) == 2
    assert "--model reasoner-11m-dms is reasoner-11m with its adapter" in capsys.readouterr().err


def test_retrofit_refuses_an_adapter_as_model(capsys):
    command = ["retrofit", "self-taught", "--out", "run", "--prompts", "p.jsonl", "--held-out", "1"]
    pathlib.Path("p.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(2)))
    assert main([*command, "--model", "reasoner-11m-dms"]) == 2
    said = "--model reasoner-11m-dms: that is an adapter; give --model reasoner-11m."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_adapters_are_small(name):
    kept = dms_jax.checkpoint.adapter.read_adapter(dms_jax.assets.path(name))
    assert isinstance(kept.policy, dms_jax.DMS)
    assert (kept.policy.window, kept.policy.source) == (16, "adapter")
    assert sum(file.stat().st_size for file in kept.directory.iterdir()) < SHIPPED[name]
