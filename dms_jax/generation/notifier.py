"""The notifier: which requests have ended, and who hears of it.

A request that ends frees its lane at once (`Scheduler.finish`). Texts, usage and callbacks take
longer, and can wait until the device is busy with the next programs.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from dms_jax.generation.requests import OnTokens, Request, Update, record_usage
from dms_jax.generation.text import TextTracker


@dataclasses.dataclass
class _Pending:
    """An update that is not sent yet.

    Attributes:
      request: the request.
      tokens: token ids since the last update.
      finished: whether the request has ended.
      text: text since the last update; None until it is decoded.
    """

    request: Request
    tokens: list[int]
    finished: bool
    text: str | None


class Notifier:
    """Decides which requests have ended, decodes texts, records usage, and calls back.

    Args:
      tracker: decodes the texts.
      on_tokens, on_notified, on_end: see `engine.Source`.
    """

    def __init__(
        self,
        tracker: TextTracker,
        on_tokens: OnTokens | None,
        on_notified: Callable[[], None] | None,
        on_end: Callable[[Request], None] | None,
    ):
        self.tracker, self.on_tokens = tracker, on_tokens
        self.on_notified, self.on_end = on_notified, on_end
        self._ended = collections.deque[tuple[Request, dict[str, Any]]]()  # with their usage
        self._pending = collections.deque[_Pending]()
        self._calls = collections.deque[Callable[[], None]]()  # of listeners, with final text

    def settle(self, request: Request) -> None:
        """Sets the finish reason of a request whose new tokens end it, and queues its update."""
        text = None
        if request.sampling.stop_strings:  # text may end it
            text = self.tracker.update(request)
        else:
            self.tracker.end(request)
        if self.on_tokens is not None:
            tokens = request.generated[request.reported_tokens :]
            self._pending.append(_Pending(request, tokens, request.finish_reason is not None, text))
        request.reported_tokens = len(request.generated)

    def add_end(self, request: Request, usage: dict[str, Any]) -> None:
        """Queues the end of a request with its usage; see `record_usage`."""
        self._ended.append((request, usage))

    def notify(self) -> None:
        """Records usage, decodes texts, and calls back; a callback that raises stops it."""
        collections.deque(self.notify_by_parts(), maxlen=0)

    def notify_by_parts(self) -> Iterator[None]:
        """Like `notify`, one request at a time; closing the generator leaves the rest queued.

        Nothing leaves a queue before it is done: after an interrupt the next call goes on.
        """
        while self._ended:
            request, usage = self._ended[0]
            if self.on_tokens is None and not request.sampling.stop_strings:
                self.tracker.decode(request)
            record_usage(request, **usage)
            self._ended.popleft()
            if self.on_end is not None:
                self._calls.append(functools.partial(self.on_end, request))
            yield
        while self._pending:
            each = self._pending[0]
            text = self.tracker.update(each.request) if each.text is None else each.text
            self._pending.popleft()
            assert self.on_tokens is not None
            update = Update(each.request.index, each.tokens, text, each.finished)
            self._calls.append(functools.partial(self.on_tokens, update))
            yield
        if not self._calls:
            return
        calls, self._calls = self._calls, collections.deque()
        try:
            while calls:
                yield  # not after the last one, which `on_notified` must follow
                calls.popleft()()
        except GeneratorExit:
            self._calls = calls
            raise
        if self.on_notified is not None:
            self.on_notified()
