"""Named shapes of the write of new keys and values, shared by tests and benchmarks."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WriteCase:
    """One problem.

    Attributes:
      name: how tests and tables call it.
      rows: R.
      head_dim: D.
      page_size: tokens a page, P.
      dtype: of the pages.
      idle: one row in so many writes nothing, in one of the ways there are; 0 for none.
      spare_pages: pages of the pool that no row writes to.
    """

    name: str
    rows: int
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    idle: int = 3
    spare_pages: int = 3

    @property
    def pages(self) -> int:
        """N."""
        return self.rows + self.spare_pages

    @property
    def scaled(self) -> bool:
        """Whether the pages have scales."""
        return self.dtype == "float8_e4m3fn"


BASE = WriteCase("base", 11)

# Small enough for the interpreters.
CONTRACT: tuple[WriteCase, ...] = (
    BASE,
    *(replace(BASE, name=f"head_dim{d}", head_dim=d) for d in (64, 96, 256)),
    replace(BASE, name="float32", dtype="float32"),
    replace(BASE, name="float8", dtype="float8_e4m3fn"),
    replace(BASE, name="float8_head_dim64", dtype="float8_e4m3fn", head_dim=64),
    replace(BASE, name="page16", page_size=16),
    replace(BASE, name="page128", page_size=128),
    replace(BASE, name="one_row", rows=1, idle=0),
    replace(BASE, name="all_idle", rows=5, idle=1),
)

# What only plain XLA serves.
XLA_ONLY: tuple[WriteCase, ...] = (
    WriteCase("float64", 7, head_dim=16, page_size=8, dtype="float64"),
    WriteCase("page5", 7, head_dim=24, page_size=5, dtype="float32"),
)

# Measured on a GPU. Rows are sequences times KV heads, pages those of one layer of many.
BENCHMARK: tuple[WriteCase, ...] = tuple(
    WriteCase(name, rows, head_dim, dtype=dtype, idle=0, spare_pages=16384)
    for name, rows, head_dim, dtype in (
        ("rows256", 256, 128, "bfloat16"),
        ("rows8", 8, 128, "bfloat16"),
        ("rows2048", 2048, 128, "bfloat16"),
        ("rows256_head_dim64", 256, 64, "bfloat16"),
        ("rows256_float8", 256, 128, "float8_e4m3fn"),
    )
)


def by_name(name: str) -> WriteCase:
    """Find the case of that name.

    Raises:
      KeyError: there is none.
    """
    return {case.name: case for case in (*CONTRACT, *XLA_ONLY, *BENCHMARK)}[name]
