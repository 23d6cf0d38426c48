"""The options of an engine, which everything that generates takes as keyword arguments.

`EngineOptions` says what they are and checks them. `EngineKeywords` gives type checkers the names
of those that `generate`, `score`, `evaluate` and `Conversation` pass on to `Engine` as they are.
"""

import dataclasses
from typing import Annotated, TypedDict

from dms_jax.cache.quantization import KV_DTYPES, format_of
from dms_jax.checks import Count, CountOnDevice, Options, Positive


class EngineKeywords(TypedDict, total=False):
    """Options that are passed on; see `EngineOptions`."""

    page_size: CountOnDevice
    prefill_chunk: CountOnDevice
    prefill_tokens: CountOnDevice
    table_width: Count | None
    kv_dtype: str | None


@dataclasses.dataclass(frozen=True)
class EngineOptions(Options):
    """How an engine stores and runs sequences.

    Attributes:
      num_lanes: the most sequences in the cache at a time.
      max_tokens: length of the longest sequence, prompt and answer, for which the page pool is
        sized; None for all of the model's positions.
      memory: bytes for the page pool, over all devices; None for what the sequences can need,
        within the free memory.
      chunk: decode steps between two looks at the requests, no more than `max_tokens`; up to four
        runs of one compiled program, as long as each has eight steps and they divide the chunk.
      page_size: slots per page.
      prefill_chunk: prompt tokens of one sequence per compiled program; shorter prompts have
        programs of a half or, of tokens that a policy reads one by one, a quarter and a sixteenth.
      prefill_tokens: prompt tokens of all sequences together per compiled program; prompts of half
        a chunk and less have programs of a half where padding is left out, a few of an eighth.
      table_width: pages per row in the compiled page table. None lets it grow to 16, 64, 256, ...
        pages, up to what `max_tokens` need, with one compilation for each width.
      kv_dtype: "float8_e4m3" stores keys and values in 8 bits, "int4" in 4 (an experiment; read
        by XLA alone); None uses the model's dtype.
    """

    num_lanes: CountOnDevice
    max_tokens: Count | None
    memory: Annotated[Positive | None, "give bytes"]
    chunk: CountOnDevice
    page_size: CountOnDevice = 64
    prefill_chunk: CountOnDevice = 512
    prefill_tokens: CountOnDevice = 8192
    table_width: Count | None = None
    kv_dtype: Annotated[str | None, f"give {' or '.join(map(repr, KV_DTYPES))}"] = None

    def __post_init__(self):
        super().__post_init__()
        format_of(self.kv_dtype)
