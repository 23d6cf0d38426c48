"""The cache use of a request: reads, live tokens, peak, bytes.

Reads and tokens are averages over layers and KV heads, so for any model the vanilla cache reads t
entries at step t and holds T tokens after T.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Usage:
    """Cache use of one request (appendix of the DMS paper: the two budgets of figure 3).

    The figures count exactly the decisions of this run. Another run of the same tokens, in another
    batch or with other kernels, may round a decision near its threshold differently; its figures
    then differ by that token and the consequences: seldom in float32, often in bfloat16.

    Attributes:
      prompt_tokens: tokens of the prompt.
      new_tokens: tokens generated.
      kv_reads: key-value entries read by the decode steps, summed over steps and averaged over
        (layer, KV head). Reads for page selection (Quest) count, as do reads to score a row before
        an eviction (SnapKV and similar policies). A row that each query head reads separately
        counts once per query head.
      peak_tokens: the most live entries after any token, prompt tokens included, averaged over
        (layer, KV head): the papers' peak, as if tokens were processed one by one.
      peak_held_tokens: the most entries held at once, averaged in the same way. A one-pass prompt
        chunk is held in full, in addition to earlier entries, until its evictions take effect, so
        this figure depends on the chunk size and on preemption.
      live_tokens: live entries at the end, averaged in the same way, after any eviction by the last
        token. A cut of whole rows (SnapKV and similar policies) by a token that completed a stop
        string is not counted if later tokens ran before the string was found.
      compression_ratio: tokens seen divided by live entries, both at the end.
      cache_bytes: device bytes of this sequence at the end: the pages of its entries, without
        further reserved pages, and the policy's state. For a request that ends while it waits: the
        bytes before its preemption; 0 if it never started.
      peak_cache_bytes: the highest device bytes, with the pages reserved for the running chunk.
      host_bytes: bytes of values in host memory at the end (KCache), which no other figure
        includes.
      prefilled_tokens: tokens prefilled for this request: all of its prompt, or none if it shares
        the prefill of an equal request. Tokens recomputed after a preemption count again. The other
        figures are as if the request had prefilled its prompt itself.
      cached_tokens: tokens of the prompt from a cached prefix.
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
    prefilled_tokens: int = 0
    cached_tokens: int = 0


@dataclasses.dataclass
class Meter:
    """Adds up one request's use from per-step totals over its L * K rows.

    Attributes:
      rows: number of rows, L * K.
      reads: entries read so far.
      peak: the most live entries so far.
      held: the most entries held at once so far.
      live: live entries after the last token.
      peak_bytes: the most bytes so far.
      prefilled: prompt tokens computed so far.
      cached: prompt tokens that were in the cache already.
    """

    rows: int
    reads: int = 0
    peak: int = 0
    held: int = 0
    live: int = 0
    peak_bytes: int = 0
    prefilled: int = 0
    cached: int = 0

    def fork(self, other: "Meter") -> None:
        """Takes over the use of an equal prompt prefilled in another lane, except its bytes."""
        self.reads, self.peak, self.held, self.live = (
            other.reads,
            other.peak,
            other.held,
            other.live,
        )

    def add(
        self,
        live: Sequence[int] | Int[np.ndarray, " n"],
        reads: Sequence[int] = (),
        *,
        held: int = 0,
    ) -> None:
        """Adds the use of one or more tokens.

        Args:
          live: live entries after each token.
          reads: entries that each decode step read.
          held: the most entries held at once while the tokens were processed.
        """
        if len(live):
            self.live = int(live[-1])
            self.peak = max(self.peak, int(max(live)))
        self.held = max(self.held, self.peak, held)
        self.reads += sum(reads)

    def read_before(self, live: int) -> None:
        """Adds the tokens of a cached prefix, within which rows never shrank.

        Args:
          live: live entries after it, which is also the most after any of its tokens.
        """
        self.live, self.peak, self.held = live, max(self.peak, live), max(self.held, live)

    def finish(self, live: int) -> None:
        """Sets the live entries at the end, after any eviction by the last token."""
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
            prefilled_tokens=self.prefilled,
            cached_tokens=self.cached,
        )
