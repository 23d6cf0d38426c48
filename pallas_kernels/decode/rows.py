"""Rows of pages: the argument of implementations of decode attention."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The pages of a pool, and the pages of each row.

    Attributes:
      k_pages: [N, P, D] key pages of the pool.
      v_pages: [NV, P, D] value pages of the pool.
      page_table: [R, M] page numbers of each row; entries past the row's length may hold anything.
      lengths: [R] number of live slots of each row.
      k_scales: [N, P] factor of each slot's key, for float8 pages; else None.
      v_scales: the same for values.
    """

    # Arrays; jax also replaces them by shapes and placeholders.
    k_pages: Any
    v_pages: Any
    page_table: Any
    lengths: Any
    k_scales: Any = None
    v_scales: Any = None

    @property
    def page_size(self) -> int:
        """P, the number of slots in a page."""
        return self.k_pages.shape[1]

    @property
    def slots(self) -> int:
        """M * P, the number of slots that a row of the page table can hold."""
        return self.page_table.shape[1] * self.page_size

    @property
    def scales(self) -> tuple[Any, ...]:
        """The scales of keys and values, or nothing."""
        return () if self.k_scales is None else (self.k_scales, self.v_scales)
