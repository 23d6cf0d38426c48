"""Exports on the way: their files are written behind the steps, whole, in order, or not at all."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import os
import signal
import threading
import time

import jax
import pytest

from dms_jax import processes
from dms_jax.checkpoint import load, save, saving
from dms_jax.checkpoint.distributed_save import Saving
from dms_jax.errors import CheckpointError, TrainingDivergedError
from dms_jax.training import loop, retrofit
from dms_jax.training.exports import Exports
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from tests.training.tiny import EAGER, documents, language_model, recipe

# The ratio is 2.5 after the third of six steps, and 4 at the end.
RECIPE = recipe(Stage("ramp", 6, 1e-3, 4.0, adapter_learning_rate=1e-2), snapshots=(2.5,))
TENSORS = "model.safetensors"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """The bytes of the tensors of a run that nothing disturbs: the export's, and the model's."""
    out = tmp_path_factory.mktemp("reference")
    run(model, out=out)
    return exported(out), (out / "model" / TENSORS).read_bytes()


def run(model, **options):
    options = dict(recipe=RECIPE, data=documents(), progress=False) | options
    return retrofit(model, EAGER, **options)


def exported(out, ratio="2.5"):
    return (out / "snapshots" / ratio / TENSORS).read_bytes()


def checkpoints(out):
    """The steps of the checkpoints that are complete."""
    found = (out / "checkpoints").iterdir()
    return sorted(int(path.name) for path in found if path.name.isdigit())


class Disk:
    """Stands before the writing of tensors of exports: it waits for `go`, and fails if told to."""

    def __init__(self, monkeypatch, *, fails=False):
        self.begun, self.go, self.in_time = threading.Event(), threading.Event(), []
        self.write, self.fails, self.thread = saving.write_tensors, fails, None
        monkeypatch.setattr(saving, "write_tensors", self)

    def __call__(self, tensors, directory, files):
        if "snapshots" in directory.parts:
            self.thread = threading.current_thread()
            self.begun.set()
            self.in_time.append(self.go.wait(PATIENCE))
            if self.fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(tensors, directory, files)


def test_steps_go_on_while_an_export_is_written(model, reference, tmp_path, monkeypatch):
    """Its bits are those of the step at which it began, though later steps took its place."""
    disk, copied = Disk(monkeypatch), tmp_path / "copied"

    def tell(record):
        if record["step"] == 4:
            assert disk.begun.wait(PATIENCE)
            assert not (tmp_path / "run" / "snapshots" / "2.5").exists()
            disk.go.set()

    def copy(_, found):
        save(found, EAGER, copied)

    run(model, out=tmp_path / "run", on_step=tell, on_snapshot=copy)
    assert disk.in_time == [True]
    assert disk.thread is not threading.main_thread()
    assert exported(tmp_path / "run") == (copied / TENSORS).read_bytes() == reference[0]
    assert (tmp_path / "run" / "model" / TENSORS).read_bytes() == reference[1] != reference[0]


def test_a_checkpoint_is_not_complete_before_the_export_that_it_follows(
    model, reference, tmp_path, monkeypatch
):
    """A run that is killed in between would go on from it, and never write the export."""
    disk, seen = Disk(monkeypatch), []

    def tell(record):
        if record["step"] == 4:
            time.sleep(1)  # it would be complete by now
            seen.append(checkpoints(tmp_path))
            disk.go.set()

    run(model, out=tmp_path, on_step=tell, checkpoint_every=3)
    assert seen == [[]]
    assert checkpoints(tmp_path) == [3, 6]
    assert exported(tmp_path) == reference[0]


def test_an_export_that_fails_ends_the_run_and_is_made_when_it_goes_on(
    model, reference, tmp_path, monkeypatch
):
    steps = []
    with monkeypatch.context() as patched:
        disk = Disk(patched, fails=True)
        disk.go.set()
        with (
            pytest.warns(UserWarning, match=r"checkpoint of step 3 cannot be written.*No space"),
            pytest.raises(CheckpointError, match=r"written to .*snapshots/2\.5: .*No space left"),
        ):
            run(model, out=tmp_path, on_step=lambda r: steps.append(r["step"]), checkpoint_every=3)
    assert 3 in steps
    assert checkpoints(tmp_path) == []
    assert not list((tmp_path / "snapshots").iterdir())
    run(model, out=tmp_path, checkpoint_every=3)
    assert (exported(tmp_path), (tmp_path / "model" / TENSORS).read_bytes()) == reference


def test_an_export_of_the_last_step_that_fails_is_an_error(model, tmp_path, monkeypatch):
    disk = Disk(monkeypatch, fails=True)
    disk.go.set()
    last = dataclasses.replace(RECIPE, snapshots=(4.0,))
    with (
        pytest.warns(UserWarning, match="checkpoint of step 6 cannot be written"),
        pytest.raises(CheckpointError, match=r"snapshots/4: .*No space left"),
    ):
        run(model, out=tmp_path, recipe=last)
    assert not (tmp_path / "model").exists()


def test_sigterm_waits_for_the_export_that_is_being_written(
    model, reference, tmp_path, monkeypatch
):
    disk = Disk(monkeypatch)

    def tell(record):
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(1, disk.go.set).start()

    with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
        run(model, out=tmp_path, on_step=tell)
    assert disk.in_time == [True]
    assert exported(tmp_path) == reference[0]
    assert checkpoints(tmp_path) == [3]
    run(model, out=tmp_path)  # the directory is free again
    assert (tmp_path / "model" / TENSORS).read_bytes() == reference[1]


def test_a_run_that_diverges_waits_for_the_export(model, reference, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)

    def tell(record):
        if record["step"] == 4:
            threading.Timer(1, disk.go.set).start()

    steep = (Stage("ramp", 3, 1e-3, 2.5), Stage("ramp", 9, 1e30, 4.0))
    diverging = dataclasses.replace(RECIPE, stages=steep)
    with pytest.raises(TrainingDivergedError):
        run(model, out=tmp_path, recipe=diverging, on_step=tell, most_skipped=1)
    assert disk.go.is_set()
    assert load(tmp_path / "snapshots" / "2.5").policy == EAGER


def test_at_most_one_export_waits_on_the_host(model, tmp_path, monkeypatch):
    """The arrays of the second are moved once the first is written."""
    events, begin, write = [], loop.begin_save, saving.write_tensors

    def moving(model, policy, path, **options):
        events.append(f"move {path.name}")
        return begin(model, policy, path, **options)

    def slow(tensors, directory, files):
        if "snapshots" in directory.parts:
            time.sleep(0.5)
            write(tensors, directory, files)
            events.append(f"wrote {directory.parent.name.split('.saving')[0].strip('.')}")
        else:
            write(tensors, directory, files)

    monkeypatch.setattr(loop, "begin_save", moving)
    monkeypatch.setattr(saving, "write_tensors", slow)
    run(model, out=tmp_path, recipe=dataclasses.replace(RECIPE, snapshots=(4, 2, 2.5)))
    assert events == [
        f"{what} {ratio}" for ratio in ("2", "2.5", "4") for what in ("move", "wrote")
    ]


def test_frozen_arrays_stay_on_the_device_until_they_are_written(model, tmp_path, monkeypatch):
    """The host holds what is trained, while the run goes on."""
    moved, get, begin = [], jax.device_get, loop.begin_save

    def count(arrays):
        moved.append(sum(each.size for each in jax.tree.leaves(arrays)))
        return get(arrays)

    def counted(*given, **options):
        with monkeypatch.context() as patched:
            patched.setattr(saving.jax, "device_get", count)
            return begin(*given, **options)

    monkeypatch.setattr(loop, "begin_save", counted)
    adapter = dataclasses.replace(RECIPE, trainable="adapter")
    result = parameters(run(model, out=tmp_path, recipe=adapter).transformer)
    assert moved == [sum(x.size for name, x in result.items() if ".adapter." in name)]
    assert load(tmp_path / "snapshots" / "2.5").policy == EAGER


def test_an_error_beside_another_is_a_warning(tmp_path):
    class Failing(Saving):
        _begin = _complete = lambda self: None

        def _write(self):
            raise CheckpointError("no room")

    exports = Exports()
    exports.begin(Failing(tmp_path))
    with pytest.warns(UserWarning, match="An export was not written: no room"):
        exports.close()
    exports = Exports()
    exports.begin(Failing(tmp_path))
    while exports.written is not None and not exports.written.done():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="no room"):
        exports.check()
    exports.close()  # it was told


class Shared(Saving):
    """An export of several processes, of which this is one."""

    def __init__(self, monkeypatch, fails):
        monkeypatch.setattr(processes, "several", lambda: True)
        self.go, self.fails, self.calls = threading.Event(), fails, []

    _begin = _write = _complete = lambda self: None

    def write(self):
        assert self.go.wait(PATIENCE)
        self.calls.append("write")
        if self.fails:
            raise CheckpointError("no room")

    def complete(self):
        self.calls.append("complete")

    def end(self, *, written):
        self.calls.append(f"end {written}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_share_is_waited_for_until_it_is_written(monkeypatch, fails):
    """One that cannot be written is waited for as well, or the others would complete the export."""
    shared, exports = Shared(monkeypatch, fails), Exports()
    assert not exports.waits
    exports.begin(shared)
    assert exports.waits
    exports.check()
    shared.go.set()
    concurrent.futures.wait([exports.written])
    assert exports.waits == fails
    if fails:
        with pytest.raises(CheckpointError, match="no room"):
            exports.check()
        assert exports.waits
        exports.close()
        assert shared.calls == ["write", "end False"]
    else:
        exports.check()
        assert not exports.waits
        exports.complete()
        exports.complete()
        exports.close()
        assert shared.calls == ["write", "complete"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_beside_a_share_ends_the_export_once_it_is_written(monkeypatch, fails):
    shared, exports = Shared(monkeypatch, fails), Exports()
    exports.begin(shared)
    threading.Timer(0.2, shared.go.set).start()
    with pytest.warns(match="no room") if fails else contextlib.nullcontext():
        exports.close()
    assert shared.calls == ["write", f"end {not fails}"]


def test_what_is_moved_is_what_is_saved(model, tmp_path):
    """Whichever arrays stay behind."""
    arrays = list(parameters(model.transformer).values())
    save(model, model.policy, tmp_path / "saved")
    for name, kept in (("none", []), ("some", arrays[::2]), ("all", arrays)):
        saving.begin_save(model, model.policy, tmp_path / name, kept=kept).run()
        for file in ("config.json", TENSORS):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()
