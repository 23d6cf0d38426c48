"""A failed save raises our error and leaves the old checkpoint, whichever write fails."""

import dataclasses
import io
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import safetensors

from dms_jax import assets
from dms_jax.checkpoint import load, save, tensor_files
from dms_jax.errors import CheckpointError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import TOVA, Policy
from tests.checkpoint.support import copy
from tests.support.instances import further

_FULL = "No space left on device"
# Every call with which saving writes.
_CALLS = ("os.mkdir", "os.open", "io.open", "os.chmod", "os.fsync", "os.rename")


class Failing:
    """Raises at the n-th call of `_CALLS` or of safetensors; counts the calls."""

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


@dataclasses.dataclass
class Case:
    """A model to save over a checkpoint of another policy, and a function that loads the result."""

    model: LanguageModel
    before: Policy
    load: Callable[[pathlib.Path], LanguageModel]
    options: dict[str, Any]

    def save(self, policy: Policy, out: pathlib.Path) -> None:
        save(self.model, policy, out, **self.options)


def whole(folder: pathlib.Path) -> Case:
    model = load(assets.path("stories260k"))
    return Case(model, TOVA(budget=64), load, dict(max_shard_bytes=300_000))


def adapter(folder: pathlib.Path) -> Case:
    base = copy("dms/adapter", folder / "base")
    model = load(base)
    before = dataclasses.replace(model.policy, window=9)
    return Case(model, before, lambda out: load(base, adapter=out), dict(adapter_only=True))


@pytest.mark.parametrize(
    ("make", "error", "there_before"),
    [
        (whole, OSError, False),
        (adapter, OSError, True),
        *further(
            (whole, OSError, True),
            (whole, KeyboardInterrupt, False),
            (whole, KeyboardInterrupt, True),
            (adapter, OSError, False),
        ),
    ],
)
def test_failed_write_keeps_old_checkpoint(make, error, there_before, tmp_path, monkeypatch):
    """Whichever of the calls that write fails."""
    case, out = make(tmp_path), tmp_path / "saved" / "out"
    out.parent.mkdir()
    if there_before:
        case.save(case.before, out)
        (out / "LICENSE").write_text("kept")
    failed = set()
    for at in range(1, 100):
        raised = None
        with monkeypatch.context() as patches:
            failing = Failing(patches, error, at)
            try:
                case.save(case.model.policy, out)
            except BaseException as caught:
                raised = caught
        if failing.count < at:  # no call was left to fail: this was the whole save
            break
        failed.add(failing.failed)
        assert type(raised) is (CheckpointError if error is OSError else error)
        assert _FULL in str(raised)
        left = ["out"] if there_before else []
        assert [entry.name for entry in out.parent.iterdir()] == left
        if there_before:
            assert case.load(out).policy == case.before
            assert (out / "LICENSE").read_text() == "kept"
    assert at > 8
    assert failed >= {"os.mkdir", "io.open", "os.chmod", "os.fsync", "os.rename", "save_file"}
    assert case.load(out).policy == case.model.policy
