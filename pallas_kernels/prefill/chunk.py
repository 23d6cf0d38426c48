"""The chunk and the past: arguments of implementations of prompt attention."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """The keys and values of a chunk of a prompt; see `prefill_attention` for the fields."""

    k: Any
    v: Any
    evicted: Any
    counts: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Past:
    """The pages of the tokens before the chunk; see `prefill_attention` for the fields."""

    k_pages: Any
    v_pages: Any
    page_table: Any
    lengths: Any
    until: Any

    @property
    def page_size(self) -> int:
        """P, the number of slots in a page."""
        return self.k_pages.shape[1]
