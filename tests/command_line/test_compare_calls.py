"""The comparison of policies does what it was asked, and says at once what it cannot do."""

import dataclasses
import pathlib
import sys

import pytest

import dms_jax
from dms_jax.command_line import compare, main
from dms_jax.command_line.comparison import systems, texts
from dms_jax.command_line.comparison.labels import LEARNED, brought
from dms_jax.command_line.comparison.measure import Measured


def test_nothing_is_compared_with_a_dense_row_that_failed(tmp_path, monkeypatch):

    def fails(*args, **options):
        raise dms_jax.CapacityError("no room")

    monkeypatch.setattr(dms_jax, "score", fails)
    config = compare.Config(sequences=1, length=40, learn=(), only=("Knorm",), out=tmp_path)
    with pytest.raises(dms_jax.ConfigError, match=r"dense.*no room"):
        compare.main(config)
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.usefixtures("scored")
def test_nothing_is_trained_or_run_once_the_time_is_over(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    score = dms_jax.score

    def slow(model, sequences, *, policy, **options):
        clock[0] += 60 * (policy.name == "Vanilla")
        return score(model, sequences, policy=policy, **options)

    def never(*args, **options):
        raise AssertionError("training began")

    monkeypatch.setattr(dms_jax, "score", slow)
    monkeypatch.setattr(dms_jax, "retrofit", never)
    monkeypatch.setattr(compare.time, "monotonic", lambda: clock[0])
    config = compare.Config(
        ratios=(4.0,),
        sequences=1,
        length=40,
        learn=("DMS",),
        only=("DMS",),
        deadline_minutes=0.9,
        out=tmp_path,
    )
    assert [row.label for row in compare.main(config)] == ["dense"]
    assert "The time is over." in capsys.readouterr().out
    with pytest.raises(dms_jax.ConfigError, match="before the first row"):
        compare.main(dataclasses.replace(config, deadline_minutes=-1.0))


def test_nothing_is_trained_or_loaded_that_nobody_asked_for(stories, monkeypatch):
    trained, loaded = [], []

    def grouped(base, ratio, lessons, tell):
        trained.append(f"GQA@{ratio:g}")
        yield dataclasses.replace(base, label="GQA", ratio=ratio)

    def sparsified(base, policy, ratios, lessons, tell):
        trained.append(f"{base.label} + DMS")
        yield from ()

    def load(path):
        loaded.append(path)
        return stories

    monkeypatch.setattr(compare, "grouped", grouped)
    monkeypatch.setattr(compare, "sparsified", sparsified)
    monkeypatch.setattr(dms_jax, "load", load)
    dense = systems.System("dense", 1.0, stories, lambda share: dms_jax.Vanilla())
    fields = dict(ratios=(4.0, 2.0), checkpoints=("mine@2=a/b", "mine too@2=a/c"))

    def of(*only):
        trained.clear()
        loaded.clear()
        config = compare.Config(only=only, **fields)
        rows = [one.label for one in compare.learned_systems(config, dense, print)]
        return rows, trained.copy(), loaded.copy()

    assert of("GQA + DMS") == (["GQA"], ["GQA@2", "GQA + DMS"], [])
    assert of("GQA") == (["GQA", "GQA"], ["GQA@2", "GQA@4"], [])
    assert of("mine") == (["mine"], [], ["a/b"])
    assert of("mine + Quest") == (["mine + Quest"], [], ["a/b"])
    assert of("TOVA") == ([], [], [])


def test_an_adapter_is_brought_with_its_base(stories, tmp_path, monkeypatch):
    loaded = []

    def load(path, **options):
        loaded.append((path, options))
        return stories

    monkeypatch.setattr(dms_jax, "load", load)
    (tmp_path / "dms_adapter.json").touch()
    dense = systems.System("dense", 1.0, stories, lambda share: dms_jax.Vanilla())
    config = compare.Config(learn=(), only=("mine",), checkpoints=(f"mine@4={tmp_path}",))
    assert [row.label for row in compare.learned_systems(config, dense, print)] == ["mine"]
    base = str(dms_jax.assets.path("stories260k"))
    assert loaded == [(base, {"adapter": str(tmp_path)})]
    ships = "smollm2-135m-instruct-dms"
    assert brought((f"mine@4={ships}",)) == [("mine", 4.0, str(dms_jax.assets.path(ships)))]


def test_without_matplotlib_the_page_is_written_all_the_same(tmp_path, monkeypatch, capsys):
    """It is no dependency of the wheel, and minutes of measuring came before."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    row = Measured(
        "dense", 1.0, {"name": "Vanilla"}, None, peak=8.0, live=8.0, reads=9.0, bytes=10.0
    )
    monkeypatch.setattr(compare, "measure", lambda config, tell: {row.name: row})
    assert main(["compare", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tables.md"]
    assert "quality.png is not drawn: pip install 'dms-jax[plots]'" in capsys.readouterr().err


def test_labels_are_those_of_rows(stories, tmp_path):
    """What may be asked for comes about, and nothing else may be asked for."""
    config = compare.Config(learn=(), only=("Tova",), out=tmp_path)
    with pytest.raises(dms_jax.ConfigError, match=r"--only Tova.*TOVA"):
        compare.main(config)
    with pytest.raises(dms_jax.ConfigError, match="--only GQA: no row"):
        compare.main(dataclasses.replace(config, only=("GQA",)))
    for entry in ("DMS", "=somewhere", "DMS@x=somewhere", "DMS@0.5=somewhere"):
        with pytest.raises(dms_jax.ConfigError, match="label@ratio=directory"):
            compare.Config(checkpoints=(entry,))
    with pytest.raises(dms_jax.ConfigError, match="no such directory"):
        compare.Config(checkpoints=(f"mine@2={tmp_path}/nowhere",))
    twice = dataclasses.replace(config, only=(), checkpoints=("mine@2=a/b", "mine@2=a/c"))
    with pytest.raises(dms_jax.ConfigError, match="another row is called mine"):
        compare.main(twice)
    dms = systems.learned("DMS", 4.0, dataclasses.replace(stories, policy=dms_jax.DMS(window=8)))
    assert {"DMS", *(one.label for one in systems.combined(dms))} == set(LEARNED["DMS"])
    for name, labels in LEARNED.items():
        for label in labels:
            assert dataclasses.replace(config, learn=(name,), only=(label,)).wants(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(ratios=()), "--ratios wants"),
        (dict(ratios=(2.0, 2.0)), "--ratios are different"),
        (dict(ratios=(1.0,)), "--ratios are"),
        (dict(dmc_ratios=(float("inf"),)), "--dmc-ratios"),
        (dict(length=1), "--length must be at least 2"),
        (dict(page_size=0), "--page-size"),
        (dict(steps=3), "DMC"),
        (dict(window=-1), "window"),
        (dict(dmc_temperature=0.0), "temperature"),
        (dict(weight_decay=-0.1), "--weight-decay"),
        (dict(learning_rate=float("nan")), "--learning-rate"),
        (dict(text=pathlib.Path("nowhere.txt")), "nowhere.txt"),
    ],
)
def test_settings_are_checked_before_anything_runs(options, said):
    with pytest.raises(dms_jax.ConfigError, match=said):
        compare.Config(**options)


@pytest.mark.parametrize("name", ["out", "save"])
def test_folders_are_made_before_anything_runs(tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(compare, "read_text", None)  # what comes next
    folders = dict(out=tmp_path / "out") | {name: tmp_path / "file"}
    with pytest.raises(dms_jax.ConfigError, match=f"--{name} .*file: "):
        compare.main(compare.Config(**folders))


def test_text_that_is_none_is_refused(stories, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(128, 256)))
    sizes = dict(sequences=1, length=4)
    with pytest.raises(dms_jax.DataError, match="not text in UTF-8"):
        texts.packed(stories, path, **sizes)
    path.write_text("Once", encoding="utf-8")
    with pytest.raises(dms_jax.DataError, match="4 were asked for"):
        texts.packed(stories, path, **sizes)
    with pytest.raises(dms_jax.DataError, match="without a tokenizer"):
        texts.packed(dataclasses.replace(stories, tokenizer=None), None, **sizes)
