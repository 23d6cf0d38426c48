"""Saving over a directory is atomic and deletes only files of the checkpoint."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

from dms_jax import assets
from dms_jax.checkpoint import atomic_replace, load, save
from dms_jax.errors import CheckpointError
from dms_jax.file_lock import lock
from dms_jax.policies import TOVA, Vanilla


@pytest.fixture(scope="module")
def stories():
    return load(assets.path("stories260k"))


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


def test_circular_link_is_refused(stories, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match="give a directory"):
        save(stories, stories.policy, tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "~nobody-of-this-name/x"])
def test_malformed_path_is_refused(stories, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is no path"):
        save(stories, stories.policy, path)
    with pytest.raises(CheckpointError, match="is no path"):
        load(path)


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


def test_file_added_during_a_save_is_kept(stories, out, monkeypatch):
    swap = atomic_replace._swap

    def late(new, target):
        (target / "my_lora.safetensors").write_text("precious")
        return swap(new, target)

    monkeypatch.setattr(atomic_replace, "_swap", late)
    save(stories, stories.policy, out)
    assert (out / "my_lora.safetensors").read_text() == "precious"
    assert load(out).policy == Vanilla()


_KILLED = """
import os, signal, sys
from dms_jax import assets
from dms_jax.checkpoint import atomic_replace, load, save
from dms_jax.policies import TOVA

model = load(assets.path("stories260k"))

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

where, target = sys.argv[1:]
if where == "between the renames":
    rename = os.rename
    os.rename = lambda source, *rest, **options: (
        die() if os.path.basename(source) == "new" else rename(source, *rest, **options)
    )
else:
    setattr(atomic_replace, where, die)
save(model, TOVA(budget=8), target)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["flush", "_swap", "between the renames"])
def test_next_save_cleans_up_after_a_killed_one(stories, out, tmp_path, where):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", _KILLED, where, str(out)], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == (1 if where == "between the renames" else 2)
    if where == "between the renames":
        assert names(tmp_path)[0].startswith(".out.saving-")
        (out.parent / names(tmp_path)[0] / "old" / "LICENSE").write_text("kept")
    (tmp_path / ".out.saving-link").symlink_to(tmp_path)  # not ours
    save(stories, stories.policy, out)
    assert names(tmp_path) == [".out.saving-link", "out"]
    assert load(out).policy == Vanilla()
    assert (out / "LICENSE").exists() == (where == "between the renames")


def test_load_restores_what_a_killed_save_moved_aside(stories, out, tmp_path):
    save(stories, TOVA(budget=8), out)
    stage = tmp_path / ".out.saving-abcd1234"
    (stage / "new").mkdir(parents=True)
    out.rename(stage / "old")
    running = os.open(stage, os.O_RDONLY)
    assert lock(running)
    with pytest.raises(CheckpointError, match="there is no directory"):
        load(out)
    os.close(running)
    assert load(out).policy == TOVA(budget=8)
    assert names(stage) == ["new"]  # left to the next save


def test_staging_directory_of_a_running_save_is_left_alone(stories, out, tmp_path):
    with atomic_replace.atomic_replace(out, atomic_replace.CHECKPOINT) as directory:
        (directory / "config.json").write_text("{}")
        # The lock belongs to the open file, so this process meets its own.
        save(stories, stories.policy, out)
        assert (directory / "config.json").exists()
    assert (out / "config.json").read_text() == "{}"
    assert names(tmp_path) == ["out"]


def test_folders_named_like_staging_directories_are_left_alone(stories, out, tmp_path):
    names_of_others = (".out.saving-mine", ".out.saving-abcd1234", ".out.saving-x.saving-abcd1234")
    for name, inside in zip(names_of_others, ("new", "notes", "old"), strict=True):
        (tmp_path / name / inside).mkdir(parents=True)
    save(stories, stories.policy, out)
    assert names(tmp_path) == sorted([*names_of_others, "out"])


def test_current_directory_is_refused(stories, out, monkeypatch):
    save(stories, stories.policy, out)
    monkeypatch.chdir(out)
    for target in (".", out):
        with pytest.raises(CheckpointError, match="is the current directory"):
            save(stories, stories.policy, target)
    assert load(out).policy == Vanilla()
