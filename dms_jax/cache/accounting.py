"""What a request used of the cache: reads, live tokens, peak, bytes.

All figures are averages over layers and KV heads, so that a plain cache reads t entries at step t
and holds T tokens after T, whatever the shape of the model.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Usage:
    """Cache use of one request (appendix of the DMS paper: the two budgets of figure 3).

    The figures count what the decisions of this very run led to, to the token. Another run of the
    same tokens in another batch, or another computation of them, may round a decision that is
    close to its threshold the other way, and then its figures differ by the tokens of that one and
    of what follows from it: seldom in float32, often in bfloat16.

    Attributes:
      prompt_tokens, new_tokens: how many were processed and generated.
      kv_reads: key-value entries read by the decode steps, summed over steps and averaged over
        (layer, KV head), the reads that selection costs (Quest) included, and those of a row that
        is judged anew to be cut (SnapKV and its like). A row that each query head reads separately
        counts once per query head.
      peak_tokens: the most live entries right after any token, of the prompt too, averaged over
        (layer, KV head): the papers' peak, that of tokens processed one after another.
      peak_held_tokens: the most entries that were held at once. A chunk of a prompt that is read
        in one pass is held whole, beside what came before, until what it evicts is gone; so it
        depends on the size of the chunks, and on recomputing what was put back.
      live_tokens: live entries at the end, averaged likewise; after a cut (SnapKV and its like), if
        one came with the last token.
      compression_ratio: tokens seen over live entries, both at the end.
      cache_bytes: bytes of the pages held at the end and of the policy's state for this sequence.
      peak_cache_bytes: the same at its highest, the reserve of the running chunk included.
      host_bytes: of values in host memory at the end (KCache); not among the cache's bytes, which
        are the device's.
    """

    prompt_tokens: int
    new_tokens: int
    kv_reads: float
    peak_tokens: float
    peak_held_tokens: float
    live_tokens: float
    compression_ratio: float
    cache_bytes: int
    peak_cache_bytes: int
    host_bytes: int = 0


@dataclasses.dataclass
class Meter:
    """Adds up one request's use from per-step totals over its L * K rows."""

    rows: int
    reads: int = 0
    peak: int = 0
    held: int = 0
    live: int = 0
    peak_bytes: int = 0

    def add(
        self,
        live: Sequence[int] | Int[np.ndarray, " n"],
        reads: Sequence[int] = (),
        *,
        held: int = 0,
    ) -> None:
        """Counts tokens by the live entries right after each, and what decode steps read.

        `held` is what was there at once while they were processed, if that was more.
        """
        if len(live):
            self.live = int(live[-1])
            self.peak = max(self.peak, int(np.max(live)))
        self.held = max(self.held, self.peak, held)
        self.reads += sum(reads)

    def finish(self, live: int) -> None:
        """Says how many entries were left at the end: a cut comes after its token's attention."""
        self.live = live

    def usage(
        self,
        *,
        prompt_tokens: int,
        new_tokens: int,
        seen: int,
        cache_bytes: int,
        host_bytes: int = 0,
    ) -> Usage:
        """Returns the figures so far."""
        live = self.live / self.rows
        return Usage(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            kv_reads=self.reads / self.rows,
            peak_tokens=self.peak / self.rows,
            peak_held_tokens=self.held / self.rows,
            live_tokens=live,
            compression_ratio=seen / live if live else 1.0,
            cache_bytes=cache_bytes,
            peak_cache_bytes=max(self.peak_bytes, cache_bytes),
            host_bytes=host_bytes,
        )
