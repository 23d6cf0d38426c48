"""Named shapes of the attention weight that slots receive, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReceivedCase:
    """One problem: a chunk of queries, and the slots of every row.

    Attributes:
      counts: number of real, consecutive queries of each sequence.
      starts: position of the first query of each sequence.
      lengths: number of slots in use of each row [B][K].
      slots: S, the number of slots of each row.
      shuffled: whether slots were reused, so that positions are unordered and some are missing.
    """

    name: str
    T: int
    H: int
    K: int
    D: int
    slots: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    shuffled: bool = False
    dtype: str = "bfloat16"

    @property
    def B(self) -> int:
        """B, the number of sequences."""
        return len(self.counts)


CONTRACT = (
    ReceivedCase("plain", 256, 4, 2, 128, 384, (256, 256), (0, 100), ((256, 256), (356, 356))),
    ReceivedCase("second_chunk", 128, 6, 1, 64, 512, (128,), (256,), ((384,),)),
    ReceivedCase(
        "ragged", 150, 4, 2, 64, 300, (150, 1, 0), (130, 7, 0), ((280, 150), (8, 3), (0, 0))
    ),
    ReceivedCase(
        "reused", 140, 4, 2, 64, 300, (140, 30), (500, 400), ((300, 150), (64, 250)), True
    ),
    ReceivedCase("one_head", 64, 1, 1, 64, 64, (64,), (0,), ((64,),)),
    ReceivedCase("group_of_eight", 70, 8, 1, 128, 130, (70,), (60,), ((130,),)),
    ReceivedCase("odd_group", 130, 3, 1, 96, 200, (130,), (60,), ((190,),)),
    ReceivedCase("dim_256", 70, 2, 1, 256, 200, (70,), (100,), ((170,),)),
    # More key tiles than any ring of buffers holds.
    ReceivedCase("long_past", 70, 2, 1, 64, 1200, (70,), (1100,), ((1170,),)),
    ReceivedCase("float32", 70, 4, 2, 64, 200, (70,), (90,), ((160, 50),), dtype="float32"),
    ReceivedCase("small_heads", 40, 4, 2, 8, 70, (33,), (20,), ((53, 20),), dtype="float32"),
)
