"""Replace a checkpoint directory atomically, and never delete foreign files.

    out/                      the old checkpoint
    .out.saving-k3x9/new/     the new one, until it is complete and flushed
    .out.saving-k3x9/old/     the old one, until the new one has taken its place

A killed save leaves its directory `.out.saving-...`, which may be deleted once `out` is there.
"""

import contextlib
import dataclasses
import fnmatch
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from dms_jax.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_TENSORS
from dms_jax.checkpoint.weights import INDEX, SINGLE, shard_names
from dms_jax.errors import CheckpointError, plain


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of one kind of directory.

    Attributes:
        kind: its name in messages.
        mark: a file that every directory of this kind has.
        files: names of all its files, except the tensors that an index names.
    """

    kind: str
    mark: str
    files: frozenset[str]


# Includes tokenizer files that we never write: old ones would not fit the new tokenizer.
CHECKPOINT = Layout(
    "a checkpoint",
    "config.json",
    frozenset(
        {
            "config.json",
            "generation_config.json",
            SINGLE,
            INDEX,
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "special_tokens_map.json",
            "added_tokens.json",
            "vocab.json",
            "merges.txt",
            "chat_template.jinja",
            "chat_template.json",
        }
    ),
)
ADAPTER = Layout("an adapter", ADAPTER_CONFIG, frozenset({ADAPTER_CONFIG, ADAPTER_TENSORS}))
# Documents beside a checkpoint to keep, in upper or lower case.
_DOCUMENTS = ("*.md", "readme*", "licen[cs]e*", "notice*", "copying*", ".gitattributes")


@contextlib.contextmanager
def atomic_replace(target: pathlib.Path, layout: Layout) -> Iterator[pathlib.Path]:
    """Yields a directory to write into, which replaces `target` at the end.

    If the block raises, or `target` cannot be replaced, `target` is unchanged.

    Raises:
        CheckpointError: the target contains files that are not part of this layout.
        OSError: a file cannot be written.
    """
    documents = _check_files(target, layout)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.saving-", dir=target.parent, ignore_cleanup_errors=True
    ) as stage:
        new = pathlib.Path(stage, "new")
        new.mkdir()
        yield new
        for name in documents:
            shutil.copy2(target / name, new / name, follow_symlinks=False)
        if target.is_dir():  # keep its permissions
            shutil.copymode(target, new)
        flush(*(file for file in new.iterdir() if not file.is_symlink()), new)
        _swap(new, target)


def _check_files(target: pathlib.Path, layout: Layout) -> set[str]:
    """Lists the documents beside the files of this layout.

    Raises:
        CheckpointError: there are other files, which replacing would destroy.
    """
    if not os.path.lexists(target):
        return set()
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a directory to write {layout.kind} to")
    if target.samefile("."):
        raise CheckpointError(
            f"{target} is the current directory, which a new one cannot take the place of; save "
            "to a directory in it, or from outside it"
        )
    shards = set()
    if layout is CHECKPOINT:
        shards = {name for name in shard_names(target) or () if name.endswith(".safetensors")}
    own, documents, others = set(), set(), []
    for entry in sorted(target.iterdir()):
        name = entry.name
        if entry.is_dir() and not entry.is_symlink():
            others.append(name)
        elif name in layout.files | shards:
            own.add(name)
        elif any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _DOCUMENTS):
            documents.add(name)
        else:
            others.append(name)
    if others:
        raise CheckpointError(
            f"{target} holds more than {layout.kind} ({_some(others)}), which replacing it would "
            "destroy; give a new directory"
        )
    if own and layout.mark not in own:
        raise CheckpointError(
            f"{target} holds {_some(sorted(own))} and no {layout.mark}, so it is not {layout.kind} "
            "that can be replaced; give a new directory"
        )
    return documents


def _some(names: list[str]) -> str:
    return ", ".join(plain(name, 60) for name in names[:3]) + (" ..." if len(names) > 3 else "")


def flush(*paths: pathlib.Path) -> None:
    """Flushes files and directories to disk; some disks report only now that they are full."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _swap(new: pathlib.Path, target: pathlib.Path) -> None:
    """Replaces `target` by `new`."""
    if not os.path.lexists(target):
        new.rename(target)
        return
    old = new.with_name("old")
    try:
        target.rename(old)
        new.rename(target)
    except BaseException:  # also Ctrl-C as the first one returns
        if old.exists() and not os.path.lexists(target):
            old.rename(target)
        raise
