"""An OpenAI-compatible server over one engine: `dms-jax serve`.

    app.py        the addresses, and what becomes of each HTTP request (Starlette)
    protocol.py   what a request asks for: its JSON is read, and refused where it is not served
    replies.py    the JSON of answers, whole and in chunks
    metrics.py    figures for Prometheus
    service.py    the thread that runs the engine, which nothing above it touches

`Service` serves from Python too; it knows nothing of HTTP. The rest needs the extra `serve`.
"""

from dms_jax.serving.service import Piece, Service

__all__ = ["Piece", "Service"]
