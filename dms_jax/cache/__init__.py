"""The paged pool for a whole model, its host-side bookkeeping and the accounting of its use."""

from dms_jax.cache.accounting import Usage
from dms_jax.cache.pages import PageAllocator
from dms_jax.cache.pool import Cache, Pool, compact, load, store

__all__ = ["Cache", "PageAllocator", "Pool", "Usage", "compact", "load", "store"]
