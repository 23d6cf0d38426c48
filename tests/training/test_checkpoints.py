"""Checkpoints: damage, full disks, concurrent runs, other data, and restarts after divergence.

Tests without steps use the arrays of a tiny training state instead of a model.
"""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import threading

import chex
import jax
import jax.numpy as jnp
import pytest

from dms_jax.errors import CheckpointError, ConfigError, DataError, TrainingDivergedError
from dms_jax.model.language_model import LanguageModel
from dms_jax.training import retrofit
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.run_directory import RunDirectory
from tests.support.models import random_model
from tests.training.tiny import EAGER, documents, recipe

RECIPE = recipe(Stage("ramp", 6, 1e-3, 4.0, adapter_learning_rate=1e-2), batch_size=4)
STEEP = recipe(Stage("ramp", 2, 1e-3, 2.0), Stage("ramp", 4, 1e30, 4.0), batch_size=4)


def run(model, **options):
    return retrofit(model, EAGER, **dict(recipe=RECIPE, data=documents(), progress=False) | options)


@pytest.fixture(scope="module")
def first_step(model, tmp_path_factory):
    """The directory of a run that stopped after one step; tests continue copies of it."""
    path = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt, match="stopped after step 1"):
        run(model, out=path, stop_after=1e-9)
    return path


def opened(path, *, resume=True, restart_from=None, keep=2, **changes):
    own = {"recipe": "one", "seed": 0} | changes
    return RunDirectory(path, settings=own, resume=resume, restart_from=restart_from, keep=keep)


def state(step):
    """Arrays whose values depend on the step."""
    return {"weights": jnp.arange(4096.0) + step, "moment": jnp.full((8, 8), step, jnp.float32)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(0))


@contextlib.contextmanager
def saved(path, *steps, **options):
    """An open directory with checkpoints of these steps."""
    directory = opened(path, **options)
    try:
        for step in steps:
            directory.save(step, state(step), {"position": step})
        directory.finish()
        yield directory
    finally:
        directory.close()


def break_the_position(path):
    (path / "checkpoints" / "6" / "meta" / "metadata").write_text("{")


def break_the_arrays(path):
    for file in (path / "checkpoints" / "6" / "state").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [break_the_position, break_the_arrays])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    with saved(tmp_path, 3, 6):
        pass
    damage(tmp_path)
    with (
        saved(tmp_path) as directory,
        pytest.raises(CheckpointError, match=r"step 6 cannot be read: .*Remove .*/6 to .* 3"),
    ):
        directory.restore(ABSTRACT)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    with saved(tmp_path) as directory:
        restored, position = directory.restore(ABSTRACT)
        chex.assert_trees_all_equal(restored, state(3))
        assert position == {"position": 3}


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    with saved(tmp_path, 1, 2, 3, 4, keep=3):
        pass
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3", "4"]


def test_second_concurrent_run_is_refused(tmp_path):
    directory = opened(tmp_path)
    with pytest.raises(ConfigError, match="Another run is writing to "):
        opened(tmp_path)
    directory.close()
    opened(tmp_path).close()


@contextlib.contextmanager
def largest_file(size):
    """Limits files to `size` bytes, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def noise(step):
    """Arrays that cannot be compressed below the limit."""
    return {"weights": jax.random.normal(jax.random.key(step), (1 << 16,))}


def test_a_full_disk_warns_and_keeps_older_checkpoints(tmp_path):
    directory = opened(tmp_path)
    directory.save(1, noise(1), None)
    directory.finish()
    threads = set(threading.enumerate())
    with largest_file(1 << 15):
        directory.save(2, noise(2), None)
        with pytest.warns(UserWarning, match=r"step 2 cannot be written .*File too large.*step 1"):
            directory.save(3, noise(3), None)
        with pytest.raises(CheckpointError, match=r"step 3 cannot be written .*last one is of st"):
            directory.finish()
        for thread in set(threading.enumerate()) - threads:
            if not thread.name.startswith("asyncio"):
                thread.join(60.0)
                assert not thread.is_alive(), thread.name  # the checkpoint manager's threads
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    directory.save(4, noise(4), None)
    directory.finish()
    directory.close()
    with saved(tmp_path) as directory:
        restored, _ = directory.restore(jax.eval_shape(lambda: noise(0)))
    chex.assert_trees_all_equal(restored, noise(4))


def test_an_unwritable_log_warns(tmp_path):
    (tmp_path / ".log.jsonl").mkdir()
    told = "The log in .* cannot be written: Is a directory"
    with contextlib.closing(opened(tmp_path)) as directory, pytest.warns(UserWarning, match=told):
        directory.log({"step": 1})


@pytest.mark.parametrize("name", [".lock", "checkpoints"])
def test_path_taken_by_a_file_is_refused(tmp_path, name):
    place = tmp_path / name
    place.write_text("") if name == "checkpoints" else place.mkdir()
    for _ in range(2):  # and the directory is not left locked
        with pytest.raises(CheckpointError, match=r"cannot be written to .*Give another `out`"):
            opened(tmp_path)
    place.unlink() if name == "checkpoints" else place.rmdir()
    opened(tmp_path).close()


def test_a_run_resumes_with_a_damaged_log(tmp_path):
    whole, log = '{"step": %d, "skipped": true}\n', tmp_path / "log.jsonl"
    log.write_bytes((whole % 1).encode() + b"\xff\x00 {\n" + (whole % 2).encode() + b'{"step"')
    with contextlib.closing(opened(tmp_path)) as directory:
        assert directory.skipped_steps(2) == 2
        directory.log({"step": 3})
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]


def test_other_data_and_weights_are_refused(model, first_step, tmp_path):
    out = shutil.copytree(first_step, tmp_path / "run")
    with pytest.raises(ConfigError, match="another `data`"):
        run(model, data=documents(seed=1), out=out)
    other = LanguageModel(random_model(model.config, seed=1, dtype=jnp.float32))
    with pytest.raises(ConfigError, match=r"the same shape with other weights.* to resume it"):
        run(other, out=out)


def test_checkpoints_come_by_minutes_too(model, tmp_path):
    run(model, out=tmp_path, checkpoint_minutes=1e-6, keep_checkpoints=9)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == set("123456")


def test_sigterm_leaves_a_checkpoint(model, tmp_path):
    def tell(record):
        if record["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
        run(model, out=tmp_path, on_step=tell)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


def test_checkpoints_followed_only_by_nan_are_dropped(model, tmp_path):
    """Step 3 ruins the parameters; before this is detected, later steps write checkpoints."""
    with pytest.raises(TrainingDivergedError, match=r"last checkpoint is of step 2: `restart_from"):
        run(model, recipe=STEEP, out=tmp_path, checkpoint_every=1, keep_checkpoints=9)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}


def test_a_diverged_run_restarts_with_other_rates(model, tmp_path):
    """The error's advice works, twice; the log has each step once."""
    with pytest.raises(TrainingDivergedError, match="`restart_from=2` goes on from there"):
        run(model, recipe=STEEP, out=tmp_path, checkpoint_every=2)
    lower = dataclasses.replace(STEEP, stages=(STEEP.stages[0], Stage("ramp", 4, 1e-3, 4.0)))
    with pytest.raises(ConfigError, match=r"another recipe.*`restart_from=2` to resume with"):
        run(model, recipe=lower, out=tmp_path)
    with pytest.raises(ConfigError, match="another `seed` 0, not 1"):
        run(model, recipe=lower, out=tmp_path, restart_from=2, seed=1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4 to restart from; it has 2"):
        run(model, recipe=lower, out=tmp_path, restart_from=4)
    options = dict(recipe=lower, out=tmp_path, restart_from=2)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
        run(model, **options, stop_after=1e-9)
    seen = []
    result = run(model, **options, on_step=seen.append)
    assert [record["step"] for record in seen] == [4, 5, 6]
    log = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    chex.assert_trees_all_equal(
        parameters(result.transformer), parameters(run(model, recipe=lower).transformer)
    )
    # And from the start.
    with pytest.raises(KeyboardInterrupt, match="stopped after step 1"):
        run(model, out=tmp_path, restart_from=0, stop_after=1e-9)


def test_a_failed_restart_removes_nothing(model, tmp_path):
    """From a damaged checkpoint, or with a recipe that needs another state or other data."""
    with saved(tmp_path / "arrays", 2, 4, 6, keep=3):
        pass
    break_the_position(tmp_path / "arrays")
    with (
        saved(tmp_path / "arrays", restart_from=6, keep=3) as directory,
        pytest.raises(CheckpointError, match=r"step 6.*an earlier one; .*has 2, 4"),
    ):
        directory.restore(ABSTRACT)
    with saved(tmp_path / "arrays", restart_from=2, keep=3) as directory:
        assert directory.latest_step == 2
    with saved(tmp_path / "arrays", restart_from=4, keep=3) as directory:
        found, position = directory.restore(ABSTRACT)
        chex.assert_trees_all_equal(found, state(4))
        directory.remove_later()
        assert (position, directory.latest_step) == ({"position": 4}, 4)
    with saved(tmp_path / "arrays", restart_from=0, keep=3) as directory:
        assert directory.latest_step is None
        directory.remove_later()
    assert not list((tmp_path / "arrays" / "checkpoints").iterdir())
    # Of a run.
    out = tmp_path / "run"
    with pytest.raises(TrainingDivergedError):
        run(model, recipe=STEEP, out=out, checkpoint_every=1, keep_checkpoints=9)
    for changes in (dict(batch_size=8), dict(trainable="adapter")):
        other = dataclasses.replace(STEEP, **changes)
        with pytest.raises((DataError, CheckpointError)):
            run(model, recipe=other, out=out, restart_from=1, keep_checkpoints=9)
        assert sorted(int(path.name) for path in (out / "checkpoints").iterdir()) == [1, 2]


@pytest.mark.nightly
def test_resume_holds_one_state(model, first_step, tmp_path, monkeypatch):
    out = shutil.copytree(first_step, tmp_path / "run")
    alive = []
    restore = RunDirectory.restore

    def watched(self, abstract):
        shape = abstract.parameters["embedding"].shape  # fresh moments are zero
        alive.append([x for x in jax.live_arrays() if x.shape == shape and not x.any()])
        return restore(self, abstract)

    monkeypatch.setattr(RunDirectory, "restore", watched)
    # micro_batch_size may differ.
    run(model, recipe=dataclasses.replace(RECIPE, micro_batch_size=2), out=out)
    assert alive == [[]]
