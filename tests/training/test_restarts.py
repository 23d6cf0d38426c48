"""A restart from an older checkpoint: when later ones go, and what it goes on from again."""

import dataclasses

import chex
import pytest

from dms_jax.errors import CheckpointError, DataError, TrainingDivergedError
from tests.training.test_checkpoints import (
    ABSTRACT,
    STEEP,
    break_the_position,
    flip,
    run,
    saved,
    state,
)
from tests.training.tiny import language_model


@pytest.fixture(scope="module")
def model():
    return language_model()


def test_a_failed_restart_removes_nothing(model, tmp_path):
    """From a damaged checkpoint, or with a recipe that takes another state or other data."""
    with saved(tmp_path / "arrays", 2, 4, 6, keep=3):
        pass
    flip(tmp_path / "arrays")
    with (
        saved(tmp_path / "arrays", restart_from=6, keep=3) as directory,
        pytest.raises(CheckpointError, match=r"step 6.*another step to restart.*has 2, 4"),
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


def test_a_restart_falls_back_to_its_own_checkpoints(tmp_path):
    with saved(tmp_path, 2):
        pass
    with saved(tmp_path, restart_from=2, keep=3, recipe="other") as directory:
        directory.restore(ABSTRACT)
        directory.remove_later()
        directory.save(4, state(4), None)
        directory.save(6, state(6), None)
    break_the_position(tmp_path)
    with saved(tmp_path, restart_from=2, keep=3, recipe="other") as directory:
        with pytest.warns(UserWarning, match="goes on from the one before it, of step 4"):
            directory.restore(ABSTRACT)
        assert directory.latest_step == 4
