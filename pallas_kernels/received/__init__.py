"""The attention weight that cached keys receive from the queries of a chunk."""

from pallas_kernels.received.api import received_attention
from pallas_kernels.received.reference import NEVER, received_weights

__all__ = ["NEVER", "received_attention", "received_weights"]
