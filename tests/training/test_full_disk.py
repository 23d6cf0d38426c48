"""Failed writes are reported in one line, without Orbax's tracebacks."""

import asyncio
import gc
import logging
import warnings
from typing import Any

import jax.numpy as jnp
import pytest

from dms_jax.errors import CheckpointError
from dms_jax.training import checkpoints
from dms_jax.training.checkpoints import Checkpoints

STATE = {"w": jnp.arange(12.0).reshape(3, 4)}


def orbax_error(exc_info=True, path="/site-packages/orbax/checkpoint/_src/futures/future.py"):
    error = (ValueError, ValueError("RESOURCE_EXHAUSTED"), None) if exc_info else None
    return logging.LogRecord("absl", logging.ERROR, path, 1, "run() raised", (), error)


def test_tracebacks_of_orbax_are_hidden_while_checkpoints_are_open(tmp_path):
    logger = logging.getLogger("absl")
    assert logger.filter(orbax_error())
    (tmp_path / "checkpoints").mkdir()
    first, second = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1)
    first.close()
    assert not logger.filter(orbax_error())
    assert logger.filter(orbax_error(exc_info=False))
    assert logger.filter(orbax_error(path="/site-packages/other/file.py"))
    second.close()
    assert logger.filter(orbax_error())


def test_further_failed_writes_are_not_logged(tmp_path, monkeypatch, caplog):
    """Orbax raises the first error; asyncio logs the others when they are garbage-collected."""
    made: dict[str, Any] = {}
    source = "async def write():\n    raise ValueError('No space left on device')"
    exec(compile(source, "/site-packages/orbax/checkpoint/writing.py", "exec"), made)

    def write_all(path):
        loop = asyncio.new_event_loop()
        try:
            writes = [loop.create_task(made["write"]()) for _ in range(3)]
            loop.run_until_complete(writes[0])
        finally:
            loop.close()

    (tmp_path / "checkpoints").mkdir()
    found = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr(checkpoints, "_sum", write_all)
    found.save(1, STATE, {"at": 1})
    with pytest.warns(UserWarning, match="step 1 cannot be written .*: No space left on device"):
        found.close()
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_writes_that_never_began_do_not_warn(tmp_path):
    name = "coroutine 'async_serialize_from_host.<locals>.write_fragment'"
    (tmp_path / "checkpoints").mkdir()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = Checkpoints(tmp_path, keep=2)
        warnings.warn(f"{name} was never awaited", RuntimeWarning, stacklevel=1)
        warnings.warn("coroutine 'other' was never awaited", RuntimeWarning, stacklevel=1)
        found.close()
    assert [str(each.message) for each in told] == ["coroutine 'other' was never awaited"]


def test_full_disk_error_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    found = Checkpoints(tmp_path, keep=2)

    def full():
        raise ValueError(f"RESOURCE_EXHAUSTED: {'page ' * 200}: No space left on device [os=28]")

    monkeypatch.setattr(checkpoints, "_sum", lambda path: full())
    found.save(1, STATE, {"at": 1})
    with pytest.warns(UserWarning, match=r"step 1 cannot be written to \S+: No space left .*\.$"):
        found.save(2, STATE, {"at": 2})
    with pytest.raises(CheckpointError, match=r"step 2 .*: No space left on device\.$"):
        found.finish()
    found.close()
