"""What becomes of requests between chunks: news is streamed, and those that ended make room."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dms_jax.generation.programs import Steps
from dms_jax.generation.reading import Reading
from dms_jax.generation.requests import OnTokens, Request, Update, check_finite, record_usage
from dms_jax.generation.runner import Runner
from dms_jax.generation.text import TextTracker


def record_steps(steps: Steps, running: Mapping[int, Request]) -> None:
    """Adds the steps of a chunk to the running requests; a lane ran the first few of them.

    Raises:
      NotNumbersError: logits are not numbers; then nothing is added.
    """
    counts = steps.ran.sum(0).tolist()
    if not (steps.finite | ~steps.ran).all():
        check_finite((each, steps.finite[: counts[lane], lane]) for lane, each in running.items())
    tokens, totals = steps.tokens.T.tolist(), np.stack([steps.live, steps.reads])
    logprobs = None if steps.logprobs is None else steps.logprobs.T.tolist()
    for lane, request in running.items():
        count = counts[lane]
        if not count:
            continue
        request.generated += tokens[lane][:count]
        request.steps.append(totals[:, :count, lane])
        if logprobs is not None:
            request.logprobs += logprobs[lane][:count]


def record_peak_bytes(runner: Runner, running: Mapping[int, Request]) -> None:
    """Adds the pages that are reserved now to the running requests' use of the cache."""
    held = runner.cache_bytes()
    for lane, request in running.items():
        request.meter.peak_bytes = max(request.meter.peak_bytes, held[lane])


@dataclasses.dataclass
class _News:
    """What is to be told of a request.

    Attributes:
      request: the request.
      tokens: those since the last news.
      finished: whether it has ended.
      text: text since the last news; None until it is made.
    """

    request: Request
    tokens: list[int]
    finished: bool
    text: str | None


@dataclasses.dataclass
class Reporter:
    """Reports on the requests of one call.

    What ended makes room at once (`settle`). Usages, texts and callbacks take longer, and can wait
    until the device is busy with the next programs (`tell`).

    Attributes:
      runner: the runner that holds their sequences.
      tracker: their texts.
      on_tokens: called with every update, if anybody listens.
      on_told: called after the updates of a chunk.
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
    on_told: Callable[[], None] | None = None
    _ended: list[tuple[Request, dict[str, Any]]] = dataclasses.field(default_factory=list)
    _untold: list[_News] = dataclasses.field(default_factory=list)

    def report(self, running: dict[int, Request], waiting: collections.deque[Request]) -> None:
        """Reports a chunk, and then the requests that were cancelled because of its updates.

        Requests that ended are removed from the running ones (by lane) or from those that wait.
        Those that are cancelled while another chunk runs end after it.
        """
        self.settle(running, waiting)
        if self.on_tokens is None:
            return
        self.tell()
        while self._to_end():
            self.settle(running, waiting)
            self.tell()

    def _to_end(self) -> set[int]:
        """Returns the indices of requests that end early now."""
        if self.runner.unread.any():
            return set()
        return self.cancelled - self.reading.spared(self.cancelled)

    def settle(
        self,
        running: dict[int, Request],
        waiting: collections.deque[Request],
        *,
        cancels: bool = True,
    ) -> None:
        """Ends what has ended, and keeps what is to be told of it; tells what was kept before.

        Without `cancels` nothing ends early: prompts or first tokens may not have been read.
        """
        self.tell()
        runner = self.runner
        runner.trim()
        cancelled = self._to_end() if cancels else set()
        self.cancelled -= cancelled
        ended = []
        for lane, request in running.items():
            if request.index in cancelled and request.remaining:
                request.finish_reason = "cancelled"  # unless its last tokens ended it themselves
            elif lane in self.reading.parts or len(request.generated) == request.reported_tokens:
                continue
            self._keep(request)
            if request.finish_reason is not None:
                ended.append(lane)
                slots = runner.lengths_of(lane)
                usage = dict(cached=int(runner.seen[lane]), live=int(slots.sum()))
                usage |= runner.bytes_of(slots)
                self._ended.append((request, usage))
        for lane in ended:
            del running[lane]
        self.reading.keep(running)
        if ended and not self.keep:
            runner.clear(ended)
        self._settle_waiting(waiting, cancelled)

    def _settle_waiting(self, waiting: collections.deque[Request], cancelled: set[int]) -> None:
        """Does the same for those that wait; chains that left their lane have a first token.

        What was put back in this call waits before all others, of which there may be thousands. It
        used what it held before, or a chain what its copy of the prompt would have.
        """
        put_back = itertools.takewhile(lambda each: each.slots is not None, waiting)
        news = [each for each in put_back if len(each.generated) > each.reported_tokens]
        asked = [each for each in waiting if each.index in cancelled] if cancelled else []
        for request in asked:
            if request.remaining:
                request.finish_reason = "cancelled"  # unless that token ends it itself
            if len(request.generated) == request.reported_tokens:
                news.append(request)
        for request in news:
            self._keep(request)
            if request.finish_reason is not None:
                held = dict(cache_bytes=0, host_bytes=0)  # it never began
                if request.slots is not None:
                    held = self.runner.bytes_of(request.slots)
                record_usage(request, cached=0, live=0, **held)
        if any(request.finish_reason is not None for request in news):
            left = [each for each in waiting if each.finish_reason is None]
            waiting.clear()
            waiting.extend(left)

    def _keep(self, request: Request) -> None:
        """Keeps the news of a request, whose end is known then."""
        text = None
        if self.on_tokens is None or request.sampling.stop_strings:  # its text may be its end
            text = self.tracker.update(request)
        else:
            self.tracker.end(request)
        if self.on_tokens is not None:
            tokens = request.generated[request.reported_tokens :]
            self._untold.append(_News(request, tokens, request.finish_reason is not None, text))
        request.reported_tokens = len(request.generated)

    def tell(self) -> None:
        """Says what the ended ones used, makes the texts of what was kept, and calls back.

        A callback that raises stops it.
        """
        while self._ended:
            request, usage = self._ended[-1]
            record_usage(request, **usage)
            self._ended.pop()  # not before: an interrupt would lose what it has answered
        # All is kept until all texts are made: what an interrupt stops is made by the next call.
        for news in self._untold:
            if news.text is None:
                news.text = self.tracker.update(news.request)
        self.tracker.finish()
        if self.on_tokens is None or not self._untold:
            return
        untold, self._untold = self._untold, []
        for news in untold:
            assert news.text is not None
            self.on_tokens(Update(news.request.index, news.tokens, news.text, news.finished))
        if self.on_told is not None:
            self.on_told()
