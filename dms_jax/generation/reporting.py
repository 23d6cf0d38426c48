"""What becomes of requests between chunks: news is streamed, and those that ended make room."""

import collections
import dataclasses
from collections.abc import Mapping

from dms_jax.generation.programs import Steps
from dms_jax.generation.reading import Reading
from dms_jax.generation.requests import OnTokens, Request, check_finite, record_usage
from dms_jax.generation.runner import Runner
from dms_jax.generation.text import TextTracker


def record_steps(steps: Steps, running: Mapping[int, Request]) -> None:
    """Adds the steps of a chunk to the running requests; a lane ran the first few of them.

    Raises:
      NotNumbersError: logits are not numbers; then nothing is added.
    """
    counts = steps.ran.sum(0).tolist()
    check_finite((request, steps.finite[: counts[lane], lane]) for lane, request in running.items())
    tokens, live, reads = (x.T.tolist() for x in (steps.tokens, steps.live, steps.reads))
    logprobs = None if steps.logprobs is None else steps.logprobs.T.tolist()
    for lane, request in running.items():
        count = counts[lane]
        request.generated += tokens[lane][:count]
        request.live += live[lane][:count]
        request.reads += reads[lane][:count]
        if logprobs is not None:
            request.logprobs += logprobs[lane][:count]


def record_peak_bytes(runner: Runner, running: Mapping[int, Request]) -> None:
    """Adds the pages that are reserved now to the running requests' use of the cache."""
    held = runner.cache_bytes()
    for lane, request in running.items():
        request.meter.peak_bytes = max(request.meter.peak_bytes, held[lane])


@dataclasses.dataclass
class Reporter:
    """Reports on the requests of one call.

    Attributes:
      runner: the runner that holds their sequences.
      tracker: their texts.
      on_tokens: called with every update, if anybody listens.
      keep: whether sequences stay in the cache when their requests end.
      reading: the lanes that read their prompts; nothing but a cancellation ends their requests.
      cancelled: indices of requests to end early; `on_tokens` may add to them.
    """

    runner: Runner
    tracker: TextTracker
    on_tokens: OnTokens | None
    keep: bool
    reading: Reading
    cancelled: set[int]

    def report(self, running: dict[int, Request], waiting: collections.deque[Request]) -> None:
        """Reports a chunk, and then the requests that were cancelled because of its updates.

        Requests that ended are removed from the running ones (by lane) or from those that wait.
        Those that are cancelled while another chunk runs end after it.
        """
        self._report(running, waiting)
        while self._to_end():
            self._report(running, waiting)

    def _to_end(self) -> set[int]:
        """Returns the indices of requests that end early now."""
        if self.runner.unread.any():
            return set()
        return self.cancelled - self.reading.spared(self.cancelled)

    def _report(self, running: dict[int, Request], waiting: collections.deque[Request]) -> None:
        runner = self.runner
        runner.trim()
        held, on_host = runner.cache_bytes(), runner.host_bytes()
        cancelled = self._to_end()
        self.cancelled -= cancelled
        ended, updates = [], []
        for lane, request in running.items():
            if request.index in cancelled and request.remaining:
                request.finish_reason = "cancelled"  # unless its last tokens ended it themselves
            elif lane in self.reading.parts or len(request.generated) == request.reported_tokens:
                continue
            updates.append(self.tracker.news(request))
            if request.finish_reason is not None:
                ended.append(lane)
                record_usage(
                    request,
                    cached=int(runner.seen[lane]),
                    live=int(runner.lengths[:, lane].sum()),
                    cache_bytes=held[lane],
                    host_bytes=on_host[lane],
                )
        for lane in ended:
            del running[lane]
        self.reading.keep(running)
        if ended and not self.keep:
            runner.clear(ended)
        for request in [each for each in waiting if each.index in cancelled]:
            request.finish_reason = "cancelled"
            updates.append(self.tracker.news(request))
            record_usage(request, cached=0, live=0, cache_bytes=0, host_bytes=0)
        for _ in range(len(waiting)):  # once around: the others keep their order
            request = waiting.popleft()
            if request.finish_reason is None:
                waiting.append(request)
        if self.on_tokens is not None:  # last, so that a callback that raises loses no completion
            self.tracker.finish()
            for update in updates:
                self.on_tokens(update)
