"""Staging directories: a checkpoint is written in one before it replaces another.

    out/                      the old checkpoint
    .out.saving-k3x9/new/     the new one while it is written
    .out.saving-k3x9/old/     the old one while the new one takes its place

A save locks its staging directory, so an unlocked one belongs to a killed save. If the save was
killed between its two renames, `out` is missing: the next load or save restores the old checkpoint.
The next save removes the staging directory.
"""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

from dms_jax.file_lock import lock

_TRIES = 10  # of `restore`, while another process holds the lock


@contextlib.contextmanager
def stage_beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create a directory beside the target, locked until it is removed."""
    while True:
        stage = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        try:
            with _lock(stage) as mine:
                # Another save may have removed it as a leftover before we locked it.
                if mine is not False and stage.exists():
                    yield stage
                    return
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _prefix(target: pathlib.Path) -> str:
    return f".{target.name}.saving-"


def remove_leftovers(target: pathlib.Path) -> None:
    """Clean up after killed saves to this target; restore a checkpoint that they moved away."""
    for stage in _unlocked_stages(target):
        _move_back(stage, target)
        shutil.rmtree(stage, ignore_errors=True)


def restore(target: pathlib.Path) -> None:
    """Restore the old checkpoint if a save to this target was killed between its renames."""
    with contextlib.suppress(OSError):  # no permission: the target stays missing
        for _ in range(_TRIES):
            if os.path.lexists(target) or not _moved_away(target):
                return
            for stage in _unlocked_stages(target):
                _move_back(stage, target)
            if not os.path.lexists(target):  # another process is about to move it back
                time.sleep(0.05)


def _moved_away(target: pathlib.Path) -> bool:
    """Whether a save to this target has moved the old checkpoint to its staging directory."""
    stages = target.parent.iterdir() if target.parent.is_dir() else ()
    return any(_is_stage(stage, target) and (stage / "old").is_dir() for stage in stages)


def _move_back(stage: pathlib.Path, target: pathlib.Path) -> None:
    old = stage / "old"
    if old.is_dir() and not os.path.lexists(target):
        old.rename(target)


def _unlocked_stages(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield each unlocked staging directory of this target; it is locked meanwhile."""
    if target.parent.is_dir():
        for stage in list(target.parent.iterdir()):
            if _is_stage(stage, target):
                with _lock(stage) as mine:
                    if mine:
                        yield stage


def _is_stage(path: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether a directory is a staging directory of this target, by its name and contents."""
    if path.is_symlink() or not path.is_dir():
        return False
    made = re.fullmatch(re.escape(_prefix(target)) + "[a-z0-9_]{8}", path.name)
    return made is not None and {entry.name for entry in path.iterdir()} <= {"new", "old"}


@contextlib.contextmanager
def _lock(directory: pathlib.Path) -> Iterator[bool | None]:
    """Lock a directory; yields False if another process has the lock, None if locks do not work.

    The system releases the lock when the process ends for any reason.
    """
    number, mine = None, None
    if hasattr(os, "O_DIRECTORY"):  # not on Windows, where leftovers stay
        with contextlib.suppress(OSError):  # no permission
            number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            mine = lock(number)
    try:
        yield mine
    finally:
        if number is not None:
            os.close(number)
