"""A snapshot is complete before the next checkpoint, or the run ends."""

import errno
import os

import pytest

from dms_jax.checkpoint import saving
from dms_jax.errors import CheckpointError
from dms_jax.training import retrofit
from dms_jax.training.recipe import Stage
from tests.training.tiny import EAGER, documents, recipe

# The ratio is 2.5 after the third of six steps, and 4 at the end.
RECIPE = recipe(Stage("ramp", 6, 1e-3, 4.0, adapter_learning_rate=1e-2), snapshots=(2.5,))
TENSORS = "model.safetensors"


def run(model, **options):
    options = dict(recipe=RECIPE, data=documents(), progress=False) | options
    return retrofit(model, EAGER, **options)


def checkpoints(out):
    """The steps of complete checkpoints."""
    found = (out / "checkpoints").iterdir()
    return sorted(int(path.name) for path in found if path.name.isdigit())


def full_disk(monkeypatch):
    """Makes the writing of exports fail."""
    write = saving.write_tensors

    def fail(tensors, directory, files):
        if "snapshots" in directory.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, directory, files)

    monkeypatch.setattr(saving, "write_tensors", fail)


def test_failed_export_ends_run_and_repeats_on_resume(model, tmp_path, monkeypatch):
    """If a checkpoint of its step existed, a resumed run would skip the export."""
    with monkeypatch.context() as patched:
        full_disk(patched)
        with pytest.raises(CheckpointError, match=r"written to .*snapshots/2\.5: .*No space left"):
            run(model, out=tmp_path / "out", checkpoint_every=3)
    assert checkpoints(tmp_path / "out") == []
    assert not list((tmp_path / "out" / "snapshots").iterdir())
    run(model, out=tmp_path / "out", checkpoint_every=3)
    run(model, out=tmp_path / "whole")
    for file in (f"snapshots/2.5/{TENSORS}", f"model/{TENSORS}"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
