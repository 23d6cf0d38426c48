"""What a server has done and holds, as Prometheus reads it from /metrics."""

import time
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dms_jax.generation import Completion
from dms_jax.generation.requests import FinishReason
from dms_jax.serving.messages import State

_FAILED = "failed"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counters of one server, and gauges of its engine."""

    def __init__(self) -> None:
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
        self._running = self._gauge("running", "Answers in lanes")
        self._waiting = self._gauge("waiting", "Answers that wait for a lane")
        self._live = self._gauge(
            "live_tokens",
            "Live cache entries of running answers, averaged over layers and KV heads",
        )
        self._in_use = self._gauge("pages_in_use", "Pages of the pool")
        self._free = self._gauge("pages_free", "Free pages of the pool")

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

    def text(self, state: State) -> bytes:
        """All of them in Prometheus's text format, with what the engine holds."""
        figures = state.figures
        self._running.set(figures.running)
        self._waiting.set(state.waiting)
        self._live.set(figures.live_tokens)
        self._in_use.set(figures.pages_in_use)
        self._free.set(figures.pages_free)
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"dms_jax_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"dms_jax_{name}", what, registry=self._registry, buckets=_SECONDS)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"dms_jax_{name}", what, registry=self._registry)
