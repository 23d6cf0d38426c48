"""Tasks whose problems are the records of a published data file.

The file is the split: every `split` gives the problems of the file, in order. Worked examples come
from another file of the same format, so that no problem is its own example.
"""

import abc
import dataclasses
import functools
import pathlib
import random
from collections.abc import Sequence
from typing import Any

from dms_jax.checks import Whole, check
from dms_jax.data.tasks import Problem, Split, Task
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.records import Record, read_records

Path = str | pathlib.Path


@dataclasses.dataclass(frozen=True)
class FileTask(Task):
    """Problems from one file, and worked examples from another.

    Attributes:
      path: JSON lines, JSON, CSV or parquet, or a folder of such files.
      few_shot: worked examples before each problem.
      examples: the file whose first records are the worked examples.
      seed: for tasks that shuffle their options.
    """

    path: Path
    few_shot: Whole = 0
    examples: Path | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.few_shot and self.examples is None:
            raise ConfigError(
                f"{type(self).__name__}: {self.few_shot} worked examples need a file to come "
                "from: examples=."
            )

    @functools.cached_property
    def records(self) -> tuple[Record, ...]:
        """The records of the file.

        Raises:
          DataError: the file cannot be read, or a line is malformed.
        """
        return read_records(self.path)

    def record(self, index: int) -> Record:
        """One record.

        Raises:
          DataError: the file has too few records.
        """
        if not 0 <= index < len(self.records):
            raise DataError(
                f"{self.name}: {self.path} holds {len(self.records)} problems, and number "
                f"{index} was requested (the first is 0)."
            )
        return self.records[index]

    @functools.cached_property
    def example_records(self) -> Sequence[Record]:
        """The records of the worked examples.

        Raises:
          DataError: there are too few examples.
        """
        if not self.few_shot:
            return ()
        found = read_records(self.examples or "")
        if len(found) < self.few_shot:
            raise DataError(
                f"{self.name}: few_shot={self.few_shot}, and {self.examples} holds {len(found)} "
                "examples."
            )
        return found[: self.few_shot]

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON data: its name and every field."""
        fields = dataclasses.asdict(self)
        for field in ("path", "examples"):
            fields[field] = None if fields[field] is None else str(fields[field])
        return {"name": self.name, **fields}

    @abc.abstractmethod
    def pose(self, record: Record, number: int) -> Problem:
        """The problem of a record, without examples; `number` is its index in the file."""

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of the file, for any split.

        Raises:
          DataError: the problem does not exist, or its record is malformed.
        """
        del split
        record = self.record(check(f"{self.name}: problem", index, Whole))
        posed = self.pose(record, index)
        shown = [self.pose(each, i) for i, each in enumerate(self.example_records)]
        return dataclasses.replace(posed, examples=tuple((e.prompt, e.solution) for e in shown))

    def draw(self, rng: random.Random) -> Problem:
        """Any problem of the file."""
        return self.problem("test", rng.randrange(len(self.records)))
