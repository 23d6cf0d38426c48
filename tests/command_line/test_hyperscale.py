"""`dms-jax hyperscale`: systems, tables, files, and resuming."""

import dataclasses
import functools
import json

import pytest

import dms_jax
from dms_jax.command_line import hyperscale
from dms_jax.evaluation import Chat, System


@pytest.fixture
def declared(stories):
    """A checkpoint that declares DMS."""
    return dataclasses.replace(stories, policy=dms_jax.DMS(window=10, alpha_offset=0.0))


def test_systems_are_parsed(stories, declared):
    def load(name, adapter=None):
        return {"plain": stories, "mine": declared}[adapter or name]

    read = functools.partial(hyperscale.read_system, default="plain", load=load)
    assert read("Vanilla") == System("Vanilla", dms_jax.Vanilla(), stories)
    assert read("TOVA,compression_ratio=4,name=cut") == System(
        "cut", dms_jax.TOVA(compression_ratio=4), stories
    )
    # Omitted options are those of the checkpoint.
    assert read("DMS,model=mine,ratio=8") == System("DMS", declared.policy, declared, 8)
    assert read("TOVA,model=mine") == System("TOVA", dms_jax.TOVA(), declared)
    assert read("DMS,adapter=mine,ratio=8") == System("DMS", declared.policy, declared, 8)
    assert read("DMS,model=mine,window=5").policy == dms_jax.DMS(window=5, alpha_offset=0.0)
    with pytest.raises(dms_jax.ConfigError, match="TOWA"):
        read("TOWA")
    with pytest.raises(dms_jax.ConfigError, match="name=value"):
        read("TOVA,4")


def test_chat_option_applies_the_template(monkeypatch):
    """A chat model needs its template for AIME, MATH-500 and GPQA."""
    asked = {}

    def stop(model, tasks, systems, **options):
        asked.update(options)
        raise dms_jax.ConfigError("asked")

    monkeypatch.setattr(dms_jax, "hyperscale", stop)
    config = hyperscale.Config(model="stories260k", systems=("Vanilla",), task="linear", top_p=0.9)
    chat = dict(chat=True, system="Be brief.", template=("enable_thinking=false",))
    for given, form in (
        ({}, None),
        (chat, Chat(system="Be brief.", variables={"enable_thinking": False})),
    ):
        with pytest.raises(dms_jax.ConfigError, match="asked"):
            hyperscale.main(dataclasses.replace(config, **given))
        assert asked["chat"] == form
        assert asked["sampling"].top_p == 0.9
    with pytest.raises(dms_jax.ConfigError, match="--system is for a chat: give --chat too"):
        hyperscale.main(dataclasses.replace(config, system="Be brief."))


@pytest.mark.usefixtures("fakes")
def test_tables_files_and_resuming(tmp_path, capsys):
    config = hyperscale.Config(
        model="stories260k",
        systems=("Vanilla", "TOVA,budget=20,ratio=3"),
        task="linear",
        lengths=(2, 4),
        chains=(1, 3),
        problems=2,
        page_size=16,
        method="pass",
        out=tmp_path / "run",
    )
    result = hyperscale.main(config)
    shown = capsys.readouterr().out
    assert "4-3-3@0.7" in shown
    assert "|" not in shown  # tables for a terminal
    cells = [cell for row in result.gain_rows("pass") for cell in row]
    assert all(cell.replace("± ", "±") in shown for cell in cells)
    data = json.loads((tmp_path / "run/results.json").read_text())
    assert data["points"] == json.loads(json.dumps(result.to_dict("pass")["points"]))
    assert data["method"] == "pass"
    assert result.table("pass") in (tmp_path / "run/table.md").read_text()
    assert data["versions"]["jax"]
    assert (tmp_path / "run/figure.png").stat().st_size > 10_000
    sizes = {path: path.stat().st_size for path in tmp_path.rglob("answers.jsonl")}
    assert len(sizes) == 4  # of each system the greedy chains and the others
    assert hyperscale.main(config).table() == result.table()
    assert {path: path.stat().st_size for path in tmp_path.rglob("answers.jsonl")} == sizes
