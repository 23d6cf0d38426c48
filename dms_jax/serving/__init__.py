"""An OpenAI-compatible server over one engine: `dms-jax serve`.

    server.py            starts the process of HTTP, and ends it when signals say so
    service.py           the thread that runs the engine, which nothing else touches
    engine_server.py     the service for another process, over a socket
    messages.py          what the processes say to each other
    starting.py          how they start each other

    http_process.py      the process of HTTP
    connections.py       its connections, whose time and number are limited
    access.py            who may ask: keys, hosts, web pages
    reading.py           bodies are read: small ones there, large ones in a process of their own
    reading_process.py   that process
    engine_client.py     the engine for its coroutines, over that socket
    app.py               the addresses, and what becomes of each HTTP request (Starlette)
    protocol.py          what a request asks for: JSON is read, and refused where it is not served
    replies.py           the JSON of answers, whole and in chunks
    metrics.py           figures for Prometheus

`Service` serves from Python too; it knows nothing of HTTP. The rest needs the extra `serve`.
"""

from dms_jax.serving.service import Piece, Service

__all__ = ["Piece", "Service"]
