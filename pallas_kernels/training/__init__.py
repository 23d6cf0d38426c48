"""Training attention with the windowed key bias of Dynamic Memory Sparsification (DMS)."""

from pallas_kernels.training.api import retrofit_attention

__all__ = ["retrofit_attention"]
