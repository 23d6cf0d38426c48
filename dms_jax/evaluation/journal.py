"""The answers of an evaluation on disk, so that an interrupted evaluation can resume.

The first line of `answers.jsonl` holds the settings, each other line an answer, written when it
finishes. The numbers of problems and chains are not settings: no seed depends on them, so a later
evaluation can add more of both.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dms_jax.cache.accounting import Usage
from dms_jax.differences import difference
from dms_jax.errors import DataError
from dms_jax.evaluation.traces import Answer, Trace
from dms_jax.file_lock import lock
from dms_jax.generation.requests import Completion
from dms_jax.model.language_model import LanguageModel

NAME = "answers.jsonl"
Place = tuple[int, int]  # problem, chain


class Journal:
    """The answers of one evaluation in a folder.

    Args:
      folder: the folder, created if needed.
      settings: everything that determines the answers, as JSON data.

    Attributes:
      answers: the answers already in the folder, by problem and chain.

    Raises:
      DataError: the folder cannot be written, another run is writing there, or it holds the answers
        of other settings.
    """

    def __init__(self, folder: str | pathlib.Path, settings: Mapping[str, Any]):
        self._path = pathlib.Path(folder) / NAME
        settings = json.loads(json.dumps(settings))
        with contextlib.ExitStack() as undo, _writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            undo.callback(self.close)
            if lock(self._file) is False:
                raise DataError(
                    f"Another run is writing {self._path}. Wait for its end, or name another "
                    "folder."
                )
            self._file.seek(0)
            whole = self._file.read().split(b"\n")[:-1]  # a last line may be incomplete
            self.answers = self._read(whole, settings)
            self._file.truncate(sum(len(line) + 1 for line in whole))
            if not whole:
                self._write({"settings": settings})
            undo.pop_all()

    def add(self, problem: int, chain: int, answer: Answer) -> None:
        """Writes an answer and flushes the file.

        Raises:
          DataError: the file cannot be written.
        """
        line = {"problem": problem, "chain": chain, **dataclasses.asdict(answer.completion)}
        if answer.trace is not None:
            line["trace"] = dataclasses.asdict(answer.trace)
        self._write(line)

    def close(self) -> None:
        """Closes answers.jsonl; all answers are on disk already."""
        with contextlib.suppress(OSError):  # `add` has reported it
            self._file.close()

    def _write(self, data: Mapping[str, Any]) -> None:
        with _writing(self._path):
            self._file.write(json.dumps(data).encode() + b"\n")
            self._file.flush()

    def _read(self, lines: list[bytes], settings: Mapping[str, Any]) -> dict[Place, Answer]:
        answers: dict[Place, Answer] = {}
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                if number == 1:
                    found = data["settings"]
                else:
                    usage, trace = Usage(**data.pop("usage")), data.pop("trace", None)
                    place = data.pop("problem"), data.pop("chain")
                    if data.get("likeliest") is not None:
                        data["likeliest"] = [tuple(pair) for pair in data["likeliest"]]
                    answers[place] = Answer(
                        Completion(usage=usage, **data), None if trace is None else Trace(**trace)
                    )
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self._path}, line {number}: not an answer of an evaluation ({error}). "
                    "Name another folder, or remove the file."
                ) from error
            if number == 1 and found != settings:
                names = sorted(found.keys() | settings.keys())
                other = [name for name in names if found.get(name) != settings.get(name)]
                told = ", ".join(
                    "another model" if name == "model" else difference(found, settings, name)
                    for name in other
                )
                raise DataError(
                    f"{self._path} holds answers of other settings: {told}. Give the same to "
                    "resume after them, or name another folder."
                )
        return answers


def write_files(folder: pathlib.Path, contents: Mapping[str, str]) -> None:
    """Writes files by name, each atomically.

    Raises:
      DataError: a file cannot be written.
    """
    for name, content in contents.items():
        with _writing(folder / name):
            part = folder / f"{name}.part"
            part.write_text(content + "\n", encoding="utf-8")
            part.replace(folder / name)


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Make room, or name another folder."
        ) from error


def model_mark(model: LanguageModel) -> str:
    """A fingerprint of a model: a hash of a part of every parameter."""
    state = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(model.transformer):
        part = leaf[(0,) * (leaf.ndim - 1)][:64]
        state.update(f"{leaf.shape} {leaf.dtype}".encode() + np.asarray(part).tobytes())
    return state.hexdigest()
