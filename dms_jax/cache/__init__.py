"""The paged pool of keys and values for a whole model, its page allocator and its accounting."""

from dms_jax.cache.accounting import Usage
from dms_jax.cache.pages import PageAllocator
from dms_jax.cache.pool import Cache, Pool, compact, load, store

__all__ = ["Cache", "PageAllocator", "Pool", "Usage", "compact", "load", "store"]
