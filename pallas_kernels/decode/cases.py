"""Named shapes of decode attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class DecodeCase:
    """One problem: shapes, dtypes and row lengths.

    Attributes:
      name: name of the case in tests and tables.
      lengths: number of live slots of each row.
      group: G, the number of query heads of a row.
      head_dim: D, the head dim.
      page_size: P, the number of slots in a page.
      dtype: dtype of the queries, and of the pages unless `pages_dtype` is given.
      pages_dtype: "float8_e4m3fn" for quantized pages.
      value_scale: factor on the scales of the values of quantized pages.
      spare_pages: number of pages of the pool that no row owns.
      spare_columns: number of table columns beyond those of the longest row.
      shuffled: rows own pages in random order, not consecutive ones.
      poison: fill every unread slot with NaN and every dead table entry with an invalid page.
      sinks: whether each query head has a sink.
      soft_cap: soft cap of the scores; None for none.
    """

    name: str
    lengths: tuple[int, ...]
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    pages_dtype: str | None = None
    value_scale: float = 1.0
    spare_pages: int = 3
    spare_columns: int = 1
    shuffled: bool = True
    poison: bool = True
    sinks: bool = False
    soft_cap: float | None = None

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.lengths)

    @property
    def live_tokens(self) -> int:
        """Number of slots that are read."""
        return sum(self.lengths)

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values of live slots, scales included."""
        size = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
        each = self.head_dim * size[self.pages_dtype or self.dtype]
        return 2 * self.live_tokens * (each + (4 if self.pages_dtype else 0))

    @property
    def columns(self) -> int:
        """M, the width of the page table."""
        return max(1, -(-max(self.lengths) // self.page_size)) + self.spare_columns

    @property
    def pages(self) -> int:
        """N, the number of pages in the pool."""
        return sum(-(-n // self.page_size) for n in self.lengths) + self.spare_pages


_P = 64
_EDGES = (0, 1, _P - 1, _P, _P + 1, 3 * _P + 5)

BASE = DecodeCase("base", _EDGES)

# Small enough for the interpreters; together they cover all features of `decode_attention`.
CONTRACT: tuple[DecodeCase, ...] = (
    BASE,
    *(replace(BASE, name=f"group{g}", group=g) for g in (1, 2, 8, 12, 16)),
    *(replace(BASE, name=f"head_dim{d}", head_dim=d) for d in (64, 96, 256)),
    replace(BASE, name="group5_head_dim64", group=5, head_dim=64),
    replace(BASE, name="float8_group9_head_dim96", pages_dtype="float8_e4m3fn", group=9,
            head_dim=96),
    replace(BASE, name="group16_head_dim256", group=16, head_dim=256, lengths=(70, 0, 64)),
    # Most sequences of a batch have ended.
    replace(BASE, name="group7_head_dim64_page16", group=7, head_dim=64, page_size=16,
            lengths=(0, 0, 0, 15, 0, 0, 333, 0, 0, 0, 64, 16, 0, 0), spare_columns=0),
    replace(BASE, name="float16", dtype="float16"),
    replace(BASE, name="float32", dtype="float32"),
    replace(BASE, name="float32_group8_head_dim96", dtype="float32", group=8, head_dim=96),
    replace(BASE, name="head_dim512", head_dim=512, lengths=(70, 0, 64)),
    replace(BASE, name="group16_head_dim512", group=16, head_dim=512, lengths=(70, 0, 64)),
    replace(BASE, name="float8", pages_dtype="float8_e4m3fn"),
    replace(BASE, name="float8_one_long_row", pages_dtype="float8_e4m3fn",
            lengths=(1, 20 * _P + 1, 0, 2)),
    # Weights times such scales are zero in float16.
    replace(BASE, name="float8_group8_head_dim64", pages_dtype="float8_e4m3fn", group=8,
            head_dim=64, value_scale=2.0**-40),
    # Values of up to 37000, near float16's maximum.
    replace(BASE, name="float8_float16", dtype="float16", pages_dtype="float8_e4m3fn",
            value_scale=2.0**12),
    replace(BASE, name="float8_page16", pages_dtype="float8_e4m3fn", page_size=16,
            lengths=(0, 1, 15, 16, 17, 83)),
    replace(BASE, name="page32", page_size=32, lengths=(0, 1, 31, 32, 33, 101)),
    replace(BASE, name="page16", page_size=16, lengths=(0, 1, 15, 16, 17, 83)),
    replace(BASE, name="page128", page_size=128, lengths=(0, 1, 127, 128, 129, 300)),
    replace(BASE, name="one_row", lengths=(19 * _P + 3,)),
    replace(BASE, name="all_empty", lengths=(0, 0, 0)),
    replace(BASE, name="one_long_row", lengths=(1, 20 * _P + 1, 0, 2)),
    replace(BASE, name="many_short_rows", lengths=tuple(range(1, 25))),
    # More rows than are copied ahead, some of them empty, and some of several blocks.
    replace(BASE, name="short_and_long_rows", page_size=16, group=2, head_dim=64,
            lengths=(0, 5, 16, 40, 1100, *(1, 0, 0, 5, 16, 40) * 5, 600, 0, 0, 3, 530, 1, 16, 0)),
)  # fmt: skip

# Only for plain XLA: shapes of toy models, and oracles in float64.
XLA_ONLY: tuple[DecodeCase, ...] = (
    DecodeCase("float64", (0, 1, 7, 8, 9, 30), page_size=8, head_dim=16, dtype="float64"),
    DecodeCase("head_dim8", (0, 1, 15, 16, 17, 40), page_size=16, head_dim=8, group=2,
               dtype="float32"),
    DecodeCase("page5", (0, 1, 4, 5, 6, 23), page_size=5, head_dim=24, group=3, dtype="float32"),
)  # fmt: skip

# All implementations support sinks; only XLA supports soft caps.
SINKS_AND_CAPS: tuple[DecodeCase, ...] = (
    replace(BASE, name="sinks", head_dim=64, sinks=True),
    replace(XLA_ONLY[0], name="sinks_float64", sinks=True),
    replace(BASE, name="soft_cap", head_dim=64, soft_cap=0.7),
    replace(XLA_ONLY[1], name="both", sinks=True, soft_cap=0.7),
)


def _skewed(rows: int, mean: int) -> tuple[int, ...]:
    """Returns lengths for which the longest tenth of the rows holds half of the tokens."""
    rng = np.random.default_rng(0)
    long_rows = rows // 10
    half = rows * mean // 2

    def share(count):
        weight = rng.uniform(0.5, 1.5, count)
        return np.maximum(1, np.round(weight / weight.sum() * half)).astype(int)

    lengths = np.concatenate([share(long_rows), share(rows - long_rows)])
    return tuple(int(n) for n in rng.permutation(lengths))


def _benchmark(name, lengths, **fields):
    return DecodeCase(name, tuple(lengths), poison=False, spare_columns=0, **fields)


# Measured on a GPU. The rows of a batch are its sequences times its KV heads (8).
BENCHMARK: tuple[DecodeCase, ...] = (
    _benchmark("rows128_32768", [32768] * 128),
    _benchmark("rows512_4096", [4096] * 512),
    _benchmark("rows512_4096_in_order", [4096] * 512, shuffled=False),
    _benchmark("rows512_skewed_4096", _skewed(512, 4096)),
    _benchmark("rows64_1024", [1024] * 64),
    _benchmark("rows8_32768", [32768] * 8),
    # An eighth of rows128_32768, unevenly spread: the same rows after compression by 8.
    _benchmark("rows128_skewed_4096", _skewed(128, 4096)),
    _benchmark("rows8_one_long", [400_000] + [64] * 7),
    _benchmark("rows512_4096_group1", [4096] * 512, group=1),
    _benchmark("rows512_4096_group8", [4096] * 512, group=8),
    _benchmark("rows512_4096_group16", [4096] * 512, group=16),
    _benchmark("rows512_4096_page16", [4096] * 512, page_size=16),
    _benchmark("rows512_4096_page32", [4096] * 512, page_size=32),
    _benchmark("rows512_4096_page128", [4096] * 512, page_size=128),
    _benchmark("rows512_4096_head_dim64", [4096] * 512, head_dim=64),
    _benchmark("rows512_4096_head_dim96", [4096] * 512, head_dim=96),
    _benchmark("rows256_4096_head_dim256", [4096] * 256, head_dim=256),
    _benchmark("rows512_4096_float8", [4096] * 512, pages_dtype="float8_e4m3fn"),
    _benchmark("rows128_32768_float8", [32768] * 128, pages_dtype="float8_e4m3fn"),
)


def _tuning(head_dim, page_size, pages_dtype=None, small=False):
    name = f"head_dim{head_dim}_page{page_size}_{pages_dtype or 'bfloat16'}"
    fields = {"head_dim": head_dim, "page_size": page_size}
    lengths = [1024] * 64 if small else [4096] * 256
    name += "_small" if small else ""
    return _benchmark(name, lengths, pages_dtype=pages_dtype, **fields)


# Shapes for the search of settings; entries for little work come before entries for any work.
TUNING: tuple[DecodeCase, ...] = (
    *(_tuning(head_dim, 64, small=True) for head_dim in (128, 64)),
    *(_tuning(128, page_size) for page_size in (64, 16, 32, 128)),
    *(_tuning(head_dim, 64) for head_dim in (64, 96, 256)),
    *(_tuning(head_dim, 64, pages_dtype="float8_e4m3fn") for head_dim in (64, 128, 256)),
)
