"""A save that fails, wherever it does, leaves what was there and says so in an error of ours."""

import dataclasses
import io
import os
import subprocess
import sys

import pytest
import safetensors

from dms_jax import assets
from dms_jax.checkpoint import load, save, tensor_files
from dms_jax.errors import CheckpointError
from dms_jax.policies import TOVA, Vanilla
from tests.checkpoint.support import copy
from tests.support.instances import further

_FULL = "No space left on device"
# Every way in which saving touches the disk.
_CALLS = ("os.mkdir", "os.open", "io.open", "os.chmod", "os.link", "os.fsync", "os.rename")


@pytest.fixture(scope="module")
def stories():
    return load(assets.path("stories260k"))


class Failing:
    """Raises at the n-th call of any of `_CALLS` or of safetensors; counts them."""

    def __init__(self, monkeypatch, error, at: int):
        self.count, self.at, self.error = 0, at, error
        self.failed = ""
        for call in _CALLS:
            module = {"os": os, "io": io}[call.split(".")[0]]
            name = call.split(".")[1]
            monkeypatch.setattr(module, name, self._wrap(call, getattr(module, name)))
        monkeypatch.setattr(
            tensor_files, "save_file", self._wrap("save_file", tensor_files.save_file)
        )

    def _wrap(self, call, function):
        def counted(*arguments, **options):
            writes = call != "os.open" or arguments[1] & os.O_CREAT
            writes &= call != "io.open" or "w" in str(arguments[1:])
            writes &= call != "os.mkdir" or not os.path.exists(arguments[0])
            if writes:
                self.count += 1
                if self.count == self.at:
                    self.failed = call
                    library = call == "save_file" and self.error is OSError
                    raise (safetensors.SafetensorError if library else self.error)(_FULL)
            return function(*arguments, **options)

        return counted


def saving_error(model, out) -> BaseException | None:
    """What a save raises."""
    try:
        save(model, Vanilla(), out, max_shard_bytes=300_000)
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("error", [OSError, *further(KeyboardInterrupt)])
@pytest.mark.parametrize("there_before", [False, *further(True)])
def test_whichever_write_fails(stories, tmp_path, monkeypatch, error, there_before):
    out = tmp_path / "out"
    if there_before:
        save(stories, TOVA(budget=64), out)
        (out / "LICENSE").write_text("kept")
    failed = set()
    for at in range(1, 100):
        with monkeypatch.context() as patches:
            failing = Failing(patches, error, at)
            raised = saving_error(stories, out)
        if failing.count < at:  # none was left to fail: this was the whole save
            break
        if failing.failed == "os.link" and error is OSError:  # then documents are copied
            assert raised is None
            save(stories, TOVA(budget=64), out)
        else:
            assert type(raised) is (CheckpointError if error is OSError else error)
            assert _FULL in str(raised)
        failed.add(failing.failed)
        assert [entry.name for entry in tmp_path.iterdir()] == (["out"] if there_before else [])
        if there_before:
            assert load(out).policy == TOVA(budget=64)
            assert (out / "LICENSE").read_text() == "kept"
    assert at > 20
    assert failed >= {"os.mkdir", "io.open", "os.chmod", "os.fsync", "save_file"}
    assert there_before or "os.rename" in failed  # else the two directories are exchanged
    assert load(out).policy == Vanilla()


@pytest.mark.parametrize("there_before", [True, *further(False)])
def test_whichever_write_of_an_adapter_fails(tmp_path, monkeypatch, there_before):
    copy("dms/adapter", tmp_path / "base")
    model, out = load(tmp_path / "base"), tmp_path / "out"
    other = dataclasses.replace(model.policy, window=9)
    if there_before:
        save(model, other, out, adapter_only=True)
    failed = set()
    for at in range(1, 100):
        with monkeypatch.context() as patches:
            failing = Failing(patches, OSError, at)
            raised = None
            try:
                save(model, model.policy, out, adapter_only=True)
            except BaseException as error:
                raised = error
        if failing.count < at:
            break
        assert type(raised) is CheckpointError
        assert _FULL in str(raised)
        failed.add(failing.failed)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == (
            ["base", "out"] if there_before else ["base"]
        )
        if there_before:
            assert load(tmp_path / "base", adapter=out).policy == other
    assert failed >= {"os.mkdir", "io.open", "os.chmod", "os.fsync", "save_file"}
    assert load(tmp_path / "base", adapter=out).policy == model.policy


# A process in which no file may grow beyond so many bytes: errors come from the system.
_LIMITED = """
import resource, signal, sys
from dms_jax import assets
from dms_jax.checkpoint import load, save
from dms_jax.errors import CheckpointError
from dms_jax.policies import Vanilla

model = load(assets.path("stories260k"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (0, 100, 1_000, 100_000, 1_000_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(model, Vanilla(), sys.argv[1])
    except CheckpointError:
        continue
    sys.exit(f"saved with {limit} bytes a file")
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_errors_of_the_system_itself(stories, tmp_path):
    save(stories, TOVA(budget=64), tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "out")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert load(tmp_path / "out").policy == TOVA(budget=64)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts file systems of so many bytes; only root may."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True
        )
        if done.returncode:
            pytest.skip("a file system cannot be mounted here")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_really_full(stories, small_disk):
    saved = []
    for kib in (4, 8, 12, 16, 24, 32, 64, 512, 1024, 1044, 1056, 2048):
        disk = small_disk(kib * 1024)
        raised = saving_error(stories, disk / "out")
        left = list(disk.iterdir())
        subprocess.run(["umount", disk], check=True)
        if raised is None:
            saved.append(kib)
        else:
            assert type(raised) is CheckpointError
            assert "cannot be written" in str(raised)
            assert left == []
    assert saved
    assert saved[0] > 1024
