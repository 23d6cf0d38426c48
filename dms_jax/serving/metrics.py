"""What a server has done and holds, as Prometheus reads it from /metrics."""

import time
from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dms_jax.generation import Completion
from dms_jax.generation.requests import FinishReason
from dms_jax.serving.service import Service

_FAILED = "failed"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counters of one server, and gauges that read its service.

    Args:
      service: the service.
    """

    def __init__(self, service: Service):
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests answered", "path", "status")
        self._ended = self._counter("answers", "Answers by why they ended", "reason")
        for reason in (*get_args(FinishReason), _FAILED):  # those that never were are 0
            self._ended.labels(reason)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts of answers")
        self._new = self._counter("generation_tokens", "Tokens of answers")
        self._reads = self._counter("kv_reads", "Cache entries read, averaged over rows")
        self._first = self._histogram("first_token_seconds", "From a request to its first token")
        self._whole = self._histogram("answer_seconds", "From a request to the end of an answer")
        self._gauge("running", "Answers in lanes", lambda: service.figures.running)
        self._gauge("waiting", "Answers that wait for a lane", lambda: service.waiting)
        self._gauge(
            "live_tokens",
            "Live cache entries of running answers, averaged over layers and KV heads",
            lambda: service.figures.live_tokens,
        )
        self._gauge("pages_in_use", "Pages of the pool", lambda: service.figures.pages_in_use)
        self._gauge("pages_free", "Free pages of the pool", lambda: service.figures.pages_free)

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP request."""
        self._requests.labels(path, str(status)).inc()

    def began(self, since: float) -> None:
        """Counts the first token of an answer; `since` is of `time.monotonic`."""
        self._first.observe(time.monotonic() - since)

    def ended(self, completion: Completion, since: float) -> None:
        """Counts an answer that ended, with its tokens, reads and seconds."""
        self._ended.labels(completion.finish_reason).inc()
        self._prompt.inc(completion.usage.prompt_tokens)
        self._new.inc(completion.usage.new_tokens)
        self._reads.inc(completion.usage.kv_reads)
        self._whole.observe(time.monotonic() - since)

    def failed(self) -> None:
        """Counts an answer that an error ended."""
        self._ended.labels(_FAILED).inc()

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"dms_jax_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"dms_jax_{name}", what, registry=self._registry, buckets=_SECONDS)

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"dms_jax_{name}", what, registry=self._registry).set_function(value)
