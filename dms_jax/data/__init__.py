"""Data: sources of documents, packing, and batches that can be stopped and resumed."""

from dms_jax.data.batches import Batches, batches, encode_document
from dms_jax.data.sources import Documents, JsonLines, Source, TextFiles, as_source

__all__ = [
    "Batches",
    "Documents",
    "JsonLines",
    "Source",
    "TextFiles",
    "as_source",
    "batches",
    "encode_document",
]
