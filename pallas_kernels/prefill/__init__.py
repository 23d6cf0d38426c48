"""Prompt attention of a chunk of queries over the retained paged keys and over the chunk itself."""

from pallas_kernels.prefill.api import prefill_attention

__all__ = ["prefill_attention"]
