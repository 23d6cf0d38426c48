"""Named shapes of prompt attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillCase:
    """One problem: a chunk, its past, and the evicted share of its keys.

    Attributes:
      counts: number of real queries of each sequence.
      past: number of used slots of each row [B][K].
      M: number of pages that a row can hold.
      evicted: probability that a key of the chunk is evicted.
      sinks: whether each query head has a sink.
      soft_cap: soft cap of the scores; None for none.
    """

    name: str
    T: int
    H: int
    K: int
    D: int
    P: int
    M: int
    counts: tuple[int, ...]
    past: tuple[tuple[int, ...], ...]
    window: int
    evicted: float = 0.5
    dtype: str = "bfloat16"
    sinks: bool = False
    soft_cap: float | None = None

    @property
    def B(self) -> int:
        """B, the number of sequences."""
        return len(self.counts)


CONTRACT = (
    PrefillCase("plain", 128, 8, 2, 128, 64, 4, (128, 128), ((200, 64), (0, 130)), 32),
    PrefillCase("first_chunk", 128, 4, 1, 128, 64, 2, (128,), ((0,),), 40),
    PrefillCase("no_pages", 130, 4, 2, 64, 64, 0, (130,), ((0, 0),), 20),
    PrefillCase("page_edges", 64, 4, 4, 64, 64, 3, (50,), ((63, 64, 65, 1),), 16),
    PrefillCase("ragged", 150, 4, 2, 128, 64, 3, (150, 1, 0), ((100, 9), (70, 0), (5, 5)), 30),
    PrefillCase("window_zero", 70, 4, 2, 64, 64, 2, (70,), ((90, 128),), 0),
    PrefillCase("keep_all", 96, 4, 2, 64, 64, 2, (96,), ((100, 3),), 5000, evicted=0.0),
    PrefillCase("evict_all", 160, 4, 2, 64, 64, 2, (160,), ((100, 3),), 20, evicted=1.0),
    PrefillCase("small_pages", 70, 4, 2, 64, 16, 10, (70,), ((150, 17),), 10),
    # More key tiles than any ring of buffers holds.
    PrefillCase("long_past", 70, 4, 2, 64, 64, 24, (70,), ((1400, 200),), 10),
    PrefillCase("large_pages", 70, 4, 2, 64, 256, 2, (70,), ((300, 20),), 10),
    PrefillCase("sixteen_groups", 70, 16, 1, 64, 64, 2, (70,), ((90,),), 10),
    PrefillCase("odd_group", 70, 3, 1, 128, 64, 2, (70,), ((90,),), 10),
    PrefillCase("dim_96", 70, 4, 2, 96, 64, 2, (70,), ((90, 128),), 10),
    PrefillCase("dim_256", 70, 2, 1, 256, 64, 3, (70,), ((130,),), 10),
    PrefillCase("dim_512", 70, 2, 1, 512, 64, 3, (70,), ((130,),), 10),
    PrefillCase("float16", 70, 4, 2, 128, 64, 2, (70,), ((90, 128),), 10, dtype="float16"),
    PrefillCase("float32", 130, 4, 2, 64, 64, 2, (130,), ((90, 128),), 33, dtype="float32"),
)

# Only XLA supports these.
SINKS_AND_CAPS = (
    PrefillCase("sinks", 150, 4, 2, 32, 16, 3, (150, 20), ((40, 9), (0, 5)), 30, sinks=True),
    PrefillCase("soft_cap", 70, 4, 2, 32, 16, 3, (70,), ((40, 9),), 30, soft_cap=0.7),
    PrefillCase("both", 70, 4, 2, 32, 16, 3, (70,), ((40, 9),), 30, 0.5, "float32", True, 0.7),
)
