"""A process that saves a model with others: `python -m tests.checkpoint.distributed_save_worker`.

Its argument is JSON: {"base": checkpoint, "adapter": beside it, "out": folder, "size": of a file}.
Saves in every way of `main`, and writes to `out`-<process>.json the outcome of each and the files
of tensors that this process wrote.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from dms_jax import processes
from dms_jax.checkpoint import load, save, tensor_files
from dms_jax.sharding import make_mesh


@contextlib.contextmanager
def counted(report: dict[str, Any]) -> Iterator[None]:
    """Adds the files written inside the context, and its outcome, to a report."""
    write = tensor_files.save_file
    report |= {"files": [], "ended": "done"}

    def writing(tensors, file, **options):
        report["files"].append(pathlib.Path(file).name)
        write(tensors, file, **options)

    with mock.patch.object(tensor_files, "save_file", writing):
        try:
            yield
        except Exception as error:
            report["ended"] = f"{type(error).__name__}: {error}"


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(told: dict[str, Any]) -> None:
    processes.connect()
    index, out = jax.process_index(), pathlib.Path(told["out"])
    placed: dict[str, Any] = dict(mesh=make_mesh(4, 2), for_training=True)
    model = load(told["base"], **placed)
    tuned = load(told["base"], adapter=told["adapter"], **placed)
    report: dict[str, Any] = {}

    def case(name: str) -> contextlib.AbstractContextManager[None]:
        return counted(report.setdefault(name, {}))

    with case("whole"):
        save(model, model.policy, out / "whole", max_shard_bytes=told["size"])
    with case("one file"):
        save(model, model.policy, out / "one file")
    with case("merged"):
        save(tuned, tuned.policy, out / "merged", max_shard_bytes=told["size"])
    with case("adapter"):
        save(tuned, tuned.policy, out / "adapter", adapter_only=True)
    with case("no base"):
        other = dataclasses.replace(tuned, source=told["out"])
        save(other, other.policy, out / "adapter", adapter_only=True)
    with case("full"):
        failing = mock.patch.object(tensor_files, "save_file", full_disk)
        with failing if index == 0 else contextlib.nullcontext():
            save(tuned, tuned.policy, out / "whole", max_shard_bytes=told["size"])
    with case("not replaced"):  # by the first
        (out / "taken").write_text("")
        save(model, model.policy, out / "taken", max_shard_bytes=told["size"])
    out.with_name(f"{out.name}-{index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
