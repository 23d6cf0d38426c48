"""Data: sources of documents, packing, and resumable batches."""

from dms_jax.data.batches import Batches, batches
from dms_jax.data.documents import Documents, Exchange, Source
from dms_jax.data.records import Fields
from dms_jax.data.sources import JsonLines, TextFiles, as_source
from dms_jax.data.tables import Tables
from dms_jax.data.tokenization import encode_answers, encode_document

__all__ = [
    "Batches",
    "Documents",
    "Exchange",
    "Fields",
    "JsonLines",
    "Source",
    "Tables",
    "TextFiles",
    "as_source",
    "batches",
    "encode_answers",
    "encode_document",
]
