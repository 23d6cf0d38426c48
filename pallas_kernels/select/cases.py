"""Named shapes of the selection of the largest scores, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectCase:
    """One problem: the shape and the dtype of the scores, and the number to select.

    Attributes:
      name: name of the case in tests and tables.
      rows: R, the number of rows.
      width: S, the number of scores in a row.
      count: number of scores to select in a row.
      dtype: dtype of the scores.
    """

    name: str
    rows: int
    width: int
    count: int
    dtype: str = "float32"


# Small enough for the interpreter.
CONTRACT: tuple[SelectCase, ...] = (
    SelectCase("one", 3, 1, 1),
    SelectCase("two", 5, 2, 1),
    SelectCase("width7", 3, 7, 3),
    SelectCase("all", 2, 9, 9),
    SelectCase("all_but_one", 2, 64, 63),
    SelectCase("width1000", 4, 1000, 64),
    SelectCase("width1024", 3, 1024, 1),
    SelectCase("bfloat16", 3, 300, 20, dtype="bfloat16"),
    SelectCase("float16", 3, 300, 20, dtype="float16"),
    SelectCase("longest", 2, 8192, 128),
    SelectCase("longer", 2, 8193, 5),
    SelectCase("many_of_longer", 2, 9000, 2048),
    SelectCase("groups_twice", 1, 70001, 2000),
    SelectCase("slots65536", 2, 65536, 128),
)

# Measured on a GPU: pages for Quest, slots for KCache. Rows are sequences times query heads.
BENCHMARK: tuple[SelectCase, ...] = (
    SelectCase("pages512", 256, 512, 64),
    SelectCase("pages1024", 256, 1024, 64),
    SelectCase("slots32768", 256, 32768, 128),
    SelectCase("slots131072", 256, 131072, 128),
)
