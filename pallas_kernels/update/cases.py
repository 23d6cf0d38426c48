"""Named shapes of the write of new keys and values, shared by tests and benchmarks.

Cases with query heads are for `rotate_and_write`, the others for `write_pages`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WriteCase:
    """One problem: shapes, dtype, and the frequency of idle rows.

    Attributes:
      name: name of the case in tests and tables.
      rows: R, the number of rows.
      head_dim: D, the head dim.
      page_size: P, the number of slots in a page.
      dtype: dtype of the pages.
      idle: every idle-th row writes nothing, for one of the possible reasons; 0 for none.
      spare_pages: number of pages of the pool that no row writes to.
      group: G, the query heads of a row to rotate with its key; 0 for no rotation.
      row_heads: rows per sequence, which share its angles.
      zeroed: zeroed numbers of the queries and the key, as (head, dimension).
    """

    name: str
    rows: int
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    idle: int = 3
    spare_pages: int = 3
    group: int = 0
    row_heads: int = 1
    zeroed: tuple[tuple[int, int], ...] = ()

    @property
    def pages(self) -> int:
        """N, the number of pages in the pool."""
        return self.rows + self.spare_pages

    @property
    def scaled(self) -> bool:
        """Whether the pages have scales."""
        return self.dtype == "float8_e4m3fn"


BASE = WriteCase("base", 11)
ROTATED = WriteCase("rotated", 12, group=4, row_heads=3)

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
    ROTATED,
    replace(ROTATED, name="rotated_head_dim64", head_dim=64, zeroed=((0, 63),)),
    replace(ROTATED, name="rotated_head_dim96", head_dim=96, zeroed=((0, 0), (4, 0))),
    replace(ROTATED, name="rotated_head_dim256", head_dim=256, group=1, zeroed=((1, 255),)),
    replace(ROTATED, name="rotated_float32", dtype="float32", group=7, zeroed=((6, 70),)),
    replace(ROTATED, name="rotated_page16", page_size=16, row_heads=12),
    replace(ROTATED, name="rotated_one_row", rows=1, idle=0, row_heads=1),
    replace(ROTATED, name="rotated_all_idle", rows=6, idle=1),
)

# Only for plain XLA.
XLA_ONLY: tuple[WriteCase, ...] = (
    WriteCase("float64", 7, head_dim=16, page_size=8, dtype="float64"),
    WriteCase("page5", 7, head_dim=24, page_size=5, dtype="float32"),
    replace(ROTATED, name="rotated_float64", dtype="float64", head_dim=16, zeroed=((4, 15),)),
    replace(ROTATED, name="rotated_head_dim6", dtype="float32", head_dim=6, page_size=5),
)

# Measured on a GPU. Rows are sequences times KV heads; the pages are those of one layer of many.
BENCHMARK: tuple[WriteCase, ...] = tuple(
    WriteCase(name, rows, head_dim, dtype=dtype, idle=0, spare_pages=16384)
    for name, rows, head_dim, dtype in (
        ("rows256", 256, 128, "bfloat16"),
        ("rows8", 8, 128, "bfloat16"),
        ("rows2048", 2048, 128, "bfloat16"),
        ("rows256_head_dim64", 256, 64, "bfloat16"),
        ("rows256_float8", 256, 128, "float8_e4m3fn"),
    )
) + tuple(
    WriteCase(name, rows, head_dim, idle=0, spare_pages=16384, group=group, row_heads=row_heads)
    for name, rows, head_dim, group, row_heads in (
        ("rotated_rows256", 256, 128, 4, 8),
        ("rotated_rows8", 8, 128, 4, 8),
        ("rotated_rows2048", 2048, 128, 4, 8),
        ("rotated_rows256_head_dim64", 256, 64, 4, 8),
        ("rotated_rows512_group7", 512, 64, 7, 2),
    )
)
