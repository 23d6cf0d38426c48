"""Saving over a directory is atomic and deletes only files of the checkpoint."""

import json
import os
import stat
import sys

import pytest
from safetensors import SafetensorError

from dms_jax.checkpoint import load, save, tensor_files
from dms_jax.errors import CheckpointError
from dms_jax.policies import TOVA, Vanilla


@pytest.fixture
def out(stories, tmp_path):
    """A checkpoint to save over."""
    save(stories, TOVA(budget=64), tmp_path / "out")
    return tmp_path / "out"


def names(directory) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize(
    "name",
    ["my_lora.safetensors", "model-00001-of-00002.safetensors", "thesis.tex", "pytorch_model.bin"],
)
@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_foreign_files_are_refused(stories, tmp_path, name, in_checkpoint):
    models = tmp_path / "models"
    if in_checkpoint:
        save(stories, TOVA(budget=64), models)
    else:
        models.mkdir()
        (models / "README.md").write_text("mine")
    (models / name).write_text("precious")
    before = names(models)
    with pytest.raises(CheckpointError, match=rf"holds more than a checkpoint \({name}\)"):
        save(stories, stories.policy, models)
    assert names(models) == before
    assert (models / name).read_text() == "precious"
    assert names(tmp_path) == ["models"]
    if in_checkpoint:
        (models / name).unlink()
        assert load(models).policy == TOVA(budget=64)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_files_without_a_config_are_refused(stories, tmp_path, name):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / name).write_text("precious")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        save(stories, stories.policy, tmp_path / "models")
    assert (tmp_path / "models" / name).read_text() == "precious"


def test_folders_and_files_are_no_targets(stories, out, tmp_path):
    (out / "notes").mkdir()
    with pytest.raises(CheckpointError, match=r"holds more than a checkpoint \(notes\)"):
        save(stories, stories.policy, out)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is a file"):
        save(stories, stories.policy, tmp_path / "thesis.tex")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(stories, stories.policy, tmp_path / "thesis.tex" / "below")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert names(tmp_path) == ["out", "thesis.tex"]


def test_index_does_not_delete_foreign_files(stories, tmp_path):
    save(stories, Vanilla(), tmp_path / "out", max_shard_bytes=300_000)
    index = tmp_path / "out" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {"a": "thesis.tex", "b": "LICENSE", "c": "../outside.safetensors"}
    index.write_text(json.dumps(content))
    (tmp_path / "out" / "LICENSE").write_text("kept")
    (tmp_path / "outside.safetensors").write_text("kept")
    (tmp_path / "out" / "thesis.tex").write_text("kept")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        save(stories, stories.policy, tmp_path / "out")
    (tmp_path / "out" / "thesis.tex").unlink()
    save(stories, stories.policy, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "kept"
    assert (tmp_path / "outside.safetensors").read_text() == "kept"


def test_documents_and_sampling_are_kept(stories, out, tmp_path):
    (tmp_path / "secret").write_text("key")
    for name in ("README.md", "LICENSE", "Licence.txt", "NOTICE", "USE_POLICY.md"):
        (out / name).write_text(name)
    (out / "readme.html").symlink_to("../secret")
    (out / "generation_config.json").write_text(
        '{"eos_token_id": 9, "pad_token_id": 3, "temperature": 0.6, "top_p": 0.9, '
        '"do_sample": true}'
    )
    (out / "chat_template.jinja").write_text("of the old tokenizer")
    save(stories, stories.policy, out)
    for name in ("README.md", "LICENSE", "Licence.txt", "NOTICE", "USE_POLICY.md"):
        assert (out / name).read_text() == name
    assert os.readlink(out / "readme.html") == "../secret"  # not published
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
    }
    assert not (out / "chat_template.jinja").exists()
    assert names(tmp_path) == ["out", "secret"]


@pytest.mark.skipif(sys.platform == "win32", reason="no permissions")
@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_directory_keeps_its_permissions(stories, out, mode):
    out.chmod(mode)
    save(stories, stories.policy, out)
    assert stat.S_IMODE(out.stat().st_mode) == mode


@pytest.mark.parametrize("there", [False, True])
def test_link_is_followed_not_replaced(stories, tmp_path, there):
    if there:
        save(stories, TOVA(budget=64), tmp_path / "disk" / "real")
    else:
        (tmp_path / "disk").mkdir()
    (tmp_path / "current").symlink_to("disk/real")
    save(stories, stories.policy, tmp_path / "current")
    assert os.readlink(tmp_path / "current") == "disk/real"
    assert load(tmp_path / "disk" / "real").policy == Vanilla()
    assert names(tmp_path) == ["current", "disk"]
    assert names(tmp_path / "disk") == ["real"]


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_malformed_path_is_refused(stories, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: save(stories, stories.policy, path), lambda: load(path)):
        with pytest.raises(CheckpointError, match="is not a path"):
            call()


@pytest.mark.parametrize("module", [tensor_files, os])
def test_old_checkpoint_stays_on_a_full_disk(stories, out, tmp_path, monkeypatch, module):
    """The tensors cannot be written, or cannot be flushed."""

    def full(*arguments, **options):
        raise OSError("No space left") if module is os else SafetensorError("No space left")

    (out / "LICENSE").write_text("kept")
    with monkeypatch.context() as patches:
        patches.setattr(module, "fsync" if module is os else "save_file", full)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left"):
            save(stories, Vanilla(), out)
    assert names(tmp_path) == ["out"]
    assert load(out).policy == TOVA(budget=64)
    assert (out / "LICENSE").read_text() == "kept"


def test_old_checkpoint_comes_back_after_a_failed_rename(stories, out, tmp_path, monkeypatch):
    save(stories, stories.policy, out)
    assert load(out).policy == Vanilla()
    assert names(tmp_path) == ["out"]
    rename, renames = os.rename, []

    def fail_on_the_new(source, target, **options):
        renames.append(os.path.basename(source))
        if renames[-1] == "new":
            raise OSError("no space")
        return rename(source, target, **options)

    monkeypatch.setattr(os, "rename", fail_on_the_new)
    with pytest.raises(CheckpointError, match="no space"):
        save(stories, TOVA(budget=64), out)
    monkeypatch.undo()
    assert renames[-3:] == ["out", "new", "old"]
    assert names(tmp_path) == ["out"]
    assert load(out).policy == Vanilla()


def test_old_checkpoint_comes_back_after_an_interrupt(stories, out, tmp_path, monkeypatch):
    """Ctrl-C arrives as the old checkpoint has just been moved away."""
    rename = os.rename

    def interrupted(source, target, **options):
        rename(source, target, **options)
        if os.path.basename(source) == "out":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(stories, stories.policy, out)
    monkeypatch.undo()
    assert names(tmp_path) == ["out"]
    assert load(out).policy == TOVA(budget=64)


def test_current_directory_is_refused(stories, out, monkeypatch):
    save(stories, stories.policy, out)
    monkeypatch.chdir(out)
    for target in (".", out):
        with pytest.raises(CheckpointError, match="is the current directory"):
            save(stories, stories.policy, target)
    assert load(out).policy == Vanilla()
